"""Complete the configuration of a job's run in one pass: nothing changes it afterwards.

    what Hydra composed -> typed -> keys that follow from others, or from the machine
    -> checked by what every phase needs -> its data counted -> planned

The last step writes the plan's choices in place of auto and null. Two keys may still be open, as
they follow from data and a tokenizer that only the ranks may have: ``ppo.steps`` is null
(``count_ppo_steps`` in rlhf/phases/shared/context.py), and ``data.template`` is auto, which the
ranks refuse. With plan=off, null sizes stand for what rlhf/config/batches.py derives from others.
The configuration of a run that is resumed was completed when the run began; only overrides that may
change it are applied. A run that starts from a finished run (``from_run=RUN_DIR``) copies the keys
that the finished run determines.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import expand_user_path, read_user_text
from rlhf.config.choices import Phase, PlanMode, RewardKind, Source, Template
from rlhf.config.consent import keys_that_run_code, require_consent
from rlhf.config.effects import (
    effects_by_key,
    refuse_unread_keys,
    source_run_determines,
    values_that_affect,
)
from rlhf.config.freeze import (
    apply_resume_overrides,
    load_config_to_continue,
    load_frozen_config,
    read_command,
)
from rlhf.config.hydra_parts import key_of, own_options_in_use, parse_overrides
from rlhf.config.machine_rates import lacks_rates
from rlhf.config.roles import given_reward_model, tokenizer_base
from rlhf.config.schema.data import drop_shares_of_absent_phases
from rlhf.config.schema.keys import AtResume, format_value
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.rewards import DEFAULTS_OF_PART
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.config.validation import refuse_secret_values
from rlhf.data.plain_turns import is_plain_template
from rlhf.jobs.launch_command import NOTES, Job
from rlhf.jobs.read_loads import read_loads
from rlhf.jobs.sweep_jobs import restrict_plans_to_share
from rlhf.jobs.this_machine import apply_auto_hardware, find_hardware
from rlhf.models.sources import config_fields
from rlhf.models.tokenizers import read_tokens, tokenizer_place
from rlhf.options.phase_store.keys import Reuse
from rlhf.plan.plan import Plan, plan_and_configure
from rlhf.rewards.sealed import seal_judges
from rlhf.run.console import Console
from rlhf.run.results import finished_phases, reused_phases
from rlhf.runtime.rendezvous import (
    check_ranks_can_start,
    check_ranks_started,
    is_secondary_node,
    rank_from_environment,
    replace_rank_counts,
)
from rlhf.runtime.start_checks import check_before_start


class StoppedRun(NamedTuple):
    """A run that was stopped, and that the job resumes."""

    run_dir: Path
    frozen: RunConfig
    """The configuration with which the run was last started."""


class CompletedConfig(NamedTuple):
    """The complete configuration of a run, with its plan and lines to print."""

    config: RunConfig
    stopped: StoppedRun | None = None
    """The run to resume; None: a new run."""
    plan: Plan | None = None
    """The plan; None: the run is not planned, or a plan is not possible."""
    notes: tuple[str, ...] = ()
    """Lines for the run's log, on the plan and on options without an effect."""
    data_lines: tuple[str, ...] = ()
    """Lines on the data that was read for the plan."""


def complete_config(job: Job) -> CompletedConfig:
    """Complete and check the configuration of the job's run; plan a run that this node begins."""
    if job.resume is not None:
        completed = CompletedConfig(*read_stopped_config(job))
    else:
        completed = CompletedConfig(build_new_config(job))
    config, is_new = completed.config, completed.stopped is None
    if is_secondary_node() and is_new and config.plan is PlanMode.check:
        # Check the data here too: with bad data, this node would wait for a run that never starts.
        read_loads(config, finished=reused_phases(config))
    stopped = completed.stopped
    has_more_steps = stopped is not None and config.ppo.steps != stopped.frozen.ppo.steps
    is_planned_here = (is_new or job.is_plan or has_more_steps) and not is_secondary_node()
    if config.launcher.dry_run or not is_planned_here:
        return completed
    with restrict_plans_to_share(config.hardware, job.at_a_time):
        planned = plan_config(completed, job)
    # The plan of a resumed run is only printed: the run keeps the sizes with which it began.
    kept = planned.config if is_new or job.is_plan else config
    return CompletedConfig(kept, *planned[1:])


