"""Count a run's examples and tokens before it starts, so that its plan uses real lengths.

Nothing here imports torch. Generated data is counted from a sample. Data that cannot be read
quickly (a data set of the hub, large files) is not read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rlhf.base.errors import DataError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.batches import phase_steps
from rlhf.config.choices import ModelInit, Phase, PlanMode, Source
from rlhf.config.schema.data import DataConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.reading import load_datasets
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData, blend_datasets, divide_over_phases
from rlhf.data.tables import SAMPLE
from rlhf.data.tokens import COLUMNS_OF, Limit, limit_of
from rlhf.models.tokenizers import train_byte_level_bpe
from rlhf.planning.steps import Load, Loads, total_examples
from rlhf.runtime.run_data import load_episodes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LARGEST = 2**26  # bytes; larger data files, all together, are not read
GENERATED = 2000  # examples that are generated as a sample of synthetic data
ENCODED = 1000  # examples per phase that are encoded
LETTERS_PER_TOKEN = 4  # assumed for a tokenizer that is not on this machine


def read_loads(config: RunConfig) -> Loads | None:
    """Return the steps and lengths of every phase, or None if the data cannot be read quickly.

    Raises:
        DataError: if the data is malformed or too small; with plan=only, None is returned instead.
    """
    data = config.data
    if data.source is Source.environment and config.environment.processes:
        return None  # a plan runs nobody's code
    is_made = data.source in (Source.synthetic, Source.environment)
    if data.source is Source.hub or not (is_made or _is_small(data)):
        return None
    made = min(data.size, GENERATED) if is_made else 0
    scale = data.size / made if made else 1.0
    if made:
        data = replace(data, size=made)
    try:
        if data.source is Source.environment:
            order = config.phase.order
            parts = load_episodes(data, config.environment, order, seed=config.seed)
        else:
            sets, seed = load_datasets(data, seed=config.seed), config.seed
            divided = divide_over_phases(
                sets, split=data.split, eval_share=data.eval_share, seed=seed
            )
            parts = {phase: blend_datasets(each, seed=seed) for phase, each in divided.items()}
    except DataError:
        if config.plan is PlanMode.only:
            return None  # the data may be on another machine, for which this plan is made
        raise
    encoder = Encoder(_Lengths(_load_or_train_tokenizer(config, parts.values())))
    records = total_examples(config.data) or 0
    return {
        phase: replace(_load_of_phase(config, phase, parts, encoder, scale), records=records)
        for phase in config.phase.order
    }


def _load_of_phase(
    config: RunConfig, phase: Phase, parts: dict[Phase, PhaseData], encoder: Encoder, scale: float
) -> Load:
    """Return the load of ``phase``; each example in ``parts`` represents ``scale`` examples."""
    part = parts[phase.data_share]
    rows = list(islice(enumerate(part.train), ENCODED))
    columns, _ = COLUMNS_OF[phase](rows, encoder, limit_of(phase, config))
    sides = ("chosen_ids", "rejected_ids") if phase.learns_from_pairs else ("ids",)
    lengths = sorted(len(ids) for side in sides for ids in columns[side])
    kept = len(columns["row"]) / max(1, min(ENCODED, len(part.train)))
    answer = None
    if phase is Phase.ppo and Phase.sft in config.phase.order:
        answer = _answer_tokens(parts[Phase.sft], encoder, config.tokens_after_prompt[1])
    return Load(
        answer=answer,
        steps=phase_steps(config, phase, examples=round(len(part.train) * kept * scale)),
        lengths=tuple(lengths) or (0,),
        held_out=round(len(part.eval) * kept * scale),
    )


def _answer_tokens(part: PhaseData, encoder: Encoder, most: int) -> float | None:
    """Return the mean length in tokens of SFT's answers, each truncated to ``most``; None: none."""
    records = [record for record in part.train[:ENCODED] if record.chosen]
    lengths = [
        min(most, len(ids)) for ids in encoder.texts_with_end([r.chosen or "" for r in records])
    ]
    if any(record.episode for record in records):
        found, _ = COLUMNS_OF[Phase.sft](list(enumerate(records)), encoder, Limit("", sys.maxsize))
        pairs = zip(found["length"], found["prompt_tokens"], strict=True)
        lengths = [min(most, length - prompt) for length, prompt in pairs]
    return sum(lengths) / len(lengths) if lengths else None


def _is_small(data: DataConfig) -> bool:
    """Return True if all data files are on this machine and have at most ``LARGEST`` bytes."""
    paths = data.path if isinstance(data.path, list) else [data.path]
    paths += [dataset.path for dataset in data.sets.values()]
    files = [expand_user_path(str(path), key="data.path") for path in paths if path is not None]
    is_sample = [str(path).startswith(SAMPLE) for path in files]
    sizes = [path.stat().st_size for path in files if path.is_file()]
    return len(sizes) + sum(is_sample) == len(files) and sum(sizes) <= LARGEST


class _Lengths:
    """A tokenizer for ``Encoder`` that counts tokens, without transformers."""

    eos_token_id = -1

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: list[str], *, add_special_tokens: bool = True) -> SimpleNamespace:
        if self._tokenizer is None:
            ids = [[0] * math.ceil(len(text) / LETTERS_PER_TOKEN) for text in texts]
        else:
            found = self._tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
            ids = [each.ids for each in found]
        return SimpleNamespace(input_ids=ids)


def _load_or_train_tokenizer(config: RunConfig, parts: Iterable[PhaseData]) -> Tokenizer | None:
    """Load the run's tokenizer or train a new one; return None if it is not on this machine."""
    from tokenizers import Tokenizer

    is_alone = config.phase.order == [Phase.reward]
    model = config.model
    if is_alone and config.reward_model.init is not ModelInit.sft:
        model = config.reward_model
    place = model.tokenizer or (model.path if model.init is ModelInit.pretrained else None)
    if place is None:
        return train_byte_level_bpe(_sample_texts(parts), vocab_size=model.vocab_size)
    file = expand_user_path(place, key="model.tokenizer") / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def _sample_texts(parts: Iterable[PhaseData]) -> Iterable[str]:
    records: Iterable[Record] = (r for part in parts for r in islice(part.train, ENCODED))
    return (text for record in records for text in record.spoken if text)
