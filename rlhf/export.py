"""Export a model of a run as a Hugging Face folder, or upload it to the hub.

    python -m rlhf.export RUN_DIR                       the final policy, to RUN_DIR/exported
    python -m rlhf.export RUN_DIR --checkpoint N        the policy of a kept checkpoint
    python -m rlhf.export RUN_DIR --push OWNER/NAME     upload to a private repository

Adapters are merged into their base model. All work is done on the CPU, in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from rlhf.base.command import build_command_parser, run_to_exit_code
from rlhf.base.errors import CapabilityError, CheckpointError, ConfigError
from rlhf.base.stored_files import copy_regular_files, read_stored_text
from rlhf.base.types import Engine
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Device, Dtype, Phase, RewardKind
from rlhf.config.consent import require_consent
from rlhf.config.freeze import MICRO_BATCH_KEYS, load_run
from rlhf.config.run_dir import find_run_dir
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import PairStep
from rlhf.engine.devices import current_ranks, supported_dtype_or_fp32
from rlhf.engine.settings import EngineSettings
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.pretrained import find_adapter_chain
from rlhf.models.sources import RUN_FOLDER, ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.models.weight_files import stored_dtype
from rlhf.options import Backend
from rlhf.phases.dpo import DpoTrainer
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.reward import RewardTrainer
from rlhf.phases.sft import SftTrainer
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.exporting import build_export, save_export
from rlhf.rewards.isolated import HERE
from rlhf.run.console import Console
from rlhf.run.finished_phase import verify_model
from rlhf.run.model_card import results_section
from rlhf.run.model_folder import replace_folder_atomically
from rlhf.run.phase_state import checkpoint_folder, checkpoint_folders, load_checkpoint
from rlhf.run.tracker import Tracker

# Engine and folder of each phase's main model; without --phase, a run's first policy is taken.
ENGINES = {Phase.ppo: "actor", Phase.dpo: "policy", Phase.sft: "model", Phase.reward: "model"}
FOLDERS = {Phase.ppo: "actor", Phase.dpo: "actor", Phase.sft: "model", Phase.reward: "model"}
# Values of the keys that divide models over ranks, for one rank.
ON_ONE_RANK: Mapping[str, object] = {
    **dict.fromkeys(("hardware.nodes", "hardware.ranks_per_node", "zero.hpz_partition_size"), 1),
    **dict.fromkeys(("zero.reference_stage", "zero.reward_stage", "zero.nvme_path")),
    **dict.fromkeys(("zero.offload_optimizer", "zero.offload_parameters"), False),
    **dict.fromkeys(("zero.offload_reference", "zero.offload_reward"), False),
    **dict.fromkeys(("zero.offload_ema", "zero.quantize_frozen_weights"), False),
    **dict.fromkeys(("zero.quantize_weights", "zero.quantize_gradients"), False),
    "zero.engine": "auto",
}


def export_final_model(
    run_dir: Path,
    folder: Path,
    *,
    phase: Phase | None = None,
    average: bool = False,
    trusts_run: bool = False,
) -> None:
    """Write the final model of ``phase`` (None: the final policy) to ``folder``.

    With ``average``, write the moving average of its weights. The model card is a copy of the
    run's card, with the results of all phases.

    Raises:
        CheckpointError: if the run has no such model, or the model is damaged.
        ConfigError: if ``folder`` exists.
    """
    _refuse_existing(folder)
    config = load_run(run_dir)
    policies = [p for p in FOLDERS if (run_dir / p / FOLDERS[p]).is_dir() and p is not Phase.reward]
    phase = phase or next(iter(policies), Phase.ppo)
    source = run_dir / phase / (FOLDERS[phase] + "_ema" * average)
    if not source.is_dir():
        raise CheckpointError(
            f"{source} is missing: the run has not finished this phase, or keeps no such model. "
            "It has " + (", ".join(f"--phase {name}" for name in policies) or "no policy")
        )
    verify_model(source)
    card = read_stored_text(source / "README.md") or ""
    for form in ("# {}\n", '"{}")'):  # the card's title and example code
        old, new = (form.format(f"{path.parent.name}/{path.name}") for path in (source, folder))
        card = card.replace(old, new)
    with replace_folder_atomically(folder) as building:
        if not (source / "adapter_config.json").exists():
            copy_regular_files(source, building)
        else:
            require_consent(run_dir, is_given=trusts_run, models_only=True)
            _write_merged_model(source, building, base=config.model)
        text = card.rstrip() + results_section(run_dir) + "\n"
        (building / "README.md").write_text(text, encoding="utf-8")


def export_checkpoint(
    checkpoint: Path, folder: Path, *, average: bool = False, trusts_run: bool = False
) -> None:
    """Write the model in a checkpoint, or with ``average`` its moving average, to ``folder``.

    Raises:
        ConfigError: if ``folder`` exists, or the run keeps no average.
        CheckpointError: if the checkpoint is damaged, or a model that its phase loads is missing.
    """
    _refuse_existing(folder)
    loaded = load_checkpoint(checkpoint.resolve())
    phase, run_dir = Phase(loaded.folder.parents[1].name), loaded.folder.parents[2]
    require_consent(run_dir, is_given=trusts_run, others_only=True)
    require_consent(run_dir, is_given=trusts_run, models_only=True)
    context = build_run_context(run_dir)
    if average and not (phase is Phase.ppo and context.config.ppo.ema_beta):
        raise ConfigError("--average: only PPO with ppo.ema_beta keeps a moving average")
    engine = _build_engine(context, phase)
    engine.training_state.load(loaded.build_tensor_reader(ENGINES[phase]))
    follower = engine.follower if average else None
    with nullcontext() if follower is None else follower.swap_in():
        export = build_export(context.config, engine)
        what = f"The {phase} model after step {loaded.step}."
        save_export(context, export, folder, what=what, answers=phase is not Phase.reward)


def find_kept_checkpoint(run_dir: Path, step: int, phase: Phase | None) -> Path:
    """Return the folder of the checkpoint of ``step`` in ``phase``; None: the phase that has it."""
    load_run(run_dir)
    phases = [phase] if phase else list(Phase)
    kept = sorted(folder for p in Phase for folder in checkpoint_folders(run_dir / p))
    with_it = [p for p in phases if checkpoint_folder(run_dir / p, step) in kept]
    if len(with_it) != 1:
        names = [f"--phase {k.parents[1].name} --checkpoint {int(k.name[5:])}" for k in kept]
        raise CheckpointError(
            f"{run_dir}: --checkpoint {step} is in {len(with_it)} phases; it must be in one. The "
            f"run keeps {', '.join(names) or 'none (checkpoint.keep_finished=true keeps them)'}"
        )
    return checkpoint_folder(run_dir / with_it[0], step)


def push_to_hub(folder: Path, hub_id: str, *, public: bool, repo_type: str) -> str:
    """Upload a folder to a repository of the Hugging Face hub; return the repository's address.

    ``repo_type`` is "model" or "dataset". The access token comes from the environment, or from
    ``hf auth login``.

    Raises:
        CapabilityError: if the hub cannot be reached, or refuses the upload.
        ConfigError: if the repository is public already, and ``public`` is False.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        address = api.create_repo(hub_id, repo_type=repo_type, private=not public, exist_ok=True)
        may_upload = public or api.repo_info(hub_id, repo_type=repo_type).private
        if may_upload:
            api.upload_folder(repo_id=hub_id, repo_type=repo_type, folder_path=folder)
    except Exception as error:
        raise CapabilityError(
            f"--push {hub_id}: the Hugging Face hub refused, or cannot be reached ({error}). Type "
            "`hf auth login`, or set HF_TOKEN to a token with write access"
        ) from error
    if not may_upload:
        raise ConfigError(f"--push {hub_id}: the repository is public: add --public, or rename it")
    return str(address)


