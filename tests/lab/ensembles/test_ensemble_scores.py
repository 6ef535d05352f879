"""Ensembles where PPO scores, and in a plan."""

# ruff: noqa: F811 - fixtures of another file are arguments here

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.types import PromptBatch, Rollout
from rlhf.config.choices import Phase
from rlhf.models.build import ModelSource, build_scorer
from rlhf.models.model_uses import models_in_phase
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.shared.scoring import ModelScores, score_responses
from rlhf_lab.ensembles import CombineName, EnsembleKeys
from rlhf_lab.ensembles.members import Combination, Ensemble, build_members
from tests.conftest import Compose
from tests.models.test_model_uses import tiny_opt
from tests.models_on_disk import small_tokenizer
from tests.phases.ppo.ppo_pieces import TEMPERATURE, TOKENIZER, source
from tests.phases.shared.test_scoring import (  # noqa: F401
    models,
    prompts,
    rollout,
    terms_of_scores,
    unpadded,
)
from tests.plain_engine import PlainEngine
from tests.plan.planned import TINY_MODEL, named
from tests.rounding import assert_near


def test_an_ensemble_scores_by_its_combination(
    models: SeparateModels, prompts: PromptBatch, rollout: Rollout
) -> None:
    scorer = build_scorer(source(), TOKENIZER, seed=4)
    config: Any = SimpleNamespace(num_own_layers=lambda _: 1, combine=CombineName.worst)
    members = build_members(scorer, config, seeds=[5, 6])
    combination = Combination(3, CombineName.worst)
    ensemble = Ensemble(scorer, members, torch.zeros(3), combination).eval()
    scores = ModelScores(PlainEngine(ensemble))
    several = SeparateModels(
        models.actor, models.reference, models.critic, scores, temperature=TEMPERATURE
    )
    found = score_responses(several, rollout.prompts, rollout.responses, micro_batch_size=2)
    for row in range(4):
        prompt, response = unpadded(rollout, row)
        with torch.no_grad():
            members_M = ensemble.member_values(torch.tensor([prompt + response]))[0, -1]
        terms = terms_of_scores(models)
        assert_near(found.scores_B[row], members_M.min(), terms=terms)
        assert_near(found.measures["disagreement"][row], members_M.std(correction=0), terms=terms)
    assert not rollout.measures


@pytest.mark.parametrize("combine", [CombineName.mean, CombineName.warm])
def test_members_are_counted_as_they_are(combine: CombineName, compose: Compose) -> None:
    """Own layers, norm and head of each further member; averaged weights are one model in PPO."""
    tokenizer = small_tokenizer()
    fields = TINY_MODEL | {"vocab_size": len(tokenizer), "num_hidden_layers": 4}
    settings = {"members": 3, "member_layers": 2, "combine": combine}
    config = tiny_opt(compose, model={"architecture": fields}, reward=settings)
    source = ModelSource(key="model", path=None, architecture=fields)
    scorer = build_scorer(source, tokenizer, seed=1)
    first = sum(p.numel() for p in scorer.parameters())
    members = build_members(scorer, EnsembleKeys.of(config), seeds=[1, 2])
    whole = first + sum(p.numel() for member in members for p in member.parameters())
    (training,) = models_in_phase(config, Phase.reward)
    assert (training.weights, training.trained) == (whole, whole)
    frozen = named(models_in_phase(config, Phase.ppo))["reward"]
    assert frozen.weights == (first if combine is CombineName.warm else whole)
    assert frozen.trained == 0
