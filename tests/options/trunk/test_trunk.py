"""The shared trunk against separate models: logits, values, what is trained, and what is saved."""

from pathlib import Path

import pytest
import torch

from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.base.types import LogprobOptions, TokenLogprobs, TokenPositions
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.language_model import LanguageModel
from rlhf.models.pretrained import require_one_label_model
from rlhf.models.sources import ModelSource
from rlhf.options.trunk.shared_trunk import SharedTrunk, build_critic_skeleton, select_critic_state
from tests.models_on_disk import (
    FAMILIES,
    disturb,
    some_ids,
    source_of,
    whole_state,
)

IDS = some_ids(tokens=6)
LENGTHS = torch.tensor([[6], [4]])
ATTEND = torch.arange(6) < LENGTHS
KEPT = torch.arange(5) < LENGTHS - 1  # the positions that predict a token
PICKS = TokenPositions(*KEPT.nonzero(as_tuple=True), IDS[:, 1:][KEPT])
OPTIONS = LogprobOptions(0.8, entropy_gradient=True)
HEADS = {"num_key_value_heads": 1}
SLIDING = ["full_attention", "sliding_attention"] * 2
# Families and variants: name -> (family, what is changed in its config).
MODELS = {name: (name, {}) for name in FAMILIES} | {
    "qwen2": ("llama", HEADS | {"model_type": "qwen2"}),
    "mistral": ("llama", HEADS | {"model_type": "mistral", "sliding_window": 3}),
    "norm first": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "untied": ("gpt2", {"tie_word_embeddings": False}),
    "sliding": ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "layer_types": SLIDING}),
}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def deep_source(name: str, **options) -> ModelSource:
    """A random model with four layers."""
    family, changes = MODELS[name]
    num_layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return source_of(family, fields={num_layers: 4} | changes, **options)


def trunk_of(name: str, tokenizer, *, unfrozen: int = 2, value: int = 0, **options) -> SharedTrunk:
    actor = build_actor(deep_source(name, **options), tokenizer, seed=1)
    return SharedTrunk(actor, num_layers_unfrozen=unfrozen, num_value_layers=value).eval()


def actor_of(name: str, tokenizer):
    return build_actor(deep_source(name), tokenizer, seed=1).eval()


def outputs(trunk: SharedTrunk, *, with_reference: bool = True):
    with torch.no_grad():
        return trunk(IDS, PICKS, OPTIONS, with_reference=with_reference)


def told_by(model) -> TokenLogprobs:
    """What the model says of the picked tokens."""
    with torch.no_grad():
        return LanguageModel(model)(IDS, PICKS, OPTIONS)


def train(trunk: SharedTrunk, steps: int = 5) -> None:
    """Some steps of AdamW on a loss of both logits and values."""
    trained = [p for p in trunk.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    trunk.train()
    for _ in range(steps):
        out = trunk(IDS, PICKS)
        (out.values_BS - 1).square().mean().sub(out.policy.logprobs_N.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    trunk.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("llama", 0), *((name, 3) for name in MODELS)])
def test_policy_and_reference_start_as_the_model(name: str, value: int, tokenizer) -> None:
    trunk, untouched = trunk_of(name, tokenizer, value=value), actor_of(name, tokenizer)
    out = outputs(trunk)
    for ours, reference, theirs in zip(out.policy, out.reference, told_by(untouched), strict=True):
        assert torch.equal(ours, reference)  # so the first KL is 0
        assert torch.equal(ours, theirs)
    assert out.values_BS.shape == IDS.shape
    assert out.values_BS.dtype == torch.float32
    assert torch.equal(out.values_BS, torch.zeros_like(out.values_BS))
    assert outputs(trunk, with_reference=False).reference is None
    with torch.no_grad():
        scored = trunk(IDS, PICKS, OPTIONS, with_policy=False, with_reference=True)
    assert scored.policy is None
    assert torch.equal(scored.reference.logprobs_N, out.reference.logprobs_N)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_stays_what_it_was_while_the_policy_learns(name: str, tokenizer) -> None:
    trunk, untouched = trunk_of(name, tokenizer, value=1), actor_of(name, tokenizer)
    frozen = {n: p.clone() for n, p in trunk.named_parameters() if not p.requires_grad}
    train(trunk)
    out = outputs(trunk)
    expected = told_by(untouched)
    for got, start in zip(out.reference, expected, strict=True):
        torch.testing.assert_close(got, start, atol=1e-6, rtol=1e-6)
    assert (out.policy.logprobs_N - expected.logprobs_N).abs().max() > 0.1
    assert torch.equal(out.policy.logprobs_N, told_by(trunk.pretrained).logprobs_N)
    after = dict(trunk.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in frozen.items())


