"""Separate models, a shared trunk and adapters switched off say the same of the same weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.types import StepReport
from rlhf.config.roles import Role
from rlhf.data.collate import collate_sequences
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.language_model import LanguageModel
from rlhf.options.lora.models import AdapterOff
from rlhf.options.trunk.shared_trunk import SharedTrunk, TrunkModels
from rlhf.phases.ppo.models import PpoModels, SeparateModels, step_optimizers_together
from rlhf.phases.ppo.objective import MicroBatch
from rlhf.phases.shared.scoring import ModelScores, ResponseLogprobs, WholeSequences
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import disturb
from tests.phases.ppo.ppo_pieces import TEMPERATURE, TOKENIZER, flat, some_rollout, source
from tests.plain_engine import PlainEngine, TrainingEngine
from tests.rounding import assert_near

# Of the sums in a log-probability: two layers and the head of width 8, 9 tokens, 260 entries.
TERMS = 2 * (7 * 8 + 2 * 9) + 8 + 260
SPEC = lora_config(dropout=0.5)
ROLLOUT = some_rollout()
SEQUENCES = WholeSequences(ROLLOUT.prompts, ROLLOUT.responses)


@pytest.fixture
def reward() -> PlainEngine:
    return PlainEngine(build_scorer(source(), TOKENIZER, seed=4))


def trunk_models(reward: PlainEngine, **options: Any) -> TrunkModels:
    actor = build_actor(source(), TOKENIZER, seed=1)
    trunk = SharedTrunk(actor, num_layers_unfrozen=1, num_value_layers=1)
    nn.init.normal_(trunk.value_head.weight, generator=torch.Generator().manual_seed(5))
    engine = TrainingEngine(trunk, accumulation=1)
    return TrunkModels(engine, ModelScores(reward), temperature=TEMPERATURE, **options)


def separate_twin(models: TrunkModels) -> SeparateModels:
    """The weights that a new trunk has, in models of their own."""
    trunk = models.actor.module
    critic = build_scorer(source(), TOKENIZER, seed=2)
    critic.pretrained.model.load_state_dict(trunk.pretrained.model.state_dict())
    critic.pretrained.score.load_state_dict(trunk.value_head.state_dict())
    return SeparateModels(
        TrainingEngine(LanguageModel(build_actor(source(), TOKENIZER, seed=1)), accumulation=1),
        PlainEngine(LanguageModel(build_actor(source(), TOKENIZER, seed=1))),
        TrainingEngine(critic, accumulation=1),
        models.scores,
        temperature=TEMPERATURE,
        entropy_gradient=True,
    )


def gain(policy: ResponseLogprobs) -> Tensor:
    gain_BT = policy.logprobs_BT + 0.5 * policy.entropy_BT
    return gain_BT[ROLLOUT.responses.keep_BT].sum()


def squares(values_BT: Tensor) -> Tensor:
    return values_BT[ROLLOUT.responses.keep_BT].square().sum()


def learn(models: PpoModels) -> dict[Role, StepReport]:
    """One update on ``SEQUENCES`` with gain and squares as the losses."""
    reports = {}
    nothing_BT = torch.zeros(ROLLOUT.responses.ids_BT.shape)
    batch = MicroBatch(SEQUENCES, *[nothing_BT] * 7)
    objective: Any = SimpleNamespace(
        actor_loss=lambda policy, _: (gain(policy), {}),
        critic_loss=lambda values_BT, _: (squares(values_BT), {}),
    )
    for learners in models.learner_groups(trains_actor=True):
        for learner in learners:
            loss, _ = learner.loss(batch, objective)
            learner.engine.backward(loss)
        reports |= step_optimizers_together(learners)
    return reports


def assert_all_close(one: Any, other: Any) -> None:
    for first, second in zip(one, other, strict=True):
        assert_near(flat(first), flat(second), terms=TERMS)


def test_a_new_trunk_scores_as_separate_models_do(reward: PlainEngine) -> None:
    models = trunk_models(reward)
    got, expected = models.score(SEQUENCES), separate_twin(models).score(SEQUENCES)
    assert_all_close(got[:3], expected[:3])
    torch.testing.assert_close(got.scores_B, expected.scores_B)
    assert got.values_BT.abs().max() > 0.01
    assert not any(opinion.requires_grad for opinion in got if isinstance(opinion, torch.Tensor))
    assert_near(flat(got.logprobs_BT), flat(got.reference_logprobs_BT), terms=TERMS)


def test_a_pass_of_the_trunk_learns_what_separate_models_do(reward: PlainEngine) -> None:
    models = trunk_models(reward, entropy_gradient=True)
    twin = separate_twin(models)
    for each in (models, twin):
        learn(each)
    together = models.actor.gradients[0]
    assert not any(module._forward_pre_hooks for module in models.actor.module.modules())
    apart = twin.actor.gradients[0]
    critic = twin.critic.gradients[0]
    for name, gradient in together.items():
        if name.startswith("pretrained."):
            expected = apart[name]
        elif name.startswith("value_branch.blocks.0."):
            block = name.removeprefix("value_branch.blocks.0.")
            expected = critic[f"pretrained.model.layers.1.{block}"]
        elif name == "value_head.weight":
            expected = critic["pretrained.score.weight"]
        else:
            assert name == "value_branch.tail.0.weight"
            expected = critic["pretrained.model.norm.weight"]
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)
    assert {"pretrained.model.layers.1.mlp.up_proj.weight", "pretrained.lm_head.weight"} <= {
        *together
    }


def test_language_logprobs_are_those_of_each_sequence_alone(reward: PlainEngine) -> None:
    models, rows = trunk_models(reward), [[5, 6, 7, 8], [9, 10]]
    batch = collate_sequences(rows, [0, 0], pad_id=0, device=torch.device("cpu"))
    alone = build_actor(source(), TOKENIZER, seed=1).eval()
    expected = []
    for ids in rows:
        logs_SV = alone(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected += [logs_SV[place, token] for place, token in enumerate(ids[1:])]
    for each in (models, separate_twin(models)):
        got_N = each.actor_logprobs(batch)
        assert_near(got_N, torch.stack(expected), terms=TERMS)


def test_a_trunk_reports_its_overflow_once(reward: PlainEngine) -> None:
    models = trunk_models(reward)
    models.actor.overflows = True
    reports = learn(models)
    assert list(reports) == [Role.actor]
    assert reports[Role.actor].is_skipped
    assert reports[Role.actor].has_overflowed


def test_with_adapters_policy_and_reference_start_equal_and_part(reward: PlainEngine) -> None:
    adapted = LanguageModel(build_actor(source(), TOKENIZER, seed=1, extensions=adding(SPEC)))
    engine, scores = TrainingEngine(adapted, accumulation=1), ModelScores(reward)
    models = SeparateModels(engine, AdapterOff(engine), None, scores, temperature=TEMPERATURE)
    start = models.score(SEQUENCES)
    assert torch.equal(start.logprobs_BT, start.reference_logprobs_BT)
    disturb(engine.module)
    after = models.score(SEQUENCES)
    assert torch.equal(after.reference_logprobs_BT, start.logprobs_BT)
    assert (flat(after.logprobs_BT) - flat(start.logprobs_BT)).abs().max() > 0.01
