"""Load the records of a run from data sets, or from an environment that makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf.config.choices import LossOn, Phase, TrainOn
from rlhf.config.roles import reward_key_by_column
from rlhf.config.schema.keys import iterate_columns
from rlhf.config.schema.run import RunConfig
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.records import RawDataset, learn_last_answer
from rlhf.data.splits import (
    PhaseData,
    blend_datasets,
    check_usable_examples,
    describe_division,
    divide_over_phases,
)


def load_phase_data(config: RunConfig, say: Callable[[str], None]) -> dict[Phase, PhaseData]:
    """Load and divide the examples of a run; ``say`` prints what was read, skipped and divided.

    Raises:
        DataError: if data is missing, malformed or not divisible, or a phase cannot use its part.
        ConfigError: if data.sets describes columns wrongly, or an environment has no expert.
    """
    if not config.environment.is_used:
        return divide_datasets(read_datasets(config, say), config, say)
    from rlhf.options.environments.episode_records import load_records

    parts = load_records(config)
    _describe_parts(parts, config, say)
    return parts


def read_datasets(config: RunConfig, say: Callable[[str], None]) -> list[RawDataset]:
    """Read the data sets of a run; ``say`` prints a line on each."""
    learns_last = config.sft.train_on is TrainOn.last or config.sft.loss_on is LossOn.all
    keep = reward_key_by_column(config)
    keep |= {column: key for key, column in iterate_columns(config)}
    datasets = load_datasets(
        config.data,
        seed=config.data_seed,
        keep=keep,
        change=learn_last_answer if learns_last else None,
    )
    for dataset in datasets:
        say(describe_dataset(dataset))
    return datasets


def divide_datasets(
    datasets: Sequence[RawDataset], config: RunConfig, say: Callable[[str], None]
) -> dict[Phase, PhaseData]:
    """Divide the examples of ``datasets`` over the phases of a run; ``say`` prints the result.

    Raises:
        DataError: if the data is not divisible, or a phase cannot use its part.
    """
    data, seed = config.data, config.data_seed
    divided = divide_over_phases(datasets, split=data.split, eval_share=data.eval_share, seed=seed)
    parts = {phase: blend_datasets(of_sets, seed=seed) for phase, of_sets in divided.items()}
    _describe_parts(parts, config, say)
    return parts


def _describe_parts(
    parts: dict[Phase, PhaseData], config: RunConfig, say: Callable[[str], None]
) -> None:
    for phase, part in parts.items():
        if part.removed:
            say(
                f"{phase}: {part.removed} examples removed because their prompt is held out, or "
                "assigned to a phase that does not use their data set"
            )
    order = config.phase.order
    check_usable_examples(parts, order, learns_grades=config.reward.unpaired is not None)
    say(describe_division(parts, order))
