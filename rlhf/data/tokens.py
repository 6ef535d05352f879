"""From records to token ids: what each phase sees of an example, and the cache of it.

The response of an example always ends in the end token, in all three phases: SFT learns to say it,
the reward model scores at it, PPO is rewarded for it. Lengths are explicit; nothing is ever told
from padding, which may well have the same id as the end token. An example that is too long is left
out and counted, since a response that was cut has no end to learn from.

Column ``length`` counts the tokens of an example, of a pair those of its longer sequence; equal
numbers in column ``group`` mean equal prompts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.config.choices import Phase, Template
from rlhf.config.schema import RunConfig
from rlhf.data.chat import ChatTemplate
from rlhf.data.records import Record
from rlhf.data.splits import Part
from rlhf.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMAT_VERSION = 2  # counts up when the columns below change their meaning


@dataclass(frozen=True)
class TokenLimits:
    """How long an example of a phase may be; longer ones are left out."""

    sft: int
    reward: int
    dpo: int
    prompt: int

    @classmethod
    def of(cls, config: RunConfig) -> TokenLimits:
        """Return the limits of a run."""
        return cls(
            sft=config.sft.max_tokens,
            reward=config.reward.max_tokens,
            dpo=config.dpo.max_tokens,
            prompt=config.rollout.max_prompt_tokens,
        )


class TokenData(NamedTuple):
    """A phase's examples as token ids; column ``row`` points to the record of the part."""

    train: Dataset
    eval: Dataset
    left_out: dict[str, int]


class Encoder:
    """Turns text into ids with one tokenizer, prompts and responses apart."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Template = Template.plain
    ) -> None:
        """Take the tokenizer; ``template`` is how it shall write conversations.

        Raises:
            DataError: the tokenizer's chat template is asked for and cannot be used.
        """
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer) if template is Template.chat else None
        self.end_id: int = tokenizer.eos_token_id

    def opening(self) -> list[int]:
        """Ids that the tokenizer puts before every text: none, or its opening token."""
        return self._open([""])[0]

    def prompts(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that begin a sequence, after the opening token of a tokenizer with one."""
        if self._chat is None:
            return self._open(texts)
        return self._ids([self._chat.prompt(text) for text in texts])

    def responses(self, prompts: list[str], texts: list[str]) -> list[list[int]]:
        """Ids of texts that end the sequences of ``prompts``, the end token included."""
        if self._chat is None:
            return self.endings(texts)
        pairs = list(zip(prompts, texts, strict=True))
        openings = [self._chat.prompt(prompt) for prompt in prompts]
        endings = [self._chat.response(prompt, text) for prompt, text in pairs]
        wholes = self._ids([a + b for a, b in zip(openings, endings, strict=True)])
        # A sequence begins with the ids that a rollout is given: where the tokenizer would join the
        # last letters of the prompt with the first of the response, the response is encoded alone.
        return [
            whole[len(opening) :] if whole[: len(opening)] == opening else apart
            for whole, opening, apart in zip(
                wholes, self._ids(openings), self._ids(endings), strict=True
            )
        ]

    def endings(self, texts: list[str]) -> list[list[int]]:
        """Ids of plain texts without an opening token, the end token included."""
        return [[*ids, self.end_id] for ids in self._ids(texts)]

    def _open(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts).input_ids if texts else []
        return [ids[:-1] if len(ids) > 1 and ids[-1] == self.end_id else ids for ids in encoded]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False).input_ids
        return encoded


Columns = dict[str, list[Any]]
Rows = list[tuple[int, Record]]


class Limit(NamedTuple):
    """The most tokens that an example may have, and the key that says so."""

    key: str
    tokens: int


