"""Every phase evaluates its last step too, if it may end with the best of its models."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rlhf.config.choices import Phase
from rlhf.phases import dpo, reward, sft
from rlhf.phases.ppo import loop
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.shared import checkpoints
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext
from rlhf.runtime.phase_runs import run_phase
from tests.phases.run_pieces import Make, Notes, PlannedEngine

PHASES: dict[str, tuple[Any, Callable[[RunContext], dict[str, Any]], str]] = {
    "sft": (sft, sft.run_sft, "sft/eval_loss"),
    "reward": (reward, reward.run_reward, "reward/eval_loss"),
    "dpo": (dpo, dpo.run_dpo, "dpo/eval_loss"),
    "ppo": (loop, loop.run_ppo, "ppo/eval_score"),
}


class Rising(Checkpoints):
    """Checkpoints, noted instead of written, of models that are better at each evaluation."""

    measured: list[int]
    saved: list[int]

    def log_evaluation(self, values: Mapping[str, float], *, is_frozen: bool = False) -> None:
        self.measured.append(self.step + 1)
        lower_is_better = self.phase is not Phase.ppo
        better = (-1) ** lower_is_better * float(self.step)
        super().log_evaluation(dict.fromkeys(values, better), is_frozen=is_frozen)

    def _save_checkpoint(self) -> None:
        self.saved.append(self.step)


def start(name: str, made: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[RunContext, Notes]:
    """The context of a phase of three steps that ends with the best of its models."""
    module, _, metric = PHASES[name]
    best = [f"checkpoint.best={metric}", "checkpoint.load_best=true", f"{name}.eval_every=2"]
    sizes = ["ppo.steps=3", "ppo.rollout_batch_size=4", "ppo.mini_batch_size=4"]
    sizes += ["ppo.eval_prompts=3", "rollout.max_response_tokens=4", "rollout.max_prompt_tokens=90"]
    sizes += [f"{p}.batch_size=4" for p in ("sft", "reward", "dpo")]
    sizes += [f"{p}.epochs=1" for p in ("sft", "reward", "dpo")]
    keys = [f"phase={name}", "reward.group_pairs=false", *sizes, *best]
    monkeypatch.setattr(module, "build_engine", PlannedEngine, raising=False)
    return made(*keys)


@pytest.mark.parametrize("name", PHASES)
def test_the_last_step_may_be_the_best(
    name: str, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, run, metric = PHASES[name]
    context, notes = start(name, made, monkeypatch)
    monkeypatch.setattr(module, "Checkpoints", Rising)
    monkeypatch.setattr(checkpoints, "load_checkpoint", None)  # the last step is the best
    monkeypatch.setattr(Rising, "measured", [], raising=False)
    monkeypatch.setattr(Rising, "saved", [], raising=False)

    result = run(context)

    assert (result["steps"], result["best_step"]) == (3, 3)
    assert notes.steps_with(f"{name}/skipped_steps") == [1, 2, 3]
    assert Rising.measured == [2, 3]
    assert [step for step in notes.steps_with(metric) if step] == [2, 3], "each once"
    assert Rising.saved[-1] == 3


class Stopping(Checkpoints):
    """Checkpoints of a phase that fails in its first step."""

    def log_step(self, values: Mapping[str, float], *, optimizer_steps: float = 1) -> None:
        raise ConnectionError("the drive is gone")


@pytest.mark.parametrize("name", PHASES)
def test_a_phase_that_fails_closes_what_it_opened(
    name: str, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines, and the processes of rewards and hooks: a program may outlive the phase."""
    module, run, _ = PHASES[name]
    closed: set[type] = set()
    context, _ = start(name, made, monkeypatch)
    monkeypatch.setattr(module, "Checkpoints", Stopping)
    for kind in (PlannedEngine, PpoHook, dpo.DpoTrainer):
        monkeypatch.setattr(kind, "close", lambda each: closed.add(type(each)))
    monkeypatch.setattr(loop, "build_hooks", lambda config, _: [PpoHook(config)])
    with pytest.raises(ConnectionError, match="the drive is gone"):
        run_phase(context, Phase(name), run)
    expected = {"ppo": {PlannedEngine, PpoHook}, "dpo": {dpo.DpoTrainer}}
    assert closed == expected.get(name, {PlannedEngine})
