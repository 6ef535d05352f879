"""Start a run from a finished run: ``from_run=RUN_DIR``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Phase, RewardKind
from rlhf.config.effects import effects_by_key, values_that_affect
from rlhf.config.freeze import keys_that_run_code, load_frozen_config, read_command
from rlhf.config.schema.keys import AtResume, format_value
from rlhf.config.schema.run import RunConfig


def copy_keys_of_source_run(
    cfg: DictConfig, source: Path, finished: Container[Phase], overrides: Sequence[str]
) -> None:
    """Copy to ``cfg`` the keys that the run in ``source`` determines; add the phases to reuse.

    Phases to reuse are the ``finished`` phases before the last requested phase, so ``phase=ppo``
    and the whole pipeline mean the same. The reward model is not reused if the command's rewards
    replace it. Micro-batch sizes, which change no result, come from this command, or from the
    command of the finished run.

    Raises:
        CheckpointError: if ``source`` is not the directory of a run.
        ConfigError: if the run has finished no phase that can be used, or ``overrides`` change a
            key that the run determines.
    """
    frozen = load_frozen_config(source)
    inherited = {key: effect for key, effect in effects_by_key().items() if effect.is_inherited}
    consent = keys_that_run_code(source)
    if missing := [k for k in consent if k in inherited and not OmegaConf.select(cfg, k)]:
        words = " ".join(f"{key}=true" for key in missing)
        raise ConfigError(
            f"from_run={source}: its configuration names code to run, which runs only if the "
            f"command says so: read that code, then add {words}"
        )
    fixed = [
        key
        for key in inherited
        if inherited[key].at_resume is not AtResume.rounding and key not in consent
    ]
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        node = f"{override.package or override.key_or_group}."
        if any(node.startswith(f"{key}.") or f"{key}.".startswith(node) for key in fixed):
            groups = dict.fromkeys(key.partition(".")[0] for key in fixed)
            raise ConfigError(
                f"{override.input_line} with from_run={source}: the run determines "
                f"{', '.join(groups)}; remove this override, or start a new run without from_run"
            )
    asked = [Phase(name) for name in cfg.phase.order]
    taken = _phases_to_reuse(cfg, asked, source, finished)
    composed = OmegaConf.structured(frozen)
    typed = {word.partition("=")[0] for word in read_command(source)}
    with open_dict(cfg):
        for key in inherited:
            # Drop micro-batches that the finished run's plan chose: the new plan chooses its own.
            is_own = OmegaConf.select(cfg, key) is not None or key not in typed
            if key in fixed or not is_own:
                OmegaConf.update(cfg, key, OmegaConf.select(composed, key), merge=False)
        cfg.from_run = str(source)
        order = [*taken, *(phase for phase in asked if phase not in taken)]
        cfg.phase.order = [phase.value for phase in order]


def _phases_to_reuse(
    cfg: DictConfig, asked: Sequence[Phase], source: Path, finished: Container[Phase]
) -> list[Phase]:
    """Return the ``finished`` phases that the ``asked`` phases start from."""
    usable = [Phase.sft] if asked[-1] is Phase.dpo else [Phase.sft, Phase.reward]
    parts = OmegaConf.select(cfg, "rewards", default={}).values()
    if Phase.reward not in asked and parts and all(p.kind != RewardKind.model for p in parts):
        usable = [Phase.sft]  # the command's rewards replace the reward model
    before = usable[: usable.index(asked[-1])] if asked[-1] in usable else usable
    taken = [phase for phase in before if phase in finished]
    if not taken:
        raise ConfigError(
            f"from_run={source}: the run has finished none of the phases that {asked[-1]} starts "
            f"from ({', '.join(before) or 'there are none'}); finish it with resume={source}, or "
            "name another run"
        )
    return taken


def describe_differences_from_source(config: RunConfig) -> list[str]:
    """Return a line with the last phase's keys that differ from the run ``config.from_run``.

    If no key differs, return an empty list.
    """
    source, last = config.from_run, config.phase.order[-1]
    finished = load_frozen_config(Path(str(source)))
    if last not in finished.phase.order:
        return []
    ours, theirs = (values_that_affect(each, frozenset({last})) for each in (config, finished))
    changes = [
        f"{key}={format_value(value)} instead of {format_value(theirs[key])}"
        for key, value in ours.items()
        if value != theirs.get(key, value) and effects_by_key()[key].at_resume is AtResume.fixed
    ]
    return [f"{last}, unlike in {source}: {', '.join(changes)}"] if changes else []
