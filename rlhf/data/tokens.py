"""Convert records to the token ids that each phase uses, and cache them.

The response of an example always ends in the end token: SFT and DPO learn to produce this token,
and the reward model gives its score there. Lengths are stored explicitly and never derived from
padding, which may have the same id as the end token. An example that is too long is dropped and
counted, since a truncated response would not end in the end token.

Column ``length`` counts the tokens of an example, or of the longer sequence of a pair; equal
numbers in column ``group`` mean equal prompts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.atomic import replace_atomically
from rlhf.base.errors import CheckpointError, DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.hashing import sha256_of
from rlhf.base.manifest import MANIFEST, check_files, file_identities
from rlhf.base.stored_files import OTHERS, read_json
from rlhf.base.trust import is_trusted, keep_others_from_writing, make_own_folder
from rlhf.config.choices import Phase, Template
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LEFT_OUT = "left_out.json"
FORMAT_VERSION = 3  # increase it when columns of the cache change their meaning


class TokenData(NamedTuple):
    """A phase's examples as token ids; column ``row`` is the record's index in train or eval."""

    train: Dataset
    eval: Dataset
    left_out: dict[str, int]


Columns = dict[str, list[Any]]
Records = list[tuple[int, Record]]


class Limit(NamedTuple):
    """The maximum tokens of an example, and the configuration key that sets it."""

    key: str
    tokens: int


def find_token_limit(phase: Phase, config: RunConfig) -> Limit:
    """Return the maximum tokens of a phase's examples; longer examples are dropped."""
    if phase is Phase.ppo:
        return Limit("rollout.max_prompt_tokens", config.rollout.max_prompt_tokens)
    return Limit(f"{phase}.max_tokens", getattr(config, phase.value).max_tokens)


def _add_row(
    columns: Columns, left_out: Counter[str], limit: Limit, tokens: int, *values: Any
) -> None:
    """Append ``values``, one to each column; drop and count an example of too many ``tokens``."""
    if tokens > limit.tokens:
        left_out[f"longer than {limit.key}={limit.tokens}"] += 1
        return
    for column, value in zip(columns.values(), values, strict=True):
        column.append(value)