def build_new_config(job: Job) -> RunConfig:
    """Return the configuration of a new run, without the choices of its plan.

    Raises:
        ConfigError: if a value is wrong, or an override has no effect.
    """
    if job.resume is not None:
        raise ConfigError(
            f"resume={job.resume}: only launch.py resumes a run; use the overrides in "
            f"{job.resume}/command.txt instead"
        )
    cfg = job.cfg
    name_own_experiment(cfg, job.overrides)
    if (from_run := OmegaConf.select(cfg, "from_run")) is not None:
        source = expand_user_path(str(from_run), key="from_run").resolve()
        copy_keys_of_source_run(cfg, source, finished_phases(source), job.overrides)
    config = drop_shares_of_absent_phases(to_run_config(apply_auto_hardware(cfg, find_hardware)))
    has_size = any("data.size=" in word for word in job.overrides)
    if config.data.source is Source.local and not has_size:
        # A data.size that an experiment sets for its own data does not apply to a user's files.
        config = replace(config, data=replace(config.data, size=0))
    refuse_secret_values(config, os.environ)
    refuse_unread_keys(config, job.overrides)
    asked_template, (key, model) = config.data.template, tokenizer_base(config)
    downloads = not (job.is_plan or config.launcher.dry_run)
    template = choose_template(asked_template, key, model, downloads=downloads)
    if config.from_run is not None and job.folder is None:
        for line in describe_differences_from_source(config):
            Console().say(line)
    if asked_template is Template.auto and not config.launcher.dry_run:
        for line in describe_template(template, key, model):
            Console().say(line)
    data = replace(config.data, template=template)
    config = replace(config, data=data, rewards=seal_judges(config.rewards))
    if config.reuse.phases is Reuse.sweep:
        phases = Reuse.never if job.folder is None else Reuse.always
        config = replace(config, reuse=replace(config.reuse, phases=phases))
    for line in () if config.launcher.dry_run else describe_reward_model(config):
        Console().say(line)
    return config


