"""Start a run from a finished run: ``from_run=RUN_DIR``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.config.choices import Phase
from rlhf.config.freeze import COMMAND, MICRO_BATCHES, load_frozen
from rlhf.errors import ConfigError

# Keys and groups that the finished run determines: its data, and how its models were made.
TAKEN = ("seed", "model", "reward_model", "data", "sft", "reward")


def take_over(
    cfg: DictConfig, source: Path, finished: Container[Phase], overrides: Sequence[str]
) -> None:
    """Set in ``cfg`` what the run in ``source`` determines, and add the phases to take from it.

    These are the ``finished`` phases before the last one that the command asks for, so
    ``phase=ppo`` and the whole pipeline mean the same. Micro-batches, which change no result, are
    those of this command, or those that the command of the finished run set.

    Raises:
        CheckpointError: if ``source`` is not the directory of a run.
        ConfigError: if it has finished no phase that can be used, or ``overrides`` change what it
            determines.
    """
    frozen = load_frozen(source)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        node = override.package or override.key_or_group
        key = node.partition(".")[0]
        if key in TAKEN and node not in MICRO_BATCHES:
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
    own = {key: OmegaConf.select(cfg, key) for key in MICRO_BATCHES}
    typed = _typed_keys(source)
    with open_dict(cfg):
        for key in TAKEN:
            cfg[key] = composed[key]
        # The plan chose the others for the ranks of the finished run: it chooses them again.
        for key, value in own.items():
            if value is not None or key not in typed:
                OmegaConf.update(cfg, key, value)
        cfg.from_run = str(source)
        order = [*taken, *(phase for phase in asked if phase not in taken)]
        cfg.phase.order = [phase.value for phase in order]


def _typed_keys(run_dir: Path) -> set[str]:
    """Return the keys that the command of a run set."""
    path = run_dir / COMMAND
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return {word.partition("=")[0] for word in text.split()}
