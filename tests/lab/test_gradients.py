"""rlhf_lab.gradients: expected gradients of whole configurations beside the exact one."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.ppo import policy_loss
from rlhf.base.errors import ConfigError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.types import Rollout
from rlhf.config.typed import to_run_config
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.targets import (
    TargetMaker,
    Targets,
    TargetSteps,
    make_token_rewards,
    replace_step,
)
from rlhf_lab.gradients.__main__ import build_estimator, main
from rlhf_lab.gradients.causes import (
    NO_LIMITS,
    Direction,
    GradientMatch,
    compare,
    examine,
    policies_of_updates,
)
from rlhf_lab.gradients.enumerated import (
    draw_groups,
    draw_logits,
    enumerate_answers,
    enumerate_groups,
)
from rlhf_lab.gradients.expected import GradientEstimator, TinyStep, TinyTask
from tests.conftest import Compose
from tests.documents import read_document
from tests.runs import ROOT

EXACT = 1e-10


def flipped_loss(inputs: Any, config: Any, total: Any, /) -> Any:
    """PPO's loss with the wrong sign."""
    flipped = inputs._replace(advantages_BT=-inputs.advantages_BT)
    return policy_loss(*flipped[:4], cliprange=config.cliprange, total=total), {}


class PaidForKl(PpoHook):
    """A hook by which the KL earns a reward."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        def pay(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
            paid = targets._replace(kl_ctl=-targets.kl_ctl)
            return make_token_rewards(maker, paid, rollout)

        return replace_step(steps, make_token_rewards, pay)


class HalfOfTheTokens(PpoHook):
    """A hook whose first tokens count double."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        def weigh(_: TargetMaker, targets: Targets, __: Rollout) -> Targets:
            weights_T = torch.tensor([2.0, *[1.0] * (targets.kl_BT.shape[1] - 1)])
            used = targets.advantages
            used = used._replace(advantages_BT=used.advantages_BT * weights_T)
            return targets._replace(advantages=used)

        return (*steps, weigh)


TWO_REWARDS = "+rewards={learned:{kind:model},ends:{kind:stop}}"
GROUPS = "ppo.responses_per_prompt=4 ppo.advantage_estimator="
OWN_CODE = {code.__name__: code for code in (flipped_loss, PaidForKl, HalfOfTheTokens)}
CONFIGURATIONS = read_yaml_beside(__file__, "gradient_verdicts.yaml")


def method_of(compose: Compose, words: str, own: list[object]) -> GradientEstimator:
    return build_estimator(to_run_config(compose(words.split())), own)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_verdict_on_a_configuration(name: str, compose: Compose) -> None:
    expected = CONFIGURATIONS[name]
    own = [OWN_CODE[code] for code in expected.get("own", [])]
    method = method_of(compose, expected.get("keys", ""), own)
    found = examine(method, TinyTask.draw(0, method.group))
    assert found.verdict is Direction[expected["verdict"]], found.text
    for text in expected.get("texts", []):
        assert text in found.text
    if found.verdict is Direction.unbiased:
        assert max(each.bias for each in found.compared["first"].values()) < EXACT
        assert not found.causes


def test_a_key_with_a_known_bias_is_no_sign_error(compose: Compose) -> None:
    """On the task of seed 1 its bias turns the gradient of the KL penalty around."""
    found = examine(method_of(compose, "ppo.kl_estimator=k3", []), TinyTask.draw(1, 1))
    assert found.verdict is Direction.biased
    assert "the KL penalty alone even points the wrong way: ppo.kl_estimator=k3." in found.text
    found = examine(method_of(compose, "ppo.kl_estimator=k3", [PaidForKl]), TinyTask.draw(0, 1))
    assert found.verdict is Direction.wrong_way


def test_without_limits_no_mask_is_left(compose: Compose) -> None:
    for mask in ("", "ppo.off_policy_mask_kl=1e-4"):
        method = method_of(compose, f"{GROUPS}dr_grpo {mask}", [])
        found = examine(method, TinyTask.draw(0, method.group)).text
        assert found.endswith("without limits, it is 0.095.")


