"""Start a run from a finished run: ``from_run=RUN_DIR``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.config.choices import Phase
from rlhf.config.freeze import load_frozen
from rlhf.errors import ConfigError

# Keys and groups that the finished run determines: its data, and how its models were made.
TAKEN = ("seed", "model", "reward_model", "data", "sft", "reward")


def take_over(
    cfg: DictConfig, source: Path, finished: Container[Phase], overrides: Sequence[str]
) -> None:
    """Set in ``cfg`` what the run in ``source`` determines, and add the phases to take from it.

    These are the ``finished`` phases before the last one that the command asks for, so
    ``phase=ppo`` and the whole pipeline mean the same.

    Raises:
        CheckpointError: if ``source`` is not the directory of a run.
        ConfigError: if it has finished no phase that can be used, or ``overrides`` change what it
            determines.
    """
    frozen = load_frozen(source)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = (override.package or override.key_or_group).partition(".")[0]
        if key in TAKEN:
            raise ConfigError(
                f"{override.input_line} with from_run={source}: the run determines "
                f"{', '.join(TAKEN)}; remove this override, or start a new run without from_run"
            )
    asked = [Phase(name) for name in cfg.phase.order]
    usable = [Phase.sft] if asked[-1] is Phase.dpo else [Phase.sft, Phase.reward]
    before = usable[: usable.index(asked[-1])] if asked[-1] in usable else usable
    taken = [phase for phase in before if phase in finished]
    if not taken:
        raise ConfigError(
            f"from_run={source}: the run has finished none of the phases that {asked[-1]} starts "
            f"from ({', '.join(before) or 'there are none'}); finish it with resume={source}, or "
            "name another run"
        )
    composed = OmegaConf.structured(frozen)
    with open_dict(cfg):
        for key in TAKEN:
            cfg[key] = composed[key]
        cfg.from_run = str(source)
        order = [*taken, *(phase for phase in asked if phase not in taken)]
        cfg.phase.order = [phase.value for phase in order]