def _write_merged_model(source: Path, folder: Path, *, base: ModelConfig) -> None:
    """Merge the adapter in ``source`` into its base model; write it in the base model's dtype."""
    tokenizer = load_tokenizer(source, key=RUN_FOLDER)
    model_source = ModelSource.from_folder(source, base=base)
    adapters, base_source = find_adapter_chain(model_source)
    if adapters[0].config.task_type == "SEQ_CLS":
        model = build_scorer(model_source, tokenizer, seed=0).pretrained
    else:
        model = build_actor(model_source, tokenizer, seed=0)
    model.to(stored_dtype(base_source)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another folder with --out FOLDER")


def build_run_context(run_dir: Path, device: Device = Device.cpu) -> RunContext:
    """Build the context of a run for one rank on ``device``, without data or trackers."""
    config = load_run(run_dir)
    config = config_for_one_rank(
        config, device, supported_dtype_or_fp32(config.hardware.dtype, device)
    )
    return RunContext(
        config=config,
        run_dir=run_dir,
        ranks=current_ranks(device),
        settings=EngineSettings(zero=config.zero, dtype=config.hardware.dtype),
        tokenizer=load_tokenizer(run_dir / "tokenizer", key=RUN_FOLDER),
        parts={},
        judge=None,
        console=Console(),
        tracker=Tracker(),
    )


def _build_engine(context: RunContext, phase: Phase) -> Engine:
    match phase:
        case Phase.sft:
            return SftTrainer(context, total_steps=1).engine
        case Phase.reward:
            return RewardTrainer(context, [PairStep([], [], 0)]).engines["model"]
        case Phase.dpo:
            return DpoTrainer(context, total_steps=1).policy
        case Phase.ppo:
            rewards = {  # nothing is scored here: start no process, and load no scorer
                name: part
                if part.kind in HERE and part.kind != RewardKind.scorer
                else replace(part, kind=RewardKind.gold)
                for name, part in context.config.rewards.items()
            }
            return RLHFEngine(replace(context.config, rewards=rewards), context.ranks).actor


def main(arguments: Sequence[str]) -> int:
    """Export the model that the command names; return the exit code."""
    parser = build_command_parser("rlhf.export", __doc__, uses_run=True)
    parser.add_argument("run_dir", nargs="?", help="default: runs/latest")
    parser.add_argument("--phase", type=Phase, choices=ENGINES, help="default: the last policy")
    parser.add_argument("--checkpoint", type=int, metavar="N", help="the kept checkpoint of step N")
    parser.add_argument("--average", action="store_true", help="export PPO's moving average")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN_DIR/exported")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload instead of writing a folder")
    parser.add_argument("--public", action="store_true", help="upload to a public repository")
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _export(options))