def sft_columns(rows: Records, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Return the columns of SFT sequences, and counts of dropped examples by reason.

    The first ``prompt_tokens`` ids of a sequence precede the response. An example of plain text has
    no prompt, and no template changes its text.
    """
    if any(record.seed is not None for _, record in rows):
        return exchange_columns(rows, encoder, limit)
    answered = [(i, r) for i, r in rows if r.text is None and r.prompt and r.chosen]
    plain = [(i, r) for i, r in rows if r.text is not None]
    left_out = Counter({"no response": len(rows) - len(answered) - len(plain)})
    answered = _keep_renderable(answered, encoder, left_out, "chosen")
    questions = [encoder.prompt_of(r) for _, r in answered]
    prompts = encoder.encode_prompts(questions) + [encoder.opening_ids()] * len(plain)
    responses = encoder.encode_responses(questions, [r.chosen or "" for _, r in answered])
    responses += encoder.encode_texts_with_end([r.text or "" for _, r in plain])
    indices = [index for index, _ in (*answered, *plain)]
    columns: Columns = {"row": [], "ids": [], "prompt_tokens": [], "length": []}
    for index, prompt, response in sorted(zip(indices, prompts, responses, strict=True)):
        length = len(prompt) + len(response)
        _add_row(columns, left_out, limit, length, index, prompt + response, len(prompt), length)
    return columns, left_out


def exchange_columns(rows: Records, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Return the columns of sequences with several responses, and counts of dropped sequences.

    Column ``observed`` has the start and the end of each observation between two responses.
    """
    left_out: Counter[str] = Counter()
    columns: Columns = {"row": [], "ids": [], "prompt_tokens": [], "length": [], "observed": []}
    for index, record in rows:
        exchanges, prompt = record.exchanges, encoder.prompt_of(record)
        said = [(each.role, each.observation or "") for each in exchanges[:-1]]
        observations = [*encoder.encode_observations(said), []]
        answers = [each.response for each in exchanges]
        responses = encoder.encode_responses([prompt] * len(answers), answers)
        (ids,), observed = encoder.encode_prompts([prompt]), []
        length = len(ids)
        for response, observation in zip(responses, observations, strict=True):
            ids = ids + response + observation
            observed.append([len(ids) - len(observation), len(ids)])
        _add_row(columns, left_out, limit, len(ids), index, ids, length, len(ids), observed[:-1])
    return columns, left_out


def pair_columns(rows: Records, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Return the columns of pairs with a common prompt, and counts of dropped pairs by reason."""
    usable = [(i, r) for i, r in rows if r.prompt and r.chosen and r.rejected]
    left_out = Counter({"no pair of responses": len(rows) - len(usable)})
    usable = _keep_renderable(usable, encoder, left_out, "chosen", "rejected")
    asked = [encoder.prompt_of(r) for _, r in usable]
    prompts = encoder.encode_prompts(asked)
    chosen = encoder.encode_responses(asked, [r.chosen or "" for _, r in usable])
    rejected = encoder.encode_responses(asked, [r.rejected or "" for _, r in usable])
    names = ("row", "chosen_ids", "rejected_ids", "prompt_tokens", "length", "group")
    columns: Columns = {name: [] for name in names}
    groups: dict[tuple[int, ...], int] = {}
    for (index, _), prompt, better, worse in zip(usable, prompts, chosen, rejected, strict=True):
        length = len(prompt) + max(len(better), len(worse))
        if better == worse:
            left_out["both responses have the same tokens"] += 1
        else:
            fits = length <= limit.tokens
            group = groups.setdefault(tuple(prompt), len(groups)) if fits else None
            pair = (prompt + better, prompt + worse)
            _add_row(columns, left_out, limit, length, index, *pair, len(prompt), length, group)
    return columns, left_out


def prompt_columns(rows: Records, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Return the columns of prompts without responses, and counts of dropped prompts by reason."""
    usable = [(i, r) for i, r in rows if r.prompt]
    left_out = Counter({"no prompt": len(rows) - len(usable)})
    usable = _keep_renderable(usable, encoder, left_out)
    columns: Columns = {"row": [], "ids": []}
    for (index, _), ids in zip(
        usable, encoder.encode_prompts([encoder.prompt_of(r) for _, r in usable]), strict=True
    ):
        _add_row(columns, left_out, limit, len(ids), index, ids)
    return columns, left_out


def _keep_renderable(
    rows: Records, encoder: Encoder, left_out: Counter[str], *answers: str
) -> Records:
    """Return the rows that the chat template can render; count the others in ``left_out``.

    Raises:
        DataError: if the template cannot render most of the rows.
    """
    left_out += Counter()  # removes reasons whose count is 0
    found = {index: encoder.find_template_error(record, *answers) for index, record in rows}
    errors = {index: error for index, error in found.items() if error is not None}
    if errors:
        index, error = next(iter(errors.items()))
        place = dict(rows)[index].place
        first = f" (first: {place[0]}, row {place[1]})" if place else ""
        if 2 * len(errors) > len(rows):
            raise DataError(f"{error}. It fails for {len(errors)} of {len(rows)} examples{first}.")
        left_out[f"the chat template {error.problem}{first}"] = len(errors)
    return [row for row in rows if row[0] not in errors]


# The function that converts the records of a phase to columns of token ids.
COLUMNS_OF = {
    Phase.sft: sft_columns,
    Phase.reward: pair_columns,
    Phase.dpo: pair_columns,
    Phase.ppo: prompt_columns,
}


def tokenise(
    part: PhaseData,
    phase: Phase,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: Limit,
    cache_dir: Path,
    template: Template = Template.plain,
) -> TokenData:
    """Return the token ids of a phase's examples, from the cache if it has them.

    The first process that gets the lock builds the cache. The other processes of the node wait for
    the lock, not in a collective, which would time out if tokenizing took an hour. The cache is in
    Arrow format, keyed by everything that determines its content. It is rebuilt, with a line on
    stderr, unless its files have the hashes of its manifest and only this user can write them.

    Raises:
        DataError: if the cache folder cannot be created, others can write in it, or the template
            cannot be used.
    """
    from datasets import Dataset
    from filelock import FileLock

    key = cache_key(part, phase, tokenizer, limit=limit.tokens, template=template)
    folder = cache_dir / "tokens" / key
    try:
        make_own_folder(folder.parent)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache_dir} cannot be used ({error.strerror}): choose another "
            "folder with data.cache_dir=FOLDER, or RLHF_CACHE in the environment"
        ) from error
    with FileLock(f"{folder}.lock"):
        said = f"data.cache_dir={cache_dir}"
        fault = _find_cache_fault(folder) if os.path.lexists(folder) else ""
        if fault:
            sys.stderr.write(f"{said}: the token ids in {folder} are made anew: {fault}\n")
        if fault is not None:
            with replace_atomically(folder) as building, pause_garbage_collector():
                _write_tokens(building, part, phase, Encoder(tokenizer, template), limit)
        advice = f"remove the folder {folder}"  # another version of datasets may have written it
        with translate_errors(lambda reason: DataError(f"{said}: {reason}; {advice}")):
            left_out = json.loads((folder / LEFT_OUT).read_text())
            sides = [Dataset.load_from_disk(str(folder / side)) for side in ("train", "eval")]
            return TokenData(sides[0], sides[1], left_out)


def _write_tokens(
    folder: Path, part: PhaseData, phase: Phase, encoder: Encoder, limit: Limit
) -> None:
    from datasets import Dataset

    total: Counter[str] = Counter()
    for side, records in (("train", part.train), ("eval", part.eval)):
        columns, left_out = COLUMNS_OF[phase](list(enumerate(records)), encoder, limit)
        total += left_out
        # Write one shard even without rows: datasets 5.2 cannot read a dataset without shards.
        Dataset.from_dict(columns).save_to_disk(folder / side, num_shards=1)
    (folder / LEFT_OUT).write_text(json.dumps(total))
    (folder / MANIFEST).write_text(json.dumps(file_identities(folder)))
    keep_others_from_writing(folder, *folder.rglob("*"))


def _find_cache_fault(folder: Path) -> str | None:
    """Return why cached tokens must not be used; None if they are intact and only this user's."""
    try:
        if (files := read_json(folder / MANIFEST, {OTHERS: [int, str]})) is None:
            return f"it has no {MANIFEST}"
        for path in (folder, *folder.rglob("*")):
            if path.is_symlink():
                return f"{path} is a link"
            if not is_trusted(path):
                return f"another user of this machine can have written {path}"
        check_files(folder, files)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


@contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Pause Python's collector of cyclic garbage, which would visit all lists of ids repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cache_key(
    part: PhaseData,
    phase: Phase,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: int,
    template: Template = Template.plain,
) -> str:
    """Return a hash of the records, phase, limit, template, tokenizer and format version."""
    identity = tokenizer_identity(tokenizer)
    if template is Template.chat:
        identity["chat_template"] = tokenizer.chat_template

    def iterate_parts() -> Iterator[str]:
        yield f"{FORMAT_VERSION}/{phase}/{limit}"
        yield json.dumps(identity, sort_keys=True)
        for records in (part.train, part.eval):
            yield "\x00side"
            for record in records:
                exchanges = [] if record.seed is None else [record.exchanges]
                yield json.dumps([*record.texts, *exchanges, record.messages])
                if record.columns and phase is Phase.reward:  # the reward loss may read the columns
                    yield json.dumps(record.columns, default=str, sort_keys=True)

    return sha256_of(each.encode() for each in iterate_parts())[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what determines the ids of a tokenizer: its vocabulary and special tokens."""
    return {
        "vocabulary": tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else tokenizer.get_vocab(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }
