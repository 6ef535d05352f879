"""Read and divide a run's data before the run starts, as its ranks will; count it for the plan.

Data that a phase would refuse is refused here, before a run directory is made. Data that is not on
this machine, or too large to be read quickly, is read only by the ranks. torch is imported only for
data with a chat template. If there are many examples, only a sample is encoded.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from rlhf.base.errors import DataError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.batches import examples_per_step, num_phase_steps, sequences_per_example
from rlhf.config.choices import ModelInit, Phase, PlanMode, Source, Template
from rlhf.config.roles import tokenizer_base
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.files import estimate_text_bytes
from rlhf.data.phase_needs import PhaseExamples, describe_phase_examples, require_examples
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData, describe_division, phase_of_dpo_prompts
from rlhf.data.tables import find_snapshot, list_files
from rlhf.data.tokens import COLUMNS_OF, Columns, Limit, find_example_kind, find_token_limit
from rlhf.jobs.input_files import data_keys_and_paths
from rlhf.models.tokenizers import load_or_train_tokenizer, train_byte_level_bpe
from rlhf.options import DataConfig
from rlhf.plan.steps import Load, Loads
from rlhf.run.console import Console
from rlhf.runtime.run_data import load_phase_data

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SAMPLED = 1000  # examples per phase that are encoded for an estimate
SLOWLY_SAMPLED = 50  # examples per phase that are encoded if each takes long to generate
PLENTY_STEPS = 2  # if a sample suggests fewer optimizer steps, all examples are counted
CHARACTERS_PER_TOKEN = 4  # an assumption, for a tokenizer that is not on this machine
LARGEST_READ = 2**26  # bytes; data files that are larger in total are not read
ASSUMED = "The plan assumes every example has the maximum length."


class Reading(NamedTuple):
    """The result of reading a run's data: the load of each phase, and lines for the terminal."""

    loads: Loads | None
    """Load of each phase; None: the data was not read."""
    lines: list[str]


def read_loads(config: RunConfig, *, finished: Container[Phase] = ()) -> Reading:
    """Return the steps and lengths of every phase; check the phases that are not ``finished``.

    Raises:
        DataError: if the data is missing, malformed or too small for a phase.
        ConfigError: if an option of PPO does not suit the number of steps that PPO takes.
    """
    reason = _reason_not_to_read(config.data, is_plan=config.plan is PlanMode.only)
    if reason is not None:
        return Reading(None, [f"data: not read: {reason} {ASSUMED}"])
    phases = [phase for phase in config.phase.order if phase not in finished]
    is_slow = config.environment.is_used and bool(config.environment.processes)
    counted = CountedData(config, most=SLOWLY_SAMPLED if is_slow else SAMPLED)
    if counted.is_sample and not all(counted.has_enough_examples(phase) for phase in phases):
        counted = CountedData(config, most=sys.maxsize)
    try:
        require_examples(config, {phase: counted.examples[phase] for phase in phases})
    except DataError:  # print how many examples were skipped: this may be the reason
        for line in counted.lines:
            Console().say(line)
        raise
    if config.data.ptx_path is not None:
        from rlhf.options.ptx.corpus import check_corpus

        check_corpus(config, phases, _is_local_and_small)
    return Reading(counted.loads, counted.lines)


def _reason_not_to_read(data: DataConfig, *, is_plan: bool) -> str | None:
    """Return a sentence on why the launcher does not read the data; None if it reads the data."""
    if data.source in (Source.synthetic, Source.environment):
        return None
    if data.size and is_plan:
        return f"data.size={data.size} gives the number of examples."
    paths = {path: expand_user_path(path, key=key) for key, path in data_keys_and_paths(data)}
    if data.source is Source.hub:
        absent = [path for path, place in paths.items() if not place.exists()]
        if absent:
            return f"{', '.join(absent)} is not on this machine; the run downloads and checks it."
    if _total_file_bytes(paths.values()) > LARGEST_READ:
        return f"{', '.join(paths)} has over {LARGEST_READ >> 20} MiB; the run reads and checks it."
    return None


def _is_local_and_small(key: str, path: str) -> bool:
    place = expand_user_path(path, key=key)
    return place.exists() and _total_file_bytes([place]) <= LARGEST_READ


def _total_file_bytes(places: Iterable[Path]) -> int:
    """Return the total bytes of text in ``places``: files, and folders with files."""
    files = (each for place in places for each in list_files(find_snapshot(place)))
    return sum(estimate_text_bytes(each) for each in files if each.is_file())


