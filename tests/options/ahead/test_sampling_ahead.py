"""Rollouts of older weights: sampled in turn, in other processes, and across an interruption."""

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.errors import USER_ERROR
from rlhf.base.ranks import Ranks
from rlhf.base.stored_responses import join_rows, own_responses, pack_responses, unpack_responses
from rlhf.base.types import PromptBatch, Responses
from rlhf.config.typed import to_run_config
from rlhf.gpu_check.runs import differing_files
from rlhf.options.ahead import overlapped_sampling
from rlhf.options.ahead.ahead import AfterSampling, SamplingAhead, SamplingInTurn
from rlhf.options.environments.turns import Turns, Utterance, turns_of
from rlhf.phases.ppo.prompts import StepPrompts
from tests.conftest import Compose
from tests.runs import ROOT, TINY_RUN, children, finished, start, wait_for

# Gradients of few threads differ in rounding from those of many.
ONE_CORE = ["hardware.cores_per_rank=1", "ppo.steps=4"]
MASKED = ["ppo.rollout_correction=token", "ppo.rollout_correction_mode=mask"]
MASKED += ["ppo.rollout_correction_cap=1.05"]


class Actor:
    """An actor whose weight is the number of steps it has taken."""

    weight = 0


class Backend:
    """A backend whose responses are the step and the weight that sampled them."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def generate(self, actor: Actor, prompts: PromptBatch) -> Responses:
        self.steps.append(prompts.step)
        ids_BT = torch.tensor([[prompts.step, actor.weight]])
        return Responses(ids_BT, torch.ones(1, 2, dtype=torch.bool), torch.tensor([True]))


def prompts_of(step: int) -> PromptBatch:
    nothing = torch.zeros(1, 0)
    return PromptBatch(nothing, nothing, nothing, [""], step=step)


def sampling(lag: int, steps: int = 7, backend: Backend | None = None) -> SamplingAhead:
    sampler = SamplingInTurn(backend or Backend())
    return SamplingAhead(sampler, prompts_of, lag=lag, steps=steps, pad_id=0, ranks=Ranks())


def weights_of_steps(ahead: SamplingAhead, actor: Actor, steps: range) -> list[int]:
    """The weights that sampled each step; every step is of the step that was asked for."""
    found = []
    for step in steps:
        asked, weight = ahead.generate(actor, prompts_of(step)).ids_BT[0].tolist()
        assert asked == step
        found.append(weight)
        actor.weight += 1
    return found


@pytest.mark.parametrize(
    ("lag", "weights"),
    [(0, [0, 1, 2, 3, 4, 5, 6]), (1, [0, 0, 1, 2, 3, 4, 5]), (3, [0, 0, 0, 0, 1, 2, 3])],
)
def test_a_step_has_the_weights_of_lag_steps_before(lag: int, weights: list[int]) -> None:
    assert weights_of_steps(sampling(lag), Actor(), range(1, 8)) == weights


@pytest.mark.parametrize("stopped_after", [1, 2, 5])
def test_a_resumed_run_learns_from_the_responses_that_were_pending(stopped_after: int) -> None:
    actor, backend = Actor(), Backend()
    first, second = sampling(2, backend=backend), sampling(2, backend=backend)
    weights = weights_of_steps(first, actor, range(1, stopped_after + 1))
    stored = {name: tensor for name, _, tensor in first.training_state.stream()}
    second.training_state.load(lambda name, part: stored[name][part])
    weights += weights_of_steps(second, actor, range(stopped_after + 1, 8))
    assert weights == [0, 0, 0, 1, 2, 3, 4]
    assert backend.steps == [*range(1, 8)], "no step is sampled twice"


def test_an_evaluation_on_the_same_server_waits_for_responses_that_were_begun() -> None:
    unfinished: list[int] = []

    class Server(SamplingInTurn):
        def begin_sampling(self, actor: Actor, batches: Sequence[PromptBatch]) -> None:
            super().begin_sampling(actor, batches)
            unfinished.extend(batch.step for batch in batches)

        def wait_for_responses(self, step: int) -> Responses:
            unfinished.remove(step)
            return super().wait_for_responses(step)

    class Evaluating(Backend):
        def generate(self, actor: Actor, prompts: PromptBatch) -> Responses:
            assert unfinished == []
            return super().generate(actor, prompts)

    of_lag = {"lag": 2, "steps": 7, "pad_id": 0, "ranks": Ranks()}
    ahead, actor = SamplingAhead(Server(Backend()), prompts_of, **of_lag), Actor()
    assert weights_of_steps(ahead, actor, range(1, 2)) == [0]
    assert unfinished == [2, 3]
    AfterSampling(Evaluating(), ahead).generate(actor, prompts_of(9))
    assert weights_of_steps(ahead, actor, range(2, 8)) == [0, 0, 1, 2, 3, 4]


def episodes(lengths: list[int]) -> Responses:
    """Responses of two turns, whose first token of each episode is an observation."""
    places = torch.arange(max(lengths)).expand(len(lengths), -1)
    attend_BT = places < torch.tensor(lengths)[:, None]
    keep_BT = attend_BT & (places > 0)
    size = len(lengths)
    of_length = torch.tensor(lengths)
    turns = Turns(
        attend_BT,
        torch.where(keep_BT, places % 2, -1),
        torch.where(keep_BT, places * 0.5, 0.0),
        of_length % 2 == 0,
        of_length.float(),
        [[Utterance("user", f"é{length}")] for length in lengths],
        [["timeout"] * (length % 2) for length in lengths],
    )
    ids_BT = torch.where(attend_BT, places + 10, 3)
    logprobs_BT, ended_B = places * -0.1 * keep_BT, torch.ones(size) > 0
    return Responses(ids_BT, keep_BT, ended_B, logprobs_BT, turns._asdict())


def assert_equal(found: Responses, expected: Responses) -> None:
    turns, expected_turns = turns_of(found), turns_of(expected)
    assert turns is not None
    assert expected_turns is not None
    parts = [*found[:-1], *turns], [*expected[:-1], *expected_turns]
    for one, other in zip(*parts, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def test_responses_of_ranks_join_and_divide_as_if_sampled_together() -> None:
    parts = [episodes([2, 5]), episodes([4, 3]), episodes([1, 1])]
    packed = [pack_responses(part) for part in parts]
    whole = join_rows([unpack_responses(each) for each in packed], pad_id=3)
    assert_equal(whole, episodes([2, 5, 4, 3, 1, 1]))
    for rank, part in enumerate(parts):
        assert_equal(own_responses(whole, Ranks(rank, 3)), part)
    others = own_responses(whole, Ranks(1, 2))  # rows 3 to 5, on another number of ranks
    assert others.ids_BT.tolist() == [[10, 11, 12], [10, 3, 3], [10, 3, 3]]
    assert turns_of(others).failures == [["timeout"], ["timeout"], ["timeout"]]


class BusyProcess:
    """A sampling process that reads no message before ``reads`` is set."""

    def __init__(self, _: str) -> None:
        self.reads, self.steps = Event(), []

    def send(self, content: Mapping[str, Any], _: float) -> None:
        if "step" in content:
            assert self.reads.wait(60)
            self.steps.append((content["step"], content["weights"].rpartition("-")[2]))

    def close(self) -> None:
        self.reads.set()


def test_requests_do_not_wait_for_a_process_that_samples(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rollout.lag=2 the prompts of step 3 are sent while step 2 is sampled."""
    monkeypatch.setattr(overlapped_sampling, "IsolatedProcess", BusyProcess)
    monkeypatch.setattr(overlapped_sampling, "set_torch_threads", lambda _: None)
    config = to_run_config(compose(["rollout.overlap=true", "rollout.lag=2"]))
    pad = SimpleNamespace(pad_token_id=0)
    context = SimpleNamespace(config=config, ranks=Ranks(), run_dir=tmp_path, tokenizer=pad)
    loader = SimpleNamespace(prompts_of_all_ranks=lambda _: StepPrompts([[1]], ["a"], [{}]))
    sampling = overlapped_sampling.SamplingProcesses(context, loader)  # type: ignore[arg-type]
    actor = SimpleNamespace(module=torch.nn.Linear(1, 1), stream_state=lambda state: iter(()))
    for steps in ((1, 2), (3,)):
        sampling.begin_sampling(actor, [prompts_of(step) for step in steps])  # type: ignore[arg-type]
    (process,) = sampling._processes
    assert process.steps == []
    process.reads.set()
    wait_for(lambda: len(process.steps) == 3, seconds=30)
    assert process.steps == [(1, "1"), (2, "1"), (3, "2")]
    sampling.close()


