"""The prompts of a run's PPO phase. A module, not a command."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlhf import load_run
from rlhf.config.choices import Phase, Source
from rlhf.data.reading import load_datasets
from rlhf.data.splits import blend_datasets, divide_over_phases


class RunPrompts(NamedTuple):
    """Prompts that PPO is trained on, and those that no phase is trained on."""

    train: list[str]
    held_out: list[str]

    @classmethod
    def of(cls, run_dir: Path) -> RunPrompts:
        """Divide the run's data as the run did."""
        config = load_run(run_dir)
        if config.data.source is not Source.synthetic:
            raise SystemExit(f"{run_dir}: only a run with data=synthetic has a judge")
        divided = divide_over_phases(
            load_datasets(config.data, seed=config.data_seed),
            split=config.data.split,
            eval_share=config.data.eval_share,
            seed=config.data_seed,
        )
        found = blend_datasets(divided[Phase.ppo], seed=config.data_seed)
        train, held_out = (
            [record.prompt for record in records if record.prompt is not None]
            for records in (found.train, found.eval)
        )
        return cls(train, held_out)