def _export(options: argparse.Namespace) -> None:
    console = Console()
    options.run_dir = find_run_dir(options.run_dir)
    if options.push is not None and (options.out is not None or options.push.count("/") != 1):
        raise ConfigError(f"--push {options.push}: must be OWNER/NAME, without --out")
    if options.push is None:
        folder = expand_user_path(
            options.out or options.run_dir / "exported", key="--out"
        ).resolve()
        _write_chosen_model(options, folder)
        _write_path_into_card(folder)
        console.say(f"wrote {folder}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, options.push)  # a model card names the path's last two parts
        _write_chosen_model(options, folder)
        address = push_to_hub(folder, options.push, public=options.public, repo_type="model")
        console.say(f"uploaded to {address}")


def _write_path_into_card(folder: Path) -> None:
    """Replace the name in the card's example code, such as "models/mine", by the folder's path."""
    card = folder / "README.md"
    name, path = (json.dumps(text) for text in (f"{folder.parent.name}/{folder.name}", str(folder)))
    text = (read_stored_text(card) or "").replace(f"{name})", f"{path})")
    card.write_text(text, encoding="utf-8")


def _write_chosen_model(options: argparse.Namespace, folder: Path) -> None:
    choices = {"average": options.average, "trusts_run": options.trust_run}
    if options.checkpoint is None:
        export_final_model(options.run_dir, folder, phase=options.phase, **choices)
    else:
        checkpoint = find_kept_checkpoint(options.run_dir, options.checkpoint, options.phase)
        export_checkpoint(checkpoint, folder, **choices)


def config_for_one_rank(config: RunConfig, device: Device, dtype: Dtype) -> RunConfig:
    """Return the configuration for one rank on ``device``, without sharding, offloading or servers.

    ZeRO stages above 1 become 1, which keeps the precision of weights and of their master copies.
    Micro-batch sizes are kept on a GPU and become null on a CPU. ``dtype`` must not be auto.
    """
    changes: dict[str, Any] = {
        **ON_ONE_RANK,
        "zero.extra": {},
        "hardware.device": device,
        "hardware.dtype": dtype,
        "ppo.steps": config.ppo.steps or 1,
    }
    if config.rollout.backend in (Backend.hybrid_engine, Backend.vllm_server):
        changes["rollout.backend"] = Backend.fast
    for name in ("stage", "critic_stage"):
        stage = getattr(config.zero, name)
        changes[f"zero.{name}"] = stage and min(stage, 1)
    if device is not Device.cuda:
        changes |= dict.fromkeys(MICRO_BATCH_KEYS)
    for key, value in changes.items():
        group, name = key.split(".")
        keys = getattr(config, group)
        old_type = type(getattr(keys, name))
        new = old_type(value) if issubclass(old_type, Enum) else value
        config = replace(config, **{group: replace(keys, **{name: new})})
    return config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
