"""Rule for the data that has the teacher's prompts."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase, Source
from rlhf.config.schema.run import RunConfig
from rlhf.options.distillation.keys import COLUMN


def check(config: RunConfig) -> None:
    """Check that generated data has the column; columns of files are checked as they are read."""
    column, is_used = config.ppo.teacher_prompt_column, Phase.ppo in config.phase.order
    broken = {
        f"{COLUMN}={column}: data=synthetic has no column {column}; it has answer": (
            is_used and column not in (None, "answer") and config.data.source is Source.synthetic
        )
    }
    refuse_broken_rule(broken)