def test_what_is_trained_is_the_top(tokenizer) -> None:
    def parts(trunk: SharedTrunk) -> set[str]:
        names = {name for name, p in trunk.named_parameters() if p.requires_grad}
        return {".".join(name.split(".")[:4]) for name in names}

    top = {"pretrained.model.layers.2", "pretrained.model.layers.3", "pretrained.model.norm.weight"}
    head = {"pretrained.lm_head.weight", "value_head.weight"}
    own = {"value_branch.blocks.0.self_attn", "value_branch.blocks.0.mlp"}
    own |= {"value_branch.blocks.0.input_layernorm", "value_branch.tail.0.weight"}
    own |= {"value_branch.blocks.0.post_attention_layernorm"}
    assert parts(trunk_of("llama", tokenizer)) == top | head
    assert parts(trunk_of("llama", tokenizer, value=1)) == top | head | own
    tied = trunk_of("tied", tokenizer)
    assert parts(tied) == top | {"value_head.weight"}
    assert tied.reference_output is None
    tail = "pretrained.model.decoder.project_out"
    assert tail in parts(trunk_of("opt", tokenizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [*((name, 1) for name in MODELS), *(("llama", value) for value in (0, 3, 4))]
)
def test_the_saved_critic_gives_the_live_values(name, value, tokenizer, tmp_path: Path) -> None:
    trunk = trunk_of(name, tokenizer, value=value)
    disturb(trunk)
    out, state = outputs(trunk), whole_state(trunk)
    model = build_critic_skeleton(trunk, tokenizer)
    assert all(parameter.is_meta for parameter in model.parameters())
    for parameter in trunk.parameters():  # as under ZeRO-3: only ``state`` holds the weights
        parameter.data = torch.empty(0)
    critic = select_critic_state(trunk, state)
    assert critic.keys() == {name for name, _ in model.named_parameters()}
    model.save_pretrained(tmp_path, state_dict=critic)
    tokenizer.save_pretrained(tmp_path)
    require_one_label_model(ModelSource(key="reward_model.path", path=str(tmp_path)))
    loaded = build_scorer(ModelSource(key="m", path=str(tmp_path)), tokenizer, seed=9).eval()
    with torch.no_grad():
        values_BS = loaded(IDS)
    kept, expected = values_BS[ATTEND], out.values_BS[ATTEND]
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(kept, expected, **CLOSE)


def test_a_critic_of_its_own_blocks_leaves_the_policys_alone(tokenizer) -> None:
    def trained_by_values(value: int) -> set[str]:
        trunk = trunk_of("llama", tokenizer, value=value)
        disturb(trunk.value_head)
        out = trunk(IDS, PICKS)
        out.values_BS.sum().backward()
        names = {n for n, p in trunk.pretrained.named_parameters() if p.grad is not None}
        return {name.split(".")[2] for name in names}

    assert trained_by_values(0) == {"2", "3", "weight"}
    assert trained_by_values(1) == {"2"}  # below the critic's own block
    assert trained_by_values(2) == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_no_gradient(family: str, tokenizer) -> None:
    def gradients(is_on: bool) -> dict[str, torch.Tensor]:
        trunk = trunk_of(family, tokenizer, value=1, gradient_checkpointing=is_on)
        disturb(trunk)
        trunk.train()
        out = trunk(IDS, PICKS, OPTIONS, with_reference=True)
        assert not out.reference.logprobs_N.requires_grad
        found = out.policy.logprobs_N.mean() + out.policy.entropy_N.mean()
        (found + out.values_BS[:, -3:].square().mean()).backward()
        return {n: p.grad for n, p in trunk.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(is_on=False), gradients(is_on=True)
    assert plain.keys() == checkpointed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient)


def test_dropout_never_reaches_the_references_own_blocks(tokenizer) -> None:
    trunk = trunk_of("opt", tokenizer, dropout=0.5).train()
    assert all(not module.training for module in trunk.reference.modules())
    assert trunk.pretrained.training
    for _ in range(5):  # layers that OPT leaves out at random would have no call to branch from
        trunk(IDS, PICKS, with_reference=True)


def test_more_layers_than_there_are_are_refused(tokenizer) -> None:
    message = r"ppo\.num_layers_unfrozen=4: the model has 4 layers.*ppo\.shared_trunk=false"
    with pytest.raises(ConfigError, match=message):
        trunk_of("llama", tokenizer, unfrozen=4)
    with pytest.raises(ConfigError, match=r"ppo\.num_value_layers=5: the model has 4 layers"):
        trunk_of("llama", tokenizer, value=5)


def test_other_families_are_refused(tokenizer) -> None:
    fields = {"model_type": "bloom", "n_layer": 2, "n_head": 2, "hidden_size": 16}
    source = ModelSource(key="model", path=None, architecture=fields)
    with pytest.raises(CapabilityError, match=r"model_type=bloom.*set ppo\.shared_trunk=false"):
        SharedTrunk(build_actor(source, tokenizer, seed=1), num_layers_unfrozen=1)
