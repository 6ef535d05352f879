"""One rank of a run: it runs the phases in order, and skips phases that have a result."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from rlhf.base.atomic import await_path
from rlhf.base.command import quieten_libraries
from rlhf.base.errors import USER_ERROR
from rlhf.base.foreign_errors import convert_drive_errors
from rlhf.base.program import name_commands
from rlhf.base.ranks import Ranks
from rlhf.base.stored_files import RESULT
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import ModelInit, Phase, Source, Template
from rlhf.config.freeze import load_run, read_command
from rlhf.config.roles import given_reward_model, starting_models, tokenizer_base
from rlhf.config.run_dir import lock_run_dir, point_latest_to, refuse_changed_config, refuse_links
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import all_end_in_assistant, build_plain_template
from rlhf.data.splits import PhaseData
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.engine.devices import current_ranks, resolve_dtype, set_torch_threads
from rlhf.engine.idle_threads import sleep_early_on_shared_cores
from rlhf.engine.settings import EngineSettings
from rlhf.kernels import kernels_for
from rlhf.kernels.kernel_checks import choose_kernels
from rlhf.methods import methods_in_use
from rlhf.models.sources import RUN_FOLDER, config_fields
from rlhf.models.tokenizers import (
    Tokens,
    check_same_tokens,
    load_or_train_tokenizer,
    load_tokenizer,
)
from rlhf.options.ahead.keys import SCRATCH
from rlhf.phases.dpo import run_dpo
from rlhf.phases.ppo.hooks import hook_classes
from rlhf.phases.ppo.loop import run_ppo
from rlhf.phases.ppo.reward_mix import try_reward_parts
from rlhf.phases.reward import run_reward
from rlhf.phases.sft import run_sft
from rlhf.phases.shared.context import RunContext, count_ppo_steps
from rlhf.phases.shared.preflight import require_capabilities, require_data
from rlhf.rewards.sealed import require_sealed_judges
from rlhf.run.console import Console
from rlhf.run.finished_phase import STATE
from rlhf.run.jsonl import LOGS, drop_lines_of_phases, truncate_file
from rlhf.run.model_folder import replace_folder_atomically
from rlhf.run.phase_state import Checkpoint, find_latest_intact_checkpoint
from rlhf.run.results import phase_result_path, read_plan, record_attempt, write_json
from rlhf.run.trackers import build_tracker
from rlhf.runtime.downloads import download_inputs, read_cache_only
from rlhf.runtime.out_of_memory import explain_out_of_memory
from rlhf.runtime.phase_runs import (
    build_run_result,
    describe_environment,
    require_finite_objective,
    run_phase,
    unfinished_phases,
    verify_finished_phases,
)
from rlhf.runtime.rendezvous import Rendezvous, ignores_job_signals, num_cores_per_rank
from rlhf.runtime.run_data import load_phase_data
from rlhf.runtime.start_checks import check_before_start
from rlhf.runtime.watchdog import Process, start_watchdog

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RUNNERS: dict[Phase, Callable[[RunContext], dict[str, Any]]] = {
    Phase.sft: run_sft,
    Phase.reward: run_reward,
    Phase.ppo: run_ppo,
    Phase.dpo: run_dpo,
}


def end_stuck_process(reason: str) -> None:
    """Print why the only rank of a run is stuck, and end the process."""
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    os._exit(USER_ERROR)  # not sys.exit: the main thread is stuck


def run_worker(
    run_dir: Path,
    rendezvous: Rendezvous | None = None,
    on_stuck: Callable[[str], None] = end_stuck_process,
    begun: RunConfig | None = None,
) -> float:
    """Run the phases of ``run_dir`` that have no result yet; return the run's objective.

    ``rendezvous`` connects this process to the other ranks; without it there is one rank. The
    watchdog calls ``on_stuck``, which ends the process, with the reason. ``begun`` is the
    configuration with which the launcher began the run, if it did so in this process.
    """
    config = load_run(run_dir)
    quieten_libraries()
    set_torch_threads(num_cores_per_rank(config.hardware))
    keeps_memory = config.hardware.keep_freed_memory and keep_freed_memory()
    if rendezvous is not None:
        if not rendezvous.run_first_on_each_node(partial(download_inputs, config, run_dir), config):
            read_cache_only()
        rendezvous.start_process_group(config)
    ranks = current_ranks(config.hardware.device)
    console = Console(log_every=config.tracking.log_every, quiet=not ranks.is_main)
    # Each rank compares kernels on its own device. The console of other ranks prints nothing.
    choose_kernels(config.hardware.kernels, console.say if ranks.is_main else None)
    if config.hardware.keep_freed_memory and not keeps_memory:
        console.say(
            "hardware.keep_freed_memory: only glibc supports this setting; continuing without it"
        )
    others = rendezvous.others if rendezvous else {}
    start_watch = partial(install_signals_and_watchdog, others=others, on_stuck=on_stuck)
    with (
        convert_drive_errors(f"continue the run with python launch.py resume={run_dir}"),
        lock_run_dir(run_dir, console.say) if ranks.is_main else nullcontext(),
        sleep_early_on_shared_cores(),
    ):
        refuse_changed_config(run_dir, config if begun is None else begun)
        result = run_phases(config, run_dir, ranks, console, start_watch)
    ranks.barrier()
    require_finite_objective(result["phases"], run_dir)
    return float(result["objective"])


def run_phases(
    config: RunConfig,
    run_dir: Path,
    ranks: Ranks,
    console: Console,
    start_watch: Callable[[RunContext], None],
) -> dict[str, Any]:
    """Run the phases that have no result yet; write result.json and return its content.

    ``start_watch`` is called once, before the first of these phases.
    """
    unfinished = unfinished_phases(config, run_dir)
    finished = [phase for phase in config.phase.order if phase not in unfinished]
    if ranks.is_main:
        if changed := record_attempt(run_dir, describe_environment(config)):
            console.say(
                f"resumed with {'; '.join(changed)}: results may differ from those of a run that "
                "was not stopped"
            )
        verify_finished_phases(run_dir, finished, config, console.say)
    if unfinished:
        context = build_context(config, run_dir, ranks, console, unfinished)
        start_watch(context)
        try:
            require_data(context, unfinished)
            if Phase.ppo in unfinished:
                context = count_ppo_steps(context)
                try_reward_parts(context)
                for hook in hook_classes(config):
                    hook.check_data(context)
            for phase in unfinished:
                with explain_out_of_memory(config, phase, run_dir):
                    run_phase(context, phase, RUNNERS[phase])
                await_path(phase_result_path(run_dir, phase))
            context.tracker.conclude(build_run_result(config, run_dir, unfinished))
        finally:
            context.tracker.finish()
            if ranks.is_main:  # even if the run failed
                shutil.rmtree(run_dir / Phase.ppo / SCRATCH, ignore_errors=True)
    result = build_run_result(config, run_dir, unfinished)
    if ranks.is_main:
        require_sealed_judges(config.rewards)
        write_json(run_dir / RESULT, result)
        point_latest_to(run_dir, console.say)  # for runs that took no step
    return result


def install_signals_and_watchdog(
    context: RunContext, others: Mapping[int, Process], on_stuck: Callable[[str], None]
) -> None:
    """Install handlers of signals that request a checkpoint, and start the watchdog."""
    config = context.config
    grace, stops = config.checkpoint.grace_seconds, not ignores_job_signals()
    context.requests.install_handlers(grace_seconds=grace, stops=stops)
    if config.launcher.watchdog_minutes is None:
        return
    remedy = name_commands(f"python launch.py resume={context.run_dir} continues the run")
    start_watchdog(
        context.heartbeat,
        60 * config.launcher.watchdog_minutes,
        rank=context.ranks.rank,
        others=others,
        on_stuck=lambda reason: on_stuck(f"{reason}; {remedy}"),
    )


def build_context(
    config: RunConfig, run_dir: Path, ranks: Ranks, console: Console, unfinished: list[Phase]
) -> RunContext:
    """Build one rank's data, tokenizer and trackers for the phases still to run; print a summary.

    Phases that were stopped continue from their last checkpoints. Log lines of steps after these
    checkpoints are dropped, because the steps are taken again.
    """
    require_capabilities(config)
    finished = [phase for phase in config.phase.order if phase not in unfinished]
    check_before_start(config, finished=finished)
    read_command(run_dir)  # model cards need command.txt later: raise now if it is damaged
    if ranks.is_main:
        read_plan(run_dir, console.say)
    dtype = resolve_dtype(config.hardware.dtype, config.hardware.device)
    console.say(
        f"run {run_dir}: {', '.join(config.phase.order)} on {ranks.size} x {ranks.device.type}, "
        f"{dtype}, ZeRO stage {config.zero.stage}, seed {config.seed}"
    )
    if (line := kernels_for(config.hardware.device).summarize_kernels(dtype)) is not None:
        console.say(line)
    parts = load_phase_data(config, console.say)
    refuse_output_links(run_dir, unfinished)
    tokenizer = create_or_load_tokenizer(config, run_dir, parts)
    for line in describe_new_embeddings(config, len(tokenizer)):
        console.say(line)
    resumes = {
        phase: checkpoint
        for phase in unfinished
        if (checkpoint := find_latest_intact_checkpoint(run_dir / phase, console.say, ranks))
    }
    if ranks.is_main:
        drop_repeated_lines(run_dir, unfinished, resumes, console.say)
    return RunContext(
        config=config,
        run_dir=run_dir,
        ranks=ranks,
        settings=EngineSettings(zero=config.zero, dtype=dtype),
        tokenizer=tokenizer,
        parts=parts,
        judge=GoldJudge() if config.data.source is Source.synthetic else None,
        console=console,
        tracker=build_tracker(config, run_dir, is_main=ranks.is_main, say=console.say),
        resumes=resumes,
    )


def refuse_output_links(run_dir: Path, unfinished: Sequence[Phase]) -> None:
    """Raise an error if a file or folder that ``unfinished`` phases write is a symbolic link."""
    under = ("", f"/{STATE}", f"/{SCRATCH}")
    phases = [f"{phase}{each}" for phase in unfinished for each in under]
    names = ("tokenizer", "wandb", "wandb_id", "tensorboard")
    refuse_links(run_dir, [*LOGS, *names, *phases])


def drop_repeated_lines(
    run_dir: Path,
    unfinished: Sequence[Phase],
    resumes: Mapping[Phase, Checkpoint],
    say: Callable[[str], None],
) -> None:
    """Drop log lines of steps that are repeated, and print which phases begin again."""
    restarted = {phase.value for phase in unfinished if phase not in resumes}
    begun = set()
    for name in LOGS:
        for checkpoint in resumes.values():
            truncate_file(run_dir / name, checkpoint.state["logs"].get(name, 0))
        begun |= drop_lines_of_phases(run_dir / name, restarted)
    for phase in sorted(begun):
        say(f"{phase}: begins again, as it was stopped before its first checkpoint")


def create_or_load_tokenizer(
    config: RunConfig, run_dir: Path, parts: dict[Phase, PhaseData]
) -> PreTrainedTokenizerBase:
    """Return the run's tokenizer, which is created once and stored in the run directory.

    It is the tokenizer of ``model``, or of ``reward_model`` if the run trains only a reward model.

    Raises:
        ConfigError: if a pretrained reward model or reference has other tokens than the actor.
    """
    folder = run_dir / "tokenizer"
    key, owner = tokenizer_base(config)
    with FileLock(run_dir / "tokenizer.lock"):
        if not folder.exists():
            texts = (
                text for part in parts.values() for r in part.train for text in r.all_texts if text
            )
            if config.from_run is None:
                tokenizer = load_or_train_tokenizer(owner, key=key, texts=texts)
            else:
                tokenizer = load_tokenizer(Path(config.from_run) / "tokenizer", key=RUN_FOLDER)
            if config.data.template is Template.plain and config.from_run is None:
                prompts = (r.prompt for part in parts.values() for r in part.train if r.prompt)
                opening = tokenizer.decode(Encoder(tokenizer).opening_ids())
                tokenizer.chat_template = (
                    build_plain_template(opening) if all_end_in_assistant(prompts) else None
                )
            with replace_folder_atomically(folder) as building:
                tokenizer.save_pretrained(building)
    tokenizer = load_tokenizer(folder, key=RUN_FOLDER)
    if (model := given_reward_model(config)) is not None:
        reward_tokenizer = load_or_train_tokenizer(model, key="reward_model", texts=())
        ours, theirs = (Tokens.from_tokenizer(each) for each in (tokenizer, reward_tokenizer))
        check_same_tokens(ours, theirs, place=str(model.path))
    for method in methods_in_use(config):
        for phase in config.phase.order:
            if (reference := method.reference(config, phase)) is not None:
                _check_tokens_of_reference(*reference, tokenizer)
    return tokenizer


def _check_tokens_of_reference(
    group: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise an error if the reference, which GROUP_path names, has other tokens than the run."""
    key, path = f"{group}_path", str(model.path)
    reference_tokenizer = load_tokenizer(expand_user_path(path, key=key), key=key)
    ours, theirs = (Tokens.from_tokenizer(each) for each in (tokenizer, reference_tokenizer))
    check_same_tokens(ours, theirs, place=path, name=key, way_out="")