def one_token_task(*, scored: bool) -> TinyTask:
    answers, generator = enumerate_answers(letters=4, max_tokens=1), torch.Generator()
    policy, reference = (draw_logits(generator.manual_seed(n), answers, 2) for n in range(2))
    scores = torch.randn((2, 5), generator=generator, dtype=torch.float64)
    return TinyTask(answers, policy, reference, scores * scored)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
def test_in_the_loss_only_k3_ratio_has_the_gradient_of_the_kl(
    estimator: str, compose: Compose
) -> None:
    """Of answers of one token, after updates too; ratios have no clip."""
    words = f"ppo.kl_placement=loss ppo.kl_estimator={estimator} ppo.missing_end_penalty=0"
    method = method_of(compose, words, [])
    task = one_token_task(scored=False)
    moved = draw_logits(torch.Generator().manual_seed(2), task.answers, 2)
    policies = policies_of_updates(method, task)["last"]._replace(current_QPV=moved)
    assert (compare(method, task, policies).bias < EXACT) == (estimator == "k3_ratio")


@pytest.mark.parametrize(
    ("words", "own"), [("ppo.entropy_coef=0.1", []), ("", [PaidForKl])], ids=["entropy", "KL"]
)
def test_a_bias_of_one_part_is_not_found_in_another(
    words: str, own: list[object], compose: Compose
) -> None:
    found = examine(method_of(compose, words, own), TinyTask.draw(0, 1)).compared["first"]
    assert found["score"].bias < EXACT < found["objective"].bias
    assert (found["kl"].bias < EXACT) == (not own)


def test_the_ratio_to_an_older_policy_corrects_single_tokens(compose: Compose) -> None:
    method = method_of(compose, "rollout.lag=2 ppo.kl_ctl=0", []).with_keys(**NO_LIMITS)
    task = one_token_task(scored=True)
    assert compare(method, task, policies_of_updates(method, task)["first"]).bias < EXACT


def test_the_policies_of_the_updates(compose: Compose) -> None:
    """An older policy is worse, and the last update learns from a better one, so far away."""
    method = method_of(compose, "rollout.lag=3 ppo.lr_guard_kl=0.002 ppo.kl_ctl=0", [])
    task = TinyTask.draw(0, 1)
    sampled, start, last = policies_of_updates(method, task)["last"]
    chances = [task.logprobs(each).sum(dim=2).exp() for each in (sampled, start, last)]
    clipped_QA = task.scores_QA - 1.0 * ~task.answers.ended_A
    worst, middle, best = (float((each * clipped_QA).sum()) for each in chances)
    assert worst < middle < best
    for near, nats in ((last, 0.002), (sampled, 0.006)):
        apart_QA = (task.logprobs(start) - task.logprobs(near)).sum(dim=2)
        tokens = (chances[1] * task.answers.keep_AT.sum(dim=1)).sum()
        assert float((chances[1] * apart_QA).sum() / tokens) == pytest.approx(nats, rel=1e-6)


def sampled_gradients(method: GradientEstimator, task: TinyTask) -> tuple[TinyStep, Tensor]:
    step = TinyStep(method, task, policies_of_updates(method, task)["last"])
    generator = torch.Generator().manual_seed(3)
    found = [step.sampled_gradient(generator).flatten() for _ in range(80)]
    return step, torch.stack(found)


@pytest.mark.parametrize(
    "words",
    [
        f"{GROUPS}rloo ppo.loss_aggregation=fixed_length",
        "ppo.whiten_advantages=false",
        "ppo.advantage_estimator=reinforce_pp",
    ],
)
def test_sampled_gradients_have_the_expected_mean(words: str, compose: Compose) -> None:
    words += " ppo.rollout_batch_size=64 ppo.mini_batch_size=32"
    method = method_of(compose, words, [])
    step, found = sampled_gradients(method, TinyTask.draw(3, method.group))
    error = float((found.var(dim=0).sum() / len(found)).sqrt())
    distance = (found.mean(dim=0) - step.expected_gradient().flatten()).norm()
    assert float(distance) < 1.5 * error < 0.2 * step.expected_gradient().norm()


