"""True values: branches against all continuations, checks of the critic, Monte-Carlo targets."""

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlhf.base.ranks import Ranks
from rlhf.base.types import Responses, Rollout
from rlhf.config.batches import BatchPlan
from rlhf.config.typed import to_run_config
from rlhf.data.collate import collate_prompts
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.language_model import LanguageModel
from rlhf.phases.ppo.loop import run_ppo
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.ppo.targets import TargetMaker
from rlhf.phases.shared.scoring import ModelScores
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.run.metric_table import varies_between_runs
from rlhf_lab.branches.branches import Brancher, BranchPoint, add_step_values
from rlhf_lab.branches.critic_states import CriticState
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import maker_of, source
from tests.phases.ppo.test_phase import SHORT
from tests.phases.run_pieces import run_context
from tests.plain_engine import PlainEngine
from tests.rollout.decoder_checks import fast_rollout

PAD, END, WORDS = 0, 1, (2, 3, 4)
TOKENS = 3  # of a response, at most
KL_CTL, GAMMA, TEMPERATURE = 0.5, 0.9, 1.3
PENALTY, CLIP = 0.7, 1.0
BRANCHES = 1000


def tiny_engine(compose: Compose) -> Any:
    """What branches need of an RLHFEngine, over five tokens."""
    vocabulary = {"<pad>": PAD, "<end>": END, "a": 2, "b": 3, "c": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary)), eos_token="<end>", pad_token="<pad>"
    )
    actor, reference = (
        PlainEngine(LanguageModel(build_actor(source(), tokenizer, seed=seed))) for seed in (1, 3)
    )
    critic, reward = (PlainEngine(build_scorer(source(), tokenizer, seed=s)) for s in (2, 4))
    sampling = SamplingSettings(max_tokens=TOKENS, temperature=TEMPERATURE, top_k=0, top_p=1.0)
    options = [f"ppo.gamma={GAMMA}", f"ppo.missing_end_penalty={PENALTY}"]
    options += [f"ppo.clip_reward_value={CLIP}", f"rollout.temperature={TEMPERATURE}"]
    return SimpleNamespace(
        actor=actor,
        models=SeparateModels(
            actor, reference, critic, ModelScores(reward), temperature=TEMPERATURE
        ),
        rollout=fast_rollout(sampling, stop=StopTexts(tokenizer, [])),
        plan=BatchPlan(per_rank=1000, micro=1000, accumulation=1),
        config=to_run_config(compose(options)),
    )


def rollout_of(prompts: list[list[int]], *, reuses_logprobs: bool) -> Rollout:
    """A rollout with these prompts, of whose responses nothing is read."""
    batch = collate_prompts(
        prompts,
        [""] * len(prompts),
        torch.zeros(len(prompts), TOKENS),
        pad_id=PAD,
        device=torch.device("cpu"),
    )
    none_BT = torch.zeros(len(prompts), TOKENS)
    responses = Responses(none_BT.long(), none_BT.bool(), none_BT[:, 0].bool())
    many_B = torch.zeros(1000)  # the size of a batch of branches
    return Rollout(
        *(batch, responses, none_BT, none_BT, none_BT, many_B), reuses_logprobs=reuses_logprobs
    )


def continuations(tokens: int) -> list[tuple[int, ...]]:
    """All ways to go on for at most ``tokens`` tokens, the first end token included."""
    anything = (PAD, *WORDS)  # a model may draw the padding token too
    found = [(*words, END) for size in range(tokens) for words in product(anything, repeat=size)]
    return [*found, *product(anything, repeat=tokens)]


@torch.no_grad()
def exact_value(engine: Any, prompt: list[int], prefix: list[int]) -> float:
    """The sum over all continuations of probability times discounted rewards, each model alone."""
    models, total, start = engine.models, 0.0, len(prompt) + len(prefix)
    for size in range(1, TOKENS - len(prefix) + 1):
        rests = [rest for rest in continuations(TOKENS - len(prefix)) if len(rest) == size]
        ids_NS = torch.tensor([[*prompt, *prefix, *rest] for rest in rests])
        logprobs = []
        for model in (models.actor, models.reference):
            logits_NTV = model.module.pretrained(ids_NS).logits[:, start - 1 : -1] / TEMPERATURE
            logs_NT1 = logits_NTV.log_softmax(-1).gather(2, ids_NS[:, start:, None])
            logprobs.append(logs_NT1[..., 0].double())
        scores_N = models.scores.model(ids_NS)[:, -1].double().clamp(-CLIP, CLIP)
        rewards_NT = -KL_CTL * (logprobs[0] - logprobs[1])
        rewards_NT[:, -1] += scores_N - PENALTY * (ids_NS[:, -1] != END)
        returns_N = (rewards_NT * GAMMA ** torch.arange(size)).sum(dim=1)
        total += float((logprobs[0].sum(dim=1).exp() * returns_N).sum())
    return total


@pytest.mark.parametrize("reuses_logprobs", [False, True])
def test_branch_values_are_exact_values(compose: Compose, *, reuses_logprobs: bool) -> None:
    engine = tiny_engine(compose)
    rollout = rollout_of([[2, 3, 4], [4, 4]], reuses_logprobs=reuses_logprobs)
    places = [(0, [2]), (0, [3, 2]), (1, [2]), (1, []), (0, [2])]
    states = [BranchPoint(row, prefix) for row, prefix in places]
    maker = TargetMaker(engine.config.ppo, Ranks())
    draws_BT = torch.rand(
        len(states) * BRANCHES, TOKENS, generator=torch.Generator().manual_seed(0)
    )
    found = Brancher(engine, rollout, maker, KL_CTL).estimate_values(states, draws_BT)
    assert found.true_N[0] != found.true_N[-1], "each branch has random numbers of its own"
    prompts = [[2, 3, 4], [2, 3, 4], [4, 4], [4, 4], [2, 3, 4]]
    for prompt, state, value, true_value, error in zip(
        prompts, states, *(each.tolist() for each in found), strict=True
    ):
        exact = exact_value(engine, prompt, state.prefix)
        assert abs(true_value - exact) < 3 * error, f"{state}: {true_value} beside {exact}"
        assert 0 < error < 0.05
        with torch.no_grad():
            critic = engine.models.critic(torch.tensor([[*prompt, *state.prefix]]))
        assert value == pytest.approx(float(critic[0, -1]), abs=1e-5)


def test_monte_carlo_advantages_are_differences_of_true_values(compose: Compose) -> None:
    engine = tiny_engine(compose)
    engine.ranks = Ranks()
    rollout = rollout_of([[2, 3, 4], [4, 4]], reuses_logprobs=False)
    responses = Responses(
        torch.tensor([[3, 2, 4], [2, END, PAD]]),
        torch.tensor([[True, True, True], [True, True, False]]),
        torch.tensor([False, True]),
    )
    rollout = rollout._replace(responses=responses, scores_B=torch.tensor([0.3, -0.4]))
    words = ["ppo.value_targets=monte_carlo", "ppo.value_branches=2000", "ppo.value_step_tokens=2"]
    words += ["ppo.rollout_batch_size=2000", "ppo.mini_batch_size=2000", f"ppo.gamma={GAMMA}"]
    words += [f"ppo.missing_end_penalty={PENALTY}", f"ppo.clip_reward_value={CLIP}"]
    config = to_run_config(compose([*words, "ppo.whiten_advantages=false"]))
    maker = maker_of(config)
    rollout = add_step_values(engine, rollout, maker, kl_ctl=KL_CTL)
    made = maker.make(rollout, kl_ctl=KL_CTL)
    first, other = (exact_value(engine, prompt, []) for prompt in ([2, 3, 4], [4, 4]))
    after = exact_value(engine, [2, 3, 4], [3, 2])
    (r0, r1, r2), (o0, o1, _) = made.rewards_BT.tolist()
    of_first, of_other = r0 + GAMMA * r1 + GAMMA**2 * after - first, o0 + GAMMA * o1 - other
    advantages = [[of_first, of_first, r2 - after], [of_other, of_other, 0.0]]
    returns = [[first, r1 + GAMMA * after, after], [other, o1, 0.0]]
    for found_BT, expected in zip(made.advantages, (advantages, returns), strict=True):
        torch.testing.assert_close(found_BT, torch.tensor(expected), atol=0.1, rtol=0)


RUN = [*SHORT, "ppo.steps=3", "ppo.actor_dropout=0.2", "ppo.scale_reward=running"]
RUN += ["ppo.kl_target=1"]
RUN += ["+rewards.model.kind=model", "+rewards.brief={kind: length, most: 2, normalise: true}"]
CHECK = ["ppo.critic_check.every=2", "ppo.critic_check.states=8", "ppo.critic_check.branches=4"]
CHECK += ["ppo.critic_check.step_tokens=1"]


def test_a_run_learns_from_monte_carlo_targets(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["ppo.value_targets=monte_carlo", "ppo.value_branches=3", "ppo.value_step_tokens=3"]
    words += ["ppo.critic_check.every=1", "ppo.critic_check.states=4", "ppo.steps=2"]
    words += ["ppo.critic_check.branches=2"]
    context, notes = run_context(compose, tmp_path, monkeypatch, *RUN, *words)
    with context.opened:
        run_ppo(context)
    assert notes.steps_with("ppo/critic_loss") == [1, 2]
    assert all(math.isfinite(x) for _, values in notes.logged for x in values.values())


def test_checks_change_nothing_of_a_run(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name, more in {"plain": [], "checked": CHECK}.items():
        (tmp_path / name).mkdir()
        context, notes = run_context(compose, tmp_path / name, monkeypatch, *RUN, *more)
        with context.opened:
            run_ppo(context)
        runs.append(notes)
    plain, checked = runs
    for role in ("actor", "critic"):
        weights = [notes.saved[f"ppo/{role}"].model.state_dict() for notes in runs]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    seen = [{name for _, values in notes.logged for name in values} for notes in runs]
    own = seen[1] - seen[0]
    assert {"ppo/critic_error", "ppo/critic_bias", "ppo/critic_slope"} <= own
    assert checked.steps_with("ppo/critic_error") == [2]
    for (step, values), (_, others) in zip(plain.logged, checked.logged, strict=True):
        for name, value in values.items():
            assert varies_between_runs(name) or others[name] == value, f"{name} in step {step}"
    steps = [step for step, _ in checked.rows]
    assert steps == [2] * len(steps)
    states = [CriticState(**row) for _, row in checked.rows]
    assert 4 <= len(states) <= 8
    assert {state.pair for state in states} == {8, 9, 10, 11}
    assert all(0 <= state.place < 1 and state.error >= 0 for state in states)
    assert len({state.true_value for state in states}) > 1