def describe_new_embeddings(config: RunConfig, tokens: int) -> Iterator[str]:
    """Yield a warning for each pretrained model that has fewer embeddings than ``tokens``."""
    for key, model in dict(starting_models(config, config.phase.order[-1])).items():
        rows = config_fields(model, key=key).get("vocab_size")
        if model.init is ModelInit.pretrained and isinstance(rows, int) and rows < tokens:
            yield (
                f"warning: {key}.path={model.path} has {rows} embeddings, and the tokenizer has "
                f"{tokens} tokens: {tokens - rows} random rows are added, and a policy samples "
                "their tokens until it has learned not to. Use the tokenizer of these weights, or "
                "train with phase sft first"
            )


# glibc's names and numbers for mallopt(3), from malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER, TOP_PAD_BYTES = 2**31 - 1, 256 * 2**20


def keep_freed_memory() -> bool:
    """Keep freed memory in the process instead of returning it to the kernel each time.

    The kernel zeroes every page of a block before the process gets it again: on a CPU this takes
    about a quarter of a training step on sequences of 256 tokens. Return False, and change
    nothing, if the C library is not glibc and has no such setting.
    """
    name = ctypes.util.find_library("c")
    library = None if name is None else ctypes.CDLL(name)
    if library is None or not hasattr(library, "mallopt"):
        return False
    settings = {M_TRIM_THRESHOLD: NEVER, M_TOP_PAD: TOP_PAD_BYTES, M_MMAP_MAX: 0}
    return all(library.mallopt(setting, value) == 1 for setting, value in settings.items())
