"""python -m tests.pretend_cuda.memory [NAME ...]: trace the memory of real models without a GPU.

This project's own code builds, trains and samples from models of real size on a pretended GPU that
computes shapes only, and whose allocator counts like torch's, in blocks of 512 bytes. Without names
all configurations of benchmarks/planner.md are traced, and their figures are stored for that page;
with --check they are compared with the stored figures.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.pretend_cuda.gpu import GIB, ROOT, Card, Gpu, load

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

# Modules that import torch are imported in functions: the pretended GPU is loaded before torch.
Bytes = dict[str, int]  # at the peak of each moment


class Recorder:
    """The peaks of named moments since the recorder was made."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._start = gpu.used
        self.peaks: Bytes = defaultdict(int)
        gpu.reset_peak()

    def end(self, moment: str) -> None:
        """Note the peak since the last call as one of ``moment``."""
        self.peaks[moment] = max(self.peaks[moment], self._gpu.peak - self._start)
        self._gpu.reset_peak()

    def ending(self, moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, after each call of which ``moment`` ends."""

        def called(*args: Any, **how: Any) -> Any:
            result = function(*args, **how)
            self.end(moment)
            return result

        return called

    def result(self) -> Bytes:
        """Return the peaks, and what is held now, after the last step."""
        return self.peaks | {"between steps": self._gpu.used - self._start}


def trace(gpu: Gpu, config: RunConfig) -> Bytes:
    """Return the bytes of every moment of the only phase of ``config``."""
    from rlhf.config.choices import ModelInit, Phase

    drawn = {
        key: replace(getattr(config, key), init=ModelInit.random)
        for key in ("model", "reward_model")
    }
    function = _sft if config.phase.order == [Phase.sft] else _ppo
    gc.collect()  # engines of a trace before this one, which the trace itself made cyclic
    with gpu.shapes_only(), without_values():
        return function(gpu, replace(config, **drawn))


@contextmanager
def without_values() -> Iterator[None]:
    """Take weights, scores and norms that are not computed as fine.

    Reward models are not read from folders, and the tokenizer is a small one.
    """
    import torch
    from deepspeed.runtime.zero import stage_1_and_2
    from transformers import PreTrainedModel

    from rlhf.models import build
    from rlhf.models.sources import ModelSource
    from rlhf.phases.ppo import loop, rlhf_engine
    from rlhf.phases.shared import scoring
    from tests.models_on_disk import small_tokenizer

    def critic_source(config: RunConfig) -> ModelSource:
        return ModelSource.from_config(config.reward_model, key="reward_model")

    with ExitStack() as replaced:
        for place, name, value in (
            (torch.nn.Linear, "reset_parameters", lambda _: None),
            (torch.nn.Embedding, "reset_parameters", lambda _: None),
            (PreTrainedModel, "_initialize_weights", lambda *_, **__: None),
            (build, "_require_working_fields", lambda *_: None),
            (stage_1_and_2, "is_invalid_grad_norm", lambda _: False),
            (scoring, "count_failed_scores", lambda _: 0),
            (loop, "values_to_log", lambda *_: defaultdict(float)),
            (build, "require_finite_weights", lambda *_, **__: None),
            (rlhf_engine, "critic_source", critic_source),
            (rlhf_engine, "load_tokenizer", lambda *_, **__: small_tokenizer()),
        ):
            replaced.enter_context(mock.patch.object(place, name, value))
        yield


def _steps(config: RunConfig) -> range:
    """Return the steps to take: DeepSpeed's optimizer has no moments before its first one."""
    from rlhf.config.choices import Dtype

    return range(2 if config.hardware.dtype is Dtype.fp16 else 1)


def _sft(gpu: Gpu, config: RunConfig) -> Bytes:
    from rlhf.base.random_streams import seed_for
    from rlhf.engine.devices import current_ranks, resolve_dtype
    from rlhf.engine.settings import EngineSettings
    from rlhf.phases.sft import SftTrainer
    from tests.models_on_disk import small_tokenizer

    hardware = config.hardware
    context: Any = SimpleNamespace(
        config=config,
        ranks=current_ranks(hardware.device),
        settings=EngineSettings(
            zero=config.zero, dtype=resolve_dtype(hardware.dtype, hardware.device)
        ),
        tokenizer=small_tokenizer(),
        seed=lambda *names: seed_for(config.seed, *names),
    )
    recorder = Recorder(gpu)
    trainer = SftTrainer(context, total_steps=10)
    recorder.end("building")
    longest = [[5] * config.sft.max_tokens] * trainer.plan.per_rank
    for _ in _steps(config):
        trainer.train_step({"ids": longest, "prompt_tokens": [0] * len(longest)})
        recorder.end("training")
    return recorder.result()


def _ppo(gpu: Gpu, config: RunConfig) -> Bytes:
    from rlhf.data.collate import collate_prompts
    from rlhf.phases.ppo.loop import PPOTrainer
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine

    recorder = Recorder(gpu)
    setup = RLHFEngine(config)
    recorder.end("building")
    trainer = PPOTrainer(setup, config.ppo)
    prompts = setup.prompts([""] * config.ppo.rollout_batch_size)
    # All are different, as prompts that are equal are prefilled once.
    longest = [[5 + row] * config.rollout.max_prompt_tokens for row in range(len(prompts.texts))]
    device, draws = setup.ranks.device, prompts.draws_BT.cpu()
    prompts = collate_prompts(longest, prompts.texts, draws, pad_id=0, device=device)
    rollout_backend: Any = setup.rollout
    rollout_backend.generate = recorder.ending("generation", rollout_backend.generate)
    for role, engine in setup.trained_engines.items():
        for name in ("backward", "step"):
            ending = recorder.ending(f"training of the {role}", getattr(engine, name))
            setattr(engine, name, ending)
    for _ in _steps(config):
        rollout = trainer.generate_experience(prompts)
        recorder.end("scoring")
        trainer.train_rlhf(rollout)
    return recorder.result()


def traced(gpu: Gpu, name: str) -> dict[str, Any]:
    """Return what both phases of a configuration take, with the sizes that their plans choose."""
    from rlhf.plan.plan import plan_run, resolve_auto
    from tools.docs.memory_table import MOMENTS, phase_config

    found = {}
    for phase in MOMENTS:
        plan = plan_run(phase_config(ROOT / "conf", name, phase))
        assert plan.fits, plan.misfit_reason
        (of,) = plan.phases
        sizes = {f"{phase}.micro_batch_size": of.micro_batch}
        if of.rows is not None:
            sizes["rollout.max_rows"] = of.rows
        found[phase] = {"sizes": sizes, "moments": trace(gpu, resolve_auto(plan))}
    return found


def traced_elsewhere(*names: str) -> dict[str, Any]:
    """Return ``traced`` of each name, from a process of its own."""
    from tests.runs import ON_GPU, python

    words = ["-m", "tests.pretend_cuda.memory", *names]
    run = python(*words, timeout=3600, PYTHONPATH=ROOT, **ON_GPU)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def differences(found: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Return the moments whose bytes differ by more than 0.1 % from those that are stored."""
    told = []
    for name, phases in found.items():
        for phase, (sizes, peaks) in ((p, each.values()) for p, each in phases.items()):
            expected = stored[name][phase]
            if sizes != expected["sizes"]:
                told.append(f"{name}, {phase}: {sizes}, stored {expected['sizes']}")
            told += [
                f"{name}, {phase}, {moment}: {size}, stored {expected['moments'][moment]}"
                for moment, size in peaks.items()
                if abs(size - expected["moments"][moment]) > size / 1000
            ]
    return told


def main(names: list[str]) -> None:
    """Trace the configurations ``names`` here, or all of them, each in a process of its own."""
    if names and names != ["--check"]:
        gpu = Gpu(load(), Card(memory=1024 * GIB))  # larger than every card that a plan is for
        from tests.pretend_cuda.torch_cuda import replace as replace_functions

        gpu.start()
        replace_functions(gpu, setattr)
        sys.stdout.write(json.dumps({name: traced(gpu, name) for name in names}) + "\n")
        return
    from tools.docs.memory_table import CONFIGURATIONS, TRACED

    found: dict[str, Any] = {}
    for name in CONFIGURATIONS:
        found |= traced_elsewhere(name)
    if names:
        sys.exit("\n".join(differences(found, json.loads(TRACED.read_text()))) or 0)
    TRACED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