def test_a_quarter_of_the_responses_has_twice_the_noise(compose: Compose) -> None:
    task, noise = TinyTask.draw(3, 1), []
    for size in (8, 32):
        method = method_of(compose, f"ppo.rollout_batch_size=32 ppo.mini_batch_size={size}", [])
        noise.append(float(sampled_gradients(method, task)[1].var(dim=0).sum().sqrt()))
    assert noise[0] / noise[1] == pytest.approx(2, rel=0.2)


def test_groups_are_weighed_by_how_often_they_are_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    logs_QA = torch.randn((2, 3), generator=generator, dtype=torch.float64).log_softmax(dim=1)
    rows = enumerate_groups(logs_QA, 2)
    assert float(rows.weights_B.mean()) == pytest.approx(1)
    drawn = draw_groups(logs_QA, 2, groups=20_000, generator=generator)

    def shares(prompt_B: Tensor, answer_B: Tensor, weights_B: Tensor) -> dict[Any, float]:
        found: dict[Any, float] = {}
        pairs = zip(prompt_B[::2].tolist(), answer_B.view(-1, 2).tolist(), strict=True)
        for (prompt, pair), weight in zip(pairs, weights_B[::2].tolist(), strict=True):
            key = (prompt, *sorted(pair))
            found[key] = found.get(key, 0.0) + weight * 2 / len(weights_B)
        return found

    listed, sampled = shares(*rows), shares(*drawn)
    assert listed.keys() == sampled.keys()
    assert sampled == pytest.approx(listed, abs=0.01)


@pytest.mark.parametrize(
    ("gradient", "found"),
    [
        ((0.0, 0.5), (0.0, 1.0)),
        ((3.0, 4.0), (0.6, 0.8)),
        ((0.0, -1.0), (1.0, -1.0)),
        ((0.0, 0.0), (1.0, 0.0)),
    ],
)
def test_bias_and_cosine_by_hand(gradient: tuple[float, float], found: tuple[float, float]) -> None:
    exact = torch.tensor([0.0, 2.0], dtype=torch.float64)
    at = torch.tensor(gradient, dtype=torch.float64)
    assert GradientMatch.of(at, exact) == pytest.approx(found)


@pytest.mark.parametrize(
    ("words", "own", "message"),
    [
        ("phase=sft", [], "has no ppo"),
        ("experiment=number_guessing", [], "environment.kind=.*: the task has no turns"),
        (f"{TWO_REWARDS} ppo.gdpo=true {GROUPS}dr_grpo", [], "ppo.gdpo=true: the task has one"),
        ("ppo.clip_cov_ratio=0.1", [], "ppo.clip_cov_ratio=0.1: draws tokens at random"),
        ("", [TinyTask], "must be a subclass of PpoHook"),
    ],
)
def test_refusals(words: str, own: list[object], message: str, compose: Compose) -> None:
    with pytest.raises(ConfigError, match=message):
        method_of(compose, words, own)
    with pytest.raises(ConfigError, match="responses_per_prompt=65: for this command, must"):
        TinyTask.draw(0, 65)


def test_the_command_with_the_example(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command appends this folder
    own = ["--own", "examples.custom_estimator:MedianBaseline", "experiment=rloo"]
    assert main([*own, "--batches", "20", "--json"]) == 0
    found = read_document("gradients", capfd.readouterr().out)
    assert found["verdict"] == "biased"
    assert "MedianBaseline, your own code (without it 0)" in found["text"]
    for words in (
        "--batches 1: must be 2 or more",
        "--seed -1: must be 0 or more, and below 2**63",
    ):
        with pytest.raises(SystemExit):
            main(words.split(":")[0].split())
        assert words in capfd.readouterr().err
    assert main(["resume=runs/latest"]) == 2
    assert "resume=runs/latest: " in capfd.readouterr().err
    assert main(["--own", f"{__name__}:flipped_loss", "--batches", "2"]) == 1
    text = capfd.readouterr().out
    assert "the KL penalty alone   bias  1.000  cosine -1.0000" in text
    assert "a sign error in flipped_loss?" in text
