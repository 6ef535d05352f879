"""Members against whole models: values, gradients and copies, for every family of models."""

from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.base.errors import CapabilityError
from rlhf.models.build import build_scorer
from rlhf.models.families import family_of, find_submodule
from rlhf.models.language_model import Scorer
from rlhf.models.sources import ModelSource
from rlhf_lab.ensembles import CombineName
from rlhf_lab.ensembles.members import (
    Combination,
    Ensemble,
    Member,
    build_members,
    record_top_block_calls,
)
from tests.models_on_disk import disturb, small_tokenizer, some_ids
from tests.options.trunk.test_trunk import MODELS, deep_source

IDS = some_ids(tokens=6)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
SETTINGS: Any = SimpleNamespace(num_own_layers=lambda total: total // 2, combine=CombineName.mean)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def grown(name: str, tokenizer, **changes: Any) -> tuple[Scorer, list[Member]]:
    """A first member, and two further members that differ from it and from one another."""
    scorer = build_scorer(deep_source(name), tokenizer, seed=1).eval()
    config: Any = SimpleNamespace(**vars(SETTINGS) | changes)
    members = build_members(scorer, config, seeds=[2, 3])
    for seed, member in enumerate(members):
        disturb(member.eval(), seed=seed, size=0.05)
    return scorer, members


def whole_model(scorer: Scorer, member: Member) -> Scorer:
    """A copy of the first member in which the member's own modules replace those of the first."""
    model = deepcopy(scorer)
    base, family = model.pretrained.base_model, family_of(model.pretrained)
    blocks = base.get_submodule(family.blocks)
    for place, block in enumerate(member.branch.blocks, start=len(blocks) // 2):
        blocks[place] = block
    tail = [name for name in family.tail if find_submodule(base, name) is not None]
    for name, module in zip(tail, member.branch.tail, strict=True):
        base.set_submodule(name, module)
    setattr(model.pretrained, model.head_name, member.head)
    return model


def gradients(module: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_members_equal_whole_models(name: str, tokenizer) -> None:
    scorer, members = grown(name, tokenizer)
    ensemble = Ensemble(scorer, members, torch.tensor([0.5, 0.0, -1.0]), Combination(3))
    with torch.no_grad():
        values_BSM = ensemble.member_values(IDS)
        expected = [scorer(IDS), *(whole_model(scorer, each)(IDS) for each in members)]
        for number, (values_BS, offset) in enumerate(zip(expected, (0.5, 0, -1), strict=True)):
            torch.testing.assert_close(values_BSM[..., number], values_BS - offset, **CLOSE)
        torch.testing.assert_close(ensemble(IDS), values_BSM.mean(dim=-1), **CLOSE)
    assert not expected[1].allclose(expected[2], atol=1e-3)


@pytest.mark.parametrize("name", ["opt", "gpt_neox", "qwen3"])
def test_a_member_has_the_gradient_of_a_whole_model(name: str, tokenizer) -> None:
    scorer, members = grown(name, tokenizer)
    with torch.no_grad(), record_top_block_calls(scorer, members) as calls:
        scorer(IDS)
    for member in members:
        member(calls).square().sum().backward()
        found = gradients(member)
        whole_model(scorer, member)(IDS).square().sum().backward()
        for gradient, expected in zip(found, gradients(member), strict=True):
            torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)
    assert not gradients(scorer), "the first member is fixed"


def test_heads_differ_unless_weights_are_averaged(tokenizer) -> None:
    for combine in (CombineName.mean, CombineName.warm):
        scorer = build_scorer(deep_source("llama"), tokenizer, seed=1)
        config: Any = SimpleNamespace(**vars(SETTINGS) | {"combine": combine})
        heads = [member.head.weight for member in build_members(scorer, config, seeds=[2, 3])]
        heads.append(scorer.pretrained.score.weight)
        is_warm = combine is CombineName.warm
        assert [a.equal(b) for a, b in pairwise(heads)] == [is_warm] * 2


def test_an_unknown_family_is_refused(tokenizer) -> None:
    fields = {"model_type": "gptj", "rotary_dim": 4, "n_embd": 16, "n_layer": 2, "n_head": 2}
    source = ModelSource(key="model", path=None, architecture=fields)
    scorer = build_scorer(source, tokenizer, seed=1)
    with pytest.raises(CapabilityError, match=r"reward.members is not supported.*reward.members=1"):
        build_members(scorer, SETTINGS, seeds=[2])
