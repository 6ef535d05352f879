"""A policy tells of picked tokens what the model's own logits say of each sequence alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.types import LogprobOptions, TokenPositions
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.families import FAMILIES
from rlhf.models.language_model import LanguageModel, OutputLayer
from tests.models_on_disk import small_tokenizer, whole_state
from tests.pretend_cuda.gpu import Event, Gpu
from tests.rounding import assert_near, terms_of

WIDTHS = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "num_key_value_heads": 1}
WIDTHS |= {"num_hidden_layers": 2, "num_attention_heads": 2}
OPT = {"word_embed_proj_dim": 8, "ffn_dim": 16, "do_layer_norm_before": False}
FIELDS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 2, "hidden_size": 16},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "gptj": {"n_embd": 16, "n_layer": 2, "n_head": 2, "rotary_dim": 4},
    "opt": WIDTHS | OPT,
    "cohere": WIDTHS | {"logit_scale": 0.3},  # not plain: its logits are scaled
    "gemma2": WIDTHS | {"final_logit_softcapping": 2.0},
}
NOT_PLAIN = ("cohere", "gemma2")
LENGTHS = [7, 3, 5]
OPTIONS = LogprobOptions(0.7, entropy_gradient=True)


def model_of(family: str, **fields: Any) -> Any:
    architecture = {"model_type": family, **FIELDS.get(family, WIDTHS), **fields}
    source = ModelSource(key="model", path=None, architecture=architecture)
    model = build_actor(source, small_tokenizer(), seed=1).eval()
    with torch.no_grad():  # far from uniform, and with biases that are not 0
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
            parameter.add_(0.2 * noise)
    return model


def sequences() -> tuple[Tensor, TokenPositions]:
    """Ids (3, 7), and all tokens behind the second one, in no order."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(2, 260, (3, 7), generator=generator)
    positions = [(row, place) for row, n in enumerate(LENGTHS) for place in range(1, n - 1)]
    positions = [positions[i] for i in torch.randperm(len(positions), generator=generator)]
    rows_N, columns_N = torch.tensor(positions).T
    return ids_BS, TokenPositions(rows_N, columns_N, ids_BS[rows_N, columns_N + 1])


def alone(model: Any, ids_BS: Tensor, positions: TokenPositions) -> Tensor:
    """Log-distributions (N, V), each row without its padding."""
    logits = [model(ids_S[None, :n]).logits[0] for ids_S, n in zip(ids_BS, LENGTHS, strict=True)]
    pairs = zip(positions.rows_N.tolist(), positions.columns_N.tolist(), strict=True)
    logits_NV = torch.stack([logits[row][column] for row, column in pairs])
    return (logits_NV / OPTIONS.temperature).log_softmax(-1)


@pytest.mark.parametrize("family", [*FAMILIES, *NOT_PLAIN])
def test_picked_tokens_have_the_logprobs_and_the_gradient_of_the_models_logits(family: str) -> None:
    model = model_of(family)
    ids_BS, positions = sequences()
    logs_NV = alone(model, ids_BS, positions)
    expected_N = logs_NV.gather(1, positions.ids_N[:, None])[:, 0]
    entropy_N = -(logs_NV.exp() * logs_NV).sum(-1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(expected_N.sum() + entropy_N.sum(), parameters)

    policy = LanguageModel(model)
    assert policy.is_plain == (family in FAMILIES)
    found = policy(ids_BS, positions, OPTIONS)
    terms = terms_of(model, ids_BS.shape[1]) + logs_NV.shape[1]
    assert_near(found.logprobs_N, expected_N, terms=terms)
    assert_near(found.entropy_N, entropy_N, terms=terms)
    assert expected_N.std() > 0.1
    got = torch.autograd.grad(found.logprobs_N.sum() + found.entropy_N.sum(), parameters)
    assert_near(got, slopes, terms=2 * terms + ids_BS.numel())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_picks_are_no_error(family: str) -> None:
    policy, none_N = LanguageModel(model_of(family)), torch.zeros(0, dtype=torch.long)
    found = policy(sequences()[0], TokenPositions(none_N, none_N, none_N))
    assert found.logprobs_N.shape == found.entropy_N.shape == (0,)
    found.logprobs_N.sum().backward()
    slopes = [p.grad for p in policy.parameters() if p.grad is not None]
    assert not any(slope.any() for slope in slopes)  # nor is any NaN


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_within_stays_the_model_that_it_was(tmp_path: Any, *, tied: bool) -> None:
    model, plain = (model_of("llama", tie_word_embeddings=tied) for _ in range(2))
    policy = LanguageModel(model)
    ids_BS, _ = sequences()
    assert isinstance(model.get_output_embeddings(), OutputLayer)
    assert torch.equal(model(ids_BS).logits, plain(ids_BS).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    state = whole_state(policy.pretrained)
    assert state.keys() == whole_state(plain).keys()
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = type(plain).from_pretrained(tmp_path).eval()
    expected = dict(plain.named_parameters())
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.named_parameters())
    assert_near(loaded(ids_BS).logits, plain(ids_BS).logits, terms=terms_of(plain, ids_BS.shape[1]))


def test_an_output_layer_of_its_own_kind_is_left_alone() -> None:
    class Other(nn.Linear):
        """Does more than a linear layer."""

    model = model_of("llama")
    model.set_output_embeddings(Other(16, model.config.vocab_size, bias=False))
    assert not LanguageModel(model).is_plain
    assert type(model.get_output_embeddings()) is Other


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox", "qwen3"])
def test_a_pass_does_not_wait_for_the_gpu(family: str, gpu: Gpu) -> None:
    """The host launches the next pass while the GPU runs this one."""
    model = LanguageModel(model_of(family)).to("cuda")
    ids_BS, positions = sequences()
    on_gpu = ids_BS.to("cuda"), TokenPositions(*(part.to("cuda") for part in positions)), OPTIONS
    model(*on_gpu).logprobs_N.sum().backward()  # the first pass builds tables
    with gpu.counting() as counts:
        model(*on_gpu).logprobs_N.sum().backward()
    assert not counts.lines(Event.sync)