def sft_columns(rows: Rows, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Whole sequences; ``prompt_tokens`` of them are not the response.

    Plain text has no prompt and stays as it is, whatever the template.
    """
    left_out: Counter[str] = Counter()
    answered = [(i, r) for i, r in rows if r.text is None and r.prompt and r.chosen]
    plain = [(i, r) for i, r in rows if r.text is not None]
    left_out["no response"] = len(rows) - len(answered) - len(plain)
    questions = [r.prompt or "" for _, r in answered]
    prompts = encoder.prompts(questions) + [encoder.opening()] * len(plain)
    responses = encoder.responses(questions, [r.chosen or "" for _, r in answered])
    responses += encoder.endings([r.text or "" for _, r in plain])
    indices = [index for index, _ in (*answered, *plain)]
    columns: Columns = {"row": [], "ids": [], "prompt_tokens": [], "length": []}
    for index, prompt, response in sorted(zip(indices, prompts, responses, strict=True)):
        length = len(prompt) + len(response)
        if length > limit.tokens:
            left_out[f"longer than {limit.key}={limit.tokens}"] += 1
            continue
        columns["row"].append(index)
        columns["ids"].append(prompt + response)
        columns["prompt_tokens"].append(len(prompt))
        columns["length"].append(length)
    return columns, left_out


def pair_columns(rows: Rows, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Pairs of whole sequences with a common prompt."""
    left_out: Counter[str] = Counter()
    usable = [(i, r) for i, r in rows if r.prompt and r.chosen and r.rejected]
    left_out["no pair of responses"] = len(rows) - len(usable)
    texts = [r.prompt or "" for _, r in usable]
    prompts = encoder.prompts(texts)
    chosen = encoder.responses(texts, [r.chosen or "" for _, r in usable])
    rejected = encoder.responses(texts, [r.rejected or "" for _, r in usable])
    names = ("row", "chosen_ids", "rejected_ids", "prompt_tokens", "length", "group")
    columns: Columns = {name: [] for name in names}
    groups: dict[tuple[int, ...], int] = {}
    for (index, _), prompt, better, worse in zip(usable, prompts, chosen, rejected, strict=True):
        length = len(prompt) + max(len(better), len(worse))
        if better == worse:
            left_out["both responses have the same tokens"] += 1
        elif length > limit.tokens:
            left_out[f"longer than {limit.key}={limit.tokens}"] += 1
        else:
            group = groups.setdefault(tuple(prompt), len(groups))
            values = (index, prompt + better, prompt + worse, len(prompt), length, group)
            for name, value in zip(names, values, strict=True):
                columns[name].append(value)
    return columns, left_out


def prompt_columns(rows: Rows, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Prompts to answer."""
    left_out: Counter[str] = Counter()
    usable = [(i, r) for i, r in rows if r.prompt]
    left_out["no prompt"] = len(rows) - len(usable)
    columns: Columns = {"row": [], "ids": []}
    for (index, _), ids in zip(
        usable, encoder.prompts([r.prompt or "" for _, r in usable]), strict=True
    ):
        if len(ids) > limit.tokens:
            left_out[f"longer than {limit.key}={limit.tokens}"] += 1
        else:
            columns["row"].append(index)
            columns["ids"].append(ids)
    return columns, left_out


def columns_for(
    phase: Phase, limits: TokenLimits
) -> tuple[Callable[[Rows, Encoder, Limit], tuple[Columns, Counter[str]]], Limit]:
    """Return the function that makes a phase's columns, and the limit that it keeps."""
    return {
        Phase.sft: (sft_columns, Limit("sft.max_tokens", limits.sft)),
        Phase.reward: (pair_columns, Limit("reward.max_tokens", limits.reward)),
        Phase.dpo: (pair_columns, Limit("dpo.max_tokens", limits.dpo)),
        Phase.ppo: (prompt_columns, Limit("rollout.max_prompt_tokens", limits.prompt)),
    }[phase]


def tokenise(
    part: Part,
    phase: Phase,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limits: TokenLimits,
    cache_dir: Path,
    template: Template = Template.plain,
) -> TokenData:
    """Token ids of a phase's examples, from the cache where they were made before.

    The first process to hold the lock builds, the others on the node wait for the lock and not in
    a collective: tokenising for an hour cannot time out. The cache is Arrow, keyed by everything
    that goes into it.

    Raises:
        DataError: the cache folder cannot be made, or the template cannot be used.
    """
    from datasets import Dataset
    from filelock import FileLock

    columns_of, limit = columns_for(phase, limits)
    key = cache_key(part, phase, tokenizer, limit=limit.tokens, template=template)
    folder = cache_dir / "tokens" / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache_dir} cannot be written ({error.strerror}): choose another "
            "folder with data.cache_dir=FOLDER, or RLHF_CACHE in the environment"
        ) from error
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            encoder = Encoder(tokenizer, template)
            total: Counter[str] = Counter()
            for side, records in (("train", part.train), ("eval", part.eval)):
                columns, left_out = columns_of(list(enumerate(records)), encoder, limit)
                total += left_out
                # One shard, also of nothing: datasets 5.2 cannot read back a data set without any.
                Dataset.from_dict(columns).save_to_disk(building / side, num_shards=1)
            (building / "left_out.json").write_text(json.dumps(total))
            building.rename(folder)
    left_out = json.loads((folder / "left_out.json").read_text())
    sides = [Dataset.load_from_disk(str(folder / side)) for side in ("train", "eval")]
    return TokenData(sides[0], sides[1], left_out)


def cache_key(
    part: Part,
    phase: Phase,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int,
    template: Template = Template.plain,
) -> str:
    """Hash of the records, the phase, the limit, the template, the tokenizer and the format."""
    digest = hashlib.sha256(f"{FORMAT_VERSION}/{phase}/{limit}".encode())
    identity = tokenizer_identity(tokenizer)
    if template is Template.chat:
        identity["chat_template"] = tokenizer.chat_template
    digest.update(json.dumps(identity, sort_keys=True).encode())
    for records in (part.train, part.eval):
        digest.update(b"\x00side")
        for record in records:
            digest.update(json.dumps(record).encode())
    return digest.hexdigest()[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What makes two tokenizers give the same ids: their vocabulary and special tokens."""
    return {
        "vocabulary": tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else tokenizer.get_vocab(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }
