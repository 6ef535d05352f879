"""Convert records to the token ids that each phase uses, and cache them.

The response of an example always ends in the end token: SFT and DPO learn to produce this token,
and the reward model gives its score there. Lengths are stored explicitly and never derived from
padding, which may have the same id as the end token. An example that is too long is dropped and
counted, since a truncated response would not end in the end token.

Column ``length`` counts the tokens of an example, or of the longer sequence of a pair; equal
numbers in column ``group`` mean equal prompts.

Stored records are encoded when a step reads them: encoding two million examples takes many minutes,
and before the first step only the number of usable examples must be known. A byte-level tokenizer
never makes more tokens than a text has UTF-8 bytes, so a plain example with few bytes is usable.
Other examples are encoded before the first step to find out.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from rlhf.base.atomic import replace_atomically
from rlhf.base.errors import CheckpointError, DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import MANIFEST, OTHERS, check_files, file_identities, read_json
from rlhf.base.trust import is_trusted, keep_others_from_writing, make_own_folder
from rlhf.config.choices import Phase, Template, Unpaired
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import UnusableTemplateError
from rlhf.data.records import SCORED, Record, describe_first_place
from rlhf.data.splits import PhaseData
from rlhf.data.stored import UNKNOWN, Numbers, facts_of, is_in_memory

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

LEFT_OUT = "left_out.json"
FORMAT_VERSION = 4  # increase it when columns of the cache change their meaning
MOST_DOUBTFUL = 50_000  # if more examples must be encoded, all are, and their ids are cached
KEPT_WHOLE = {"Split", "Digits", "Punctuation"}  # pre-tokenizers that add no bytes


class TokenData(NamedTuple):
    """A phase's examples as token ids; column ``row`` is the record's index in train or eval."""

    train: Dataset | TokensOnDemand
    eval: Dataset | TokensOnDemand
    left_out: dict[str, int]


T = TypeVar("T")
Columns = dict[str, list[Any]]
Records = list[tuple[int, Record]]
Examples = Phase | Unpaired  # kinds of examples: a phase's, or the reward phase's unpaired feedback
Encode = Callable[[Records], tuple[Columns, Counter[str]]]


class Limit(NamedTuple):
    """The maximum tokens of an example, and the configuration key that sets it."""

    key: str
    tokens: int


def find_token_limit(phase: Phase, config: RunConfig) -> Limit:
    """Return the maximum tokens of a phase's examples; longer examples are dropped."""
    if phase is Phase.ppo:
        return Limit("rollout.max_prompt_tokens", config.rollout.max_prompt_tokens)
    return Limit(f"{phase}.max_tokens", getattr(config, phase.value).max_tokens)


def find_example_kind(phase: Phase, config: RunConfig) -> Examples:
    """Return the kind of example that a phase learns from, a key of ``COLUMNS_OF``."""
    unpaired = config.reward.unpaired if phase is Phase.reward else None
    return unpaired or phase


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

    The first ``prompt_tokens`` ids of a sequence precede its first response. Column ``observed``,
    which is absent if no sequence has several responses, has the start and the end of each context
    between two responses. A sequence that is too long ends with the last response that fits. An
    example of plain text has no prompt, and no template changes its text.
    """
    texts = [(i, r) for i, r in rows if r.text is not None]
    answered = [(i, r) for i, r in rows if r.text is None and r.prompt and r.chosen]
    left_out = Counter({"no response": len(rows) - len(answered) - len(texts)})
    answered = _keep_good(answered, left_out)
    rendered = _render_rows(answered, encoder.render_answers, left_out)
    sequences = [(index, sequence) for index, group in rendered for sequence in group]
    encoded = encoder.encode_pieces([sequence for _, sequence in sequences])
    opening = encoder.opening_ids()
    plain = encoder.encode_texts_with_end([r.text or "" for _, r in texts])
    examples = [(index, pieces) for (index, _), pieces in zip(sequences, encoded, strict=True)]
    examples += [(index, [(opening, ids)]) for (index, _), ids in zip(texts, plain, strict=True)]
    columns: Columns = {"row": [], "ids": [], "prompt_tokens": [], "length": [], "observed": []}
    for index, pieces in sorted(examples, key=itemgetter(0)):
        ids: list[int] = []
        observed = []
        for number, (context, answer) in enumerate(pieces):
            if number and len(ids) + len(context) + len(answer) > limit.tokens:
                left_out[f"answers past {limit.key}={limit.tokens}"] += len(pieces) - number
                break
            observed.append([len(ids), len(ids) + len(context)])
            ids = ids + context + answer
        prompt_tokens, length = len(pieces[0][0]), len(ids)
        _add_row(columns, left_out, limit, length, index, ids, prompt_tokens, length, observed[1:])
    if not any(columns["observed"]):
        del columns["observed"]
    return columns, left_out


def _keep_good(rows: Records, left_out: Counter[str]) -> Records:
    """Return the rows whose response is ungraded or marked as good; count the others."""
    good: Records = []
    for index, record in rows:
        if record.grade is None or record.grade is True:
            good.append((index, record))
        else:
            left_out["response marked as bad" if record.grade is False else SCORED] += 1
    return good


def pair_columns(rows: Records, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Return the columns of pairs with a common prompt, and counts of dropped pairs by reason."""
    usable = [(i, r) for i, r in rows if r.prompt and r.chosen and r.rejected]
    left_out = Counter({"no pair of responses": len(rows) - len(usable)})
    rendered = _render_rows(
        usable,
        lambda r: [encoder.render_response(r, text or "") for text in (r.chosen, r.rejected)],
        left_out,
    )
    encoded = encoder.encode_pieces([[piece] for _, pair in rendered for piece in pair])
    pieces = [piece for (piece,) in encoded]
    names = ("row", "chosen_ids", "rejected_ids", "prompt_tokens", "length", "group")
    columns: Columns = {name: [] for name in names}
    groups: dict[tuple[int, ...], int] = {}
    examples = zip(rendered, pieces[::2], pieces[1::2], strict=True)
    for (index, _), (prompt, better), (_, worse) in examples:
        length = len(prompt) + max(len(better), len(worse))
        if better == worse:
            left_out["both responses have the same tokens"] += 1
        else:
            fits = length <= limit.tokens
            group = groups.setdefault(tuple(prompt), len(groups)) if fits else None
            pair = (prompt + better, prompt + worse)
            _add_row(columns, left_out, limit, length, index, *pair, len(prompt), length, group)
    return columns, left_out


def response_columns(
    rows: Records, encoder: Encoder, limit: Limit, *, feedback: Unpaired
) -> tuple[Columns, Counter[str]]:
    """Return the columns of single responses with a grade, and counts of dropped ones by reason.

    Column ``grade`` has scores, or marks: 1.0 (good) or 0.0 (bad). With marks, a pair is a good and
    a bad response.
    """
    graded: Records = []
    kinds = bool if feedback is Unpaired.marks else int | float
    for index, record in rows:
        if feedback is Unpaired.marks and record.chosen and record.rejected:
            graded.append((index, record._replace(grade=True)))
            graded.append((index, record._replace(chosen=record.rejected, grade=False)))
        elif record.prompt and record.chosen and isinstance(record.grade, kinds):
            graded.append((index, record))
    left_out = Counter({f"no {feedback.value[:-1]}": len(rows) - len(dict(graded))})
    rendered = _render_rows(
        graded, lambda r: (encoder.render_response(r, r.chosen or ""), r.grade), left_out
    )
    encoded = encoder.encode_pieces([[piece] for _, (piece, _) in rendered])
    columns: Columns = {"row": [], "ids": [], "prompt_tokens": [], "length": [], "grade": []}
    for (index, (_, grade)), ((prompt, response),) in zip(rendered, encoded, strict=True):
        ids, score = prompt + response, float(grade or 0.0)
        _add_row(columns, left_out, limit, len(ids), index, ids, len(prompt), len(ids), score)
    return columns, left_out


def prompt_columns(rows: Records, encoder: Encoder, limit: Limit) -> tuple[Columns, Counter[str]]:
    """Return the columns of prompts without responses, and counts of dropped prompts by reason."""
    usable = [(i, r) for i, r in rows if r.prompt]
    left_out = Counter({"no prompt": len(rows) - len(usable)})
    rendered = _render_rows(usable, encoder.render_prompt, left_out)
    encoded = encoder.encode_contexts([text for _, text in rendered])
    columns: Columns = {"row": [], "ids": []}
    for (index, _), ids in zip(rendered, encoded, strict=True):
        _add_row(columns, left_out, limit, len(ids), index, ids)
    return columns, left_out


def _render_rows(
    rows: Records, render: Callable[[Record], T], left_out: Counter[str]
) -> list[tuple[int, T]]:
    """Return the index and ``render(record)`` of each row that the template can show; count others.

    Raises:
        DataError: if the template cannot show most of the rows.
    """
    left_out += Counter()  # removes reasons whose count is 0
    rendered: list[tuple[int, T]] = []
    errors: list[tuple[UnusableTemplateError, Record]] = []
    for index, record in rows:
        try:
            rendered.append((index, render(record)))
        except UnusableTemplateError as error:
            errors.append((error, record))
    if 2 * len(errors) > len(rows):
        first_error, record = errors[0]
        at = describe_first_place([record.place])
        places = f"for {len(errors)} of {len(rows)} examples{at}"
        raise DataError(f"{first_error}. This happens {places}.")
    first_records = {each.problem: record for each, record in reversed(errors)}
    for each, _ in errors:
        at = describe_first_place([first_records[each.problem].place])
        left_out[f"{each.problem}{at}"] += 1
    return rendered


# The function that converts records to columns of token ids, by kind of example.
COLUMNS_OF: dict[Examples, Callable[[Records, Encoder, Limit], tuple[Columns, Counter[str]]]] = {
    Phase.sft: sft_columns,
    Phase.reward: pair_columns,
    Phase.dpo: pair_columns,
    Phase.ppo: prompt_columns,
    **{each: partial(response_columns, feedback=each) for each in Unpaired},
}


def tokenise(
    part: PhaseData,
    phase: Examples,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit: Limit,
    cache_dir: Path,
    template: Template = Template.plain,
) -> TokenData:
    """Return the token ids of a phase's examples, from the cache if it has them.

    Plain examples of SFT and PPO in files are, if possible, encoded when a step reads them.

    The first process that gets the lock builds the cache. The other processes of the node wait for
    the lock, not in a collective, which would time out if tokenizing took an hour. The cache is in
    Arrow format, keyed by everything that determines its content. It is rebuilt, with a line on
    stderr, unless its files have the hashes of its manifest and only this user can write them.

    Raises:
        DataError: if the cache folder cannot be created, others can write in it, or the template
            cannot be used.
    """
    if template is Template.plain and (phase is Phase.sft or phase is Phase.ppo):
        on_demand = _find_on_demand(part, phase, tokenizer, limit)
        if on_demand is not None:
            return on_demand
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
        setting = f"data.cache_dir={cache_dir}"
        fault = _find_cache_fault(folder) if os.path.lexists(folder) else ""
        if fault:
            sys.stderr.write(f"{setting}: the token ids in {folder} are recomputed: {fault}\n")
        if fault is not None:
            with replace_atomically(folder) as building, pause_garbage_collector():
                _write_tokens(building, part, phase, Encoder(tokenizer, template), limit)
        advice = f"remove the folder {folder}"  # another version of datasets may have written it
        with translate_errors(lambda reason: DataError(f"{setting}: {reason}; {advice}")):
            left_out = json.loads((folder / LEFT_OUT).read_text())
            sides = [Dataset.load_from_disk(str(folder / side)) for side in ("train", "eval")]
            return TokenData(sides[0], sides[1], left_out)