class CountedData:
    """The counts of a run's data by phase; at most ``most`` examples of a phase are encoded."""

    def __init__(self, config: RunConfig, *, most: int) -> None:
        data = config.data
        self._config, self._most = config, most
        is_generated = data.source in (Source.synthetic, Source.environment)
        least = 4 * sum(data.split) / min(filter(None, data.split))  # 4 examples for each phase
        size = min(data.size, max(2 * most, math.ceil(least))) if is_generated else 0
        self._scale = data.size / size if size else 1.0
        self.lines: list[str] = []
        counted = replace(config, data=replace(data, size=size or data.size))
        self._parts = load_phase_data(counted, self.lines.append)
        order = config.phase.order
        if self._scale > 1:
            self.lines = [describe_division(self._parts, order, scale=self._scale)]
        sizes = [len(side) for part in self._parts.values() for side in (part.train, part.eval)]
        self.is_sample = self._scale > 1 or max(sizes) > most
        texts = _training_texts(self._parts.values(), most)
        key, model = tokenizer_base(config)
        if config.from_run is not None:
            model = replace(model, tokenizer=str(Path(config.from_run) / "tokenizer"))
        self._encoder, self._knows_lengths = _build_encoder(key, model, data.template, texts)
        self._records = round(self._scale * sum(sizes))
        self.examples: dict[Phase, PhaseExamples] = {}
        self.loads: dict[Phase, Load] = {}
        for phase in order:
            self._count_phase(phase)

    def has_enough_examples(self, phase: Phase) -> bool:
        """Return True if the phase has held-out examples, and training examples for a few steps."""
        examples = self.examples[phase]
        stop = (self._config.checkpoint.stop_after or "").partition("/")
        steps = PLENTY_STEPS * int(stop[2]) if stop[0] == phase else PLENTY_STEPS
        needed = steps * examples_per_step(self._config, phase)
        return examples.train >= needed and examples.eval > 0

    def _count_phase(self, phase: Phase) -> None:
        config, part = self._config, self._parts[phase.phase_in_split]
        columns, train, left_out = self._encode(phase, part.train)
        _, held_out, more = self._encode(phase, part.eval)
        is_paired = sequences_per_example(config, phase) > 1
        sides = ("chosen_ids", "rejected_ids") if is_paired else ("ids",)
        lengths = sorted(len(ids) for side in sides for ids in columns[side])
        answered = 0
        if phase is Phase.dpo:
            prompts = self._parts[phase_of_dpo_prompts(self._parts)].eval
            _, answered, _ = self._encode(Phase.ppo, prompts)
        examples = PhaseExamples(train, held_out, left_out + more, answered)
        if any(examples.left_out.values()):
            self.lines.append(describe_phase_examples(phase, examples))
        answer = None
        if phase is Phase.ppo and Phase.sft in config.phase.order:
            answer = self._mean_answer_tokens(self._parts[Phase.sft])
        self.examples[phase] = examples
        self.loads[phase] = Load(
            answer=answer,
            steps=num_phase_steps(config, phase, examples=train),
            lengths=tuple(lengths) or (0,),
            held_out=held_out,
            records=self._records,
        )

    def _encode(self, phase: Phase, records: Sequence[Record]) -> tuple[Columns, int, Counter[str]]:
        """Return a sample's columns, and the estimated numbers of used and skipped examples."""
        rows = list(islice(enumerate(records), self._most))
        limit = find_token_limit(phase, self._config)
        encode = COLUMNS_OF[find_example_kind(phase, self._config)]
        columns, left_out = encode(rows, self._encoder, limit)
        scale = self._scale * len(records) / max(1, len(rows))
        used = len(columns["row"])
        if not self._knows_lengths:
            used += left_out.pop(f"longer than {limit.key}={limit.tokens}", 0)
        skipped = {reason: round(scale * count) for reason, count in left_out.items()}
        return columns, round(scale * used), Counter(skipped)

    def _mean_answer_tokens(self, part: PhaseData) -> float | None:
        """Return the mean tokens of SFT's answers within PPO's limits; None without answers."""
        most, encoder = self._config.token_limit_after_prompt[1], self._encoder
        least = self._config.rollout.min_response_tokens
        records = [record for record in part.train[: self._most] if record.chosen]
        texts = [record.chosen or "" for record in records]
        lengths = [len(ids) for ids in encoder.encode_texts_with_end(texts)]
        if any(r.seed is not None for r in records):
            rows = list(enumerate(records))
            columns, _ = COLUMNS_OF[Phase.sft](rows, encoder, Limit("", sys.maxsize))
            pairs = zip(columns["length"], columns["prompt_tokens"], strict=True)
            lengths = [length - prompt for length, prompt in pairs]
        lengths = [max(least, min(most, length)) for length in lengths]
        return sum(lengths) / len(lengths) if lengths else None


def _build_encoder(
    key: str, model: ModelConfig, template: Template, texts: Iterable[str]
) -> tuple[Encoder, bool]:
    """Return an encoder, and True if it counts tokens as the run will, or False if it guesses.

    A tokenizer that the run would train is trained on ``texts``.
    """
    place = model.tokenizer or (model.path if model.init is ModelInit.pretrained else None)
    folder = None if place is None else expand_user_path(place, key=f"{key}.tokenizer")
    file = None if folder is None else folder / "tokenizer.json"
    is_here = folder is None or folder.is_dir()
    if is_here and (template is Template.chat or (file is not None and not file.is_file())):
        tokenizer = load_or_train_tokenizer(model, key=key, texts=texts)
        return Encoder(tokenizer, template), True
    if file is None:
        trained = train_byte_level_bpe(texts, vocab_size=model.vocab_size)
        return Encoder(_TokenCounter(trained)), True
    if not file.is_file():
        return Encoder(_TokenCounter(None)), False
    from tokenizers import Tokenizer

    return Encoder(_TokenCounter(Tokenizer.from_file(str(file)))), True


class _TokenCounter:
    """A tokenizer for ``Encoder`` that only counts tokens; it needs no transformers."""

    eos_token_id = -1

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.added_tokens_decoder = tokenizer.get_added_tokens_decoder() if tokenizer else {}

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool = True, **_no_masks: bool
    ) -> SimpleNamespace:
        if self._tokenizer is None:
            step = CHARACTERS_PER_TOKEN  # each piece of so many characters counts as a token
            ids = [
                [hash(text[start : start + step]) for start in range(0, len(text), step)]
                for text in texts
            ]
        else:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
            ids = [each.ids for each in encodings]
        return SimpleNamespace(input_ids=ids)


def _training_texts(parts: Iterable[PhaseData], records_per_part: int) -> Iterable[str]:
    records: Iterable[Record] = (r for part in parts for r in islice(part.train, records_per_part))
    return (text for record in records for text in record.all_texts if text)