def name_own_experiment(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Set ``name`` and ``experiment`` to those of the user's own experiment, unless they are set.

    Otherwise they would name the experiment that the user's file begins with.
    """
    is_named = any(word.lstrip("+").startswith("name=") for word in overrides)
    for option, path in own_options_in_use(overrides):
        if option.startswith("experiment/"):
            for key in ("experiment",) if is_named else ("name", "experiment"):
                if not re.search(f"(?m)^{key}:", read_user_text(path)):
                    cfg[key] = path.stem


def read_stopped_config(job: Job) -> tuple[RunConfig, StoppedRun]:
    """Read the run to resume; overrides may change how it is started, not what it computes."""
    # Resolve the link runs/latest now: it may point to another run before this run ends.
    run_dir = expand_user_path(str(job.resume), key="resume").resolve()
    is_given = bool(OmegaConf.select(job.cfg, "trust_run"))
    require_consent(run_dir, is_given=is_given, others_only=True, fix="trust_run=true")
    frozen = load_config_to_continue(run_dir)
    # In a resumed run, auto stands for the template with which the run was started.
    if OmegaConf.select(job.cfg, "data.template") == Template.auto:
        job.cfg.data.template = frozen.data.template.value
    config = apply_resume_overrides(frozen, job.cfg, job.overrides)
    refuse_secret_values(config, os.environ)
    if config.plan is not PlanMode.only:
        check_ranks_started(config)
        check_ranks_can_start(config)
    elif not job.is_plan:
        raise ConfigError(
            f"resume={run_dir}: plan=only made this folder, and no run began in it; "
            "add plan=check to begin the run"
        )
    return config, StoppedRun(run_dir, frozen)


def plan_config(completed: CompletedConfig, job: Job) -> CompletedConfig:
    """Check what the phases need, count the data, plan, and apply the plan's choices.

    Raises:
        RlhfError: if a phase would refuse the data or a model, or the plan does not fit.
    """
    config, loads = completed.config, None
    data_lines: list[str] = []
    if not job.is_plan:
        config = replace_rank_counts(config)
    elif rank_from_environment() is not None:
        raise ConfigError(
            "plan=only: the ranks have been started; start launch.py without torchrun"
        )
    finished = reused_phases(config)
    check_before_start(config, finished=finished)
    if config.plan is PlanMode.check and lacks_rates(config.hardware):
        from rlhf.jobs.measure_cpu import measure_cpu  # imports torch

        measure_cpu()
    if config.plan is not PlanMode.off:
        loads, data_lines = read_loads(config, finished=finished)
    config, plan, notes = plan_and_configure(config, loads, finished=finished)
    if not job.is_plan:
        check_ranks_can_start(config)
    return CompletedConfig(config, completed.stopped, plan, notes, tuple(data_lines))


def choose_template(asked: Template, key: str, model: ModelConfig, *, downloads: bool) -> Template:
    """Return chat or plain for data.template=auto; return any other template unchanged.

    The tokenizer of ``model`` (the value of key ``key``) decides. If ``downloads``, the files
    of a hub tokenizer that is not on this machine are downloaded. If they cannot be read, auto is
    returned: the ranks will report the reason when they load the tokenizer.
    """
    if asked is not Template.auto:
        return asked
    template = _read_chat_template(key, model, downloads=downloads)
    if template is None:
        return Template.auto
    return Template.chat if template else Template.plain


def describe_reward_model(config: RunConfig) -> list[str]:
    """Return warnings if a pretrained reward model may score texts in a form that is new to it."""
    model = given_reward_model(config)
    if model is None or Phase.reward in config.phase.order:
        return []
    scorer, (key, owner) = replace(model, tokenizer=None), tokenizer_base(config)
    theirs = _read_chat_template("reward_model", scorer, downloads=False)
    is_chat = config.data.template is Template.chat
    ours = _read_chat_template(key, owner, downloads=False) if is_chat else ""
    lines = []
    if theirs and ours is not None and theirs != ours:
        lines.append(NOTES["other_template"].format(path=model.path))
    tokens, pad = read_tokens(scorer, key="reward_model"), config_fields(scorer).get("pad_token_id")
    if tokens is not None and pad is not None and pad == tokens.ids.get(tokens.end):
        lines.append(NOTES["pads_with_end"].format(path=model.path))
    return lines


def describe_template(chosen: Template, key: str, model: ModelConfig) -> list[str]:
    """Return a line on the template chosen for data.template=auto; [] for a new tokenizer."""
    place = tokenizer_place(model, key=key)[1]
    if place is None:
        return []
    return [f"data.template={chosen}: the tokenizer of {place} {NOTES['templates'][chosen]}"]


def _read_chat_template(key: str, model: ModelConfig, *, downloads: bool) -> str | None:
    """Return the chat template of the tokenizer of ``model``; None if its files cannot be read.

    Return "" if it has no template, or the plain one, or is a tokenizer that the run trains.
    """
    place_key, place = tokenizer_place(model, key=key)
    if place is None:
        return ""
    folder = expand_user_path(place, key=place_key)
    read = partial(_read_model_file, folder, place, model.revision, downloads)
    settings, template = read("tokenizer_config.json"), read("chat_template.jinja")
    if settings is None and template is None:
        return None
    try:
        template = template or json.loads(settings or "{}").get("chat_template")
    except (ValueError, AttributeError):  # a damaged file
        return None
    # A tokenizer that a plain run saved has a template too, which renders the plain form.
    is_plain = isinstance(template, str) and is_plain_template(template)
    return str(template) if template and not is_plain else ""


def _read_model_file(
    folder: Path, place: str, revision: str | None, downloads: bool, name: str
) -> str | None:
    """Return the text of a file of ``folder``, or of the hub id ``place``; None if unreadable."""
    file = folder / name
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        offline = not downloads
        try:
            file = Path(hf_hub_download(place, name, revision=revision, local_files_only=offline))
        except (OSError, ValueError):  # no such file, network or access, or an invalid hub id
            return None
    return file.read_text(encoding="utf-8") if file.is_file() else None


def copy_keys_of_source_run(
    cfg: DictConfig, source: Path, finished: Container[Phase], overrides: Sequence[str]
) -> None:
    """Copy to ``cfg`` the keys that the run in ``source`` determines; add the phases to reuse.

    Phases to reuse are the ``finished`` phases before the last requested phase, so ``phase=ppo``
    and the whole pipeline mean the same. The reward model is not reused if the command's rewards
    replace it. Micro-batch sizes, which change no result, come from this command, or from the
    command of the finished run. A seed in this command applies to the phases that this run trains;
    the data keep the seed of the finished run.

    Raises:
        CheckpointError: if ``source`` is not the directory of a run.
        ConfigError: if the run has finished no phase that can be used, or ``overrides`` change a
            key that the run determines.
    """
    is_given = bool(OmegaConf.select(cfg, "trust_run"))
    require_consent(source, is_given=is_given, others_only=True, fix="trust_run=true")
    frozen = load_frozen_config(source)
    inherited = {key: effect for key, effect in effects_by_key().items() if effect.is_inherited}
    consent = keys_that_run_code(source)
    if missing := [k for k in consent if k in inherited and not OmegaConf.select(cfg, k)]:
        words = " ".join(f"{key}=true" for key in missing)
        raise ConfigError(
            f"from_run={source}: its configuration runs code, which you must allow: read that "
            f"code, then add {words}"
        )
    fixed = [key for key in inherited if source_run_determines(key) and key not in consent]
    parsed = parse_overrides(overrides)
    for override in parsed:
        node = f"{key_of(override)}."
        if any(node.startswith(f"{key}.") or f"{key}.".startswith(node) for key in fixed):
            groups = dict.fromkeys(key.partition(".")[0] for key in fixed)
            raise ConfigError(
                f"{override.input_line} with from_run={source}: the run determines "
                f"{', '.join(groups)}; remove this override, or start a new run without from_run"
            )
    phases = [Phase(name) for name in cfg.phase.order]
    reused = _phases_to_reuse(cfg, phases, source, finished)
    composed = OmegaConf.structured(frozen)
    typed = {word.partition("=")[0] for word in read_command(source)}
    with open_dict(cfg):
        for key in inherited:
            # Drop micro-batches that the finished run's plan chose: the new plan chooses its own.
            is_own = OmegaConf.select(cfg, key) is not None or key not in typed
            if key in fixed or not is_own:
                OmegaConf.update(cfg, key, OmegaConf.select(composed, key), merge=False)
        if not any(override.key_or_group == "seed" for override in parsed):
            cfg.seed = frozen.seed
        cfg.data.seed = frozen.data_seed if frozen.data_seed != cfg.seed else None
        cfg.from_run = str(source)
        order = [*reused, *(phase for phase in phases if phase not in reused)]
        cfg.phase.order = [phase.value for phase in order]


def _phases_to_reuse(
    cfg: DictConfig, phases: Sequence[Phase], source: Path, finished: Container[Phase]
) -> list[Phase]:
    """Return the ``finished`` phases that the last of the requested ``phases`` starts from."""
    usable = [Phase.sft] if phases[-1] is Phase.dpo else [Phase.sft, Phase.reward]
    parts = OmegaConf.select(cfg, "rewards", default={}).values()
    if Phase.reward not in phases and parts and all(p.kind != RewardKind.model for p in parts):
        usable = [Phase.sft]  # the command's rewards replace the reward model
    before = usable[: usable.index(phases[-1])] if phases[-1] in usable else usable
    if not before:
        raise ConfigError(
            f"from_run={source}: {phases[-1]} starts from no earlier phase; remove from_run"
        )
    reused = [phase for phase in before if phase in finished]
    if not reused:
        raise ConfigError(
            f"from_run={source}: the run has finished none of the phases that {phases[-1]} starts "
            f"from ({', '.join(before)}); finish it with resume={source}, or name another run"
        )
    return reused


def describe_differences_from_source(config: RunConfig) -> list[str]:
    """Return one line with the last phase's keys that differ from the run ``config.from_run``.

    If no key differs, or that run has no such phase, return no line.
    """
    source, last = config.from_run, config.phase.order[-1]
    finished = load_frozen_config(Path(str(source)))
    if last not in finished.phase.order:
        return []
    values, source_values = (values_that_affect(c, frozenset({last})) for c in (config, finished))
    for each in (values, source_values):
        each["rewards"] = {
            name: {key: value for key, value in part.items() if value != DEFAULTS_OF_PART[key]}
            for name, part in each.get("rewards", {}).items()
        }
    changes = [
        f"{key}={format_value(value)} instead of {format_value(source_values[key])}"
        for key, value in values.items()
        for effect in [effects_by_key()[key]]
        if value != source_values.get(key, value)
        and effect.at_resume is AtResume.fixed
        and not effect.is_inherited
    ]
    return [f"{last}, unlike in {source}: {', '.join(changes)}"] if changes else []