def _find_on_demand(
    part: PhaseData, phase: Phase, tokenizer: PreTrainedTokenizerBase, limit: Limit
) -> TokenData | None:
    """Return the usable examples of stored records, to be encoded later, and count the others.

    Return None if all records are in memory, if too many examples must be encoded to find out
    which are usable, or if their template refuses them.
    """
    if is_in_memory(part.train) and is_in_memory(part.eval):
        return None
    encoder = Encoder(tokenizer)

    def encode(rows: Records) -> tuple[Columns, Counter[str]]:
        return COLUMNS_OF[phase](rows, encoder, limit)

    what = "answered" if phase is Phase.sft else "prompt"
    added = tokenizer.num_special_tokens_to_add() + (phase is Phase.sft)  # SFT adds the end token
    most_bytes = limit.tokens - added if is_byte_level(tokenizer) else -1
    sides = []
    left_out: Counter[str] = Counter()
    for records in (part.train, part.eval):
        is_sure = facts_of(records, "bytes")[what] <= min(most_bytes, UNKNOWN - 1)
        doubtful = np.flatnonzero(~is_sure)
        if len(doubtful) > MOST_DOUBTFUL:
            return None
        try:
            columns, dropped = encode([(row, records[row]) for row in doubtful.tolist()])
        except DataError:  # the template cannot show most of these, but perhaps most of all
            return None
        rows = np.concatenate([np.flatnonzero(is_sure), np.array(columns["row"], np.int64)])
        sides.append(TokensOnDemand(records, encode, np.sort(rows)))
        left_out += dropped
    return TokenData(sides[0], sides[1], dict(left_out))


def _write_tokens(
    folder: Path, part: PhaseData, phase: Examples, encoder: Encoder, limit: Limit
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
    """Return why cached tokens must not be used; None if intact and written only by this user."""
    try:
        if (files := read_json(folder / MANIFEST, {OTHERS: [int, str]})) is None:
            return f"it has no {MANIFEST}"
        for path in (folder, *folder.rglob("*")):
            if path.is_symlink():
                return f"{path} is a link"
            if not is_trusted(path):
                return f"another user of this machine may have written {path}"
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
    phase: Examples,
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
                turns = record.turns if phase is Phase.sft else ()
                content = [*record.texts, record.messages, turns, record.tools, record.grade]
                yield json.dumps(content, default=str)
                if record.columns and phase is Phase.reward:  # the reward loss may read the columns
                    yield json.dumps(record.columns, default=str, sort_keys=True)

    return sha256_of(part_text.encode() for part_text in iterate_parts())[:32]


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what determines the ids of a tokenizer: its vocabulary and special tokens."""
    return {
        "vocabulary": tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else tokenizer.get_vocab(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    }


class TokensOnDemand:
    """A phase's usable training or held-out examples, read like a ``datasets.Dataset``."""

    def __init__(self, records: Sequence[Record], encode: Encode, rows: Numbers) -> None:
        """Store the row of each example in ``records``; a row may have several examples."""
        self._records, self._encode, self._row_N = records, encode, rows
        self._turn_N = np.arange(len(rows)) - np.searchsorted(rows, rows)  # within its row

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._row_N)

    def __getitem__(self, wanted: Sequence[int] | slice | str) -> Any:
        """Return the columns of the examples ``wanted``, or the column "row" of all examples."""
        if isinstance(wanted, str):
            return {"row": self._row_N}[wanted].tolist()
        rows, turns = self._row_N[wanted].tolist(), self._turn_N[wanted].tolist()
        columns, _ = self._encode([(row, self._records[row]) for row in dict.fromkeys(rows)])
        first_position: dict[int, int] = {}
        for index, row in enumerate(columns["row"]):
            first_position.setdefault(row, index)
        indices = [first_position[row] + turn for row, turn in zip(rows, turns, strict=True)]
        return {name: [values[index] for index in indices] for name, values in columns.items()}


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if, by the tokenizer's definition, NFC text has no more tokens than bytes."""
    if not tokenizer.is_fast:
        return False
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    splitter = definition["pre_tokenizer"] or {}
    parts = splitter.get("pretokenizers", [splitter])
    normalizer = definition["normalizer"] or {"type": "NFC"}
    return (
        definition["model"]["type"] == "BPE"
        and normalizer == {"type": "NFC"}
        and any(part.get("type") == "ByteLevel" for part in parts)
        and all(
            part.get("type") in KEPT_WHOLE
            or (part.get("type") == "ByteLevel" and not part["add_prefix_space"])
            for part in parts
        )
    )