@pytest.mark.slow
def test_sampling_beside_training_changes_no_file(tiny_run: Path, tmp_path: Path) -> None:
    """With GAE and masked tokens, in two processes; tests/exact_ahead.py has more."""
    words = [*ONE_CORE, *MASKED, "phase=ppo", f"from_run={tiny_run}", "rollout.lag=2"]
    in_turn = finished(tmp_path / "in_turn", *words)
    beside = finished(tmp_path / "beside", *words, "rollout.overlap=true", "rollout.samplers=2")
    assert not differing_files(in_turn, beside)
    assert not (beside / "ppo" / "sampling").exists()


@pytest.mark.slow
def test_the_end_of_a_sampling_process_ends_the_run_in_one_line(
    tiny_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = [*TINY_RUN, *ONE_CORE, "ppo.steps=9999", "rollout.lag=1", "rollout.overlap=true"]
    words = [ROOT / "launch.py", *words, "phase=ppo", f"from_run={tiny_run}", f"run_dir={run_dir}"]
    with start(*words, cwd=tmp_path) as run:
        lines, second = run_dir / "metrics.jsonl", '"phase": "ppo", "step": 2'
        wait_for(lambda: lines.exists() and second in lines.read_text(), seconds=120)
        supervisor = children(run.pid)[-1]  # behind the zygote
        os.kill(children(supervisor)[-1], signal.SIGKILL)
        _, said = run.communicate(timeout=60)
    assert run.returncode == USER_ERROR
    assert "error: rollout.overlap=true: a sampling process has ended" in said
    assert "Traceback" not in said
