"""Drawing tokens: by hand, and against the distribution that they should follow."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhf.rollout.sampling import NUCLEUS, SamplingSettings, draw_tokens, truncate_probabilities


def sampling(
    *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingSettings:
    return SamplingSettings(
        max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )


# Probabilities 0.5, 0.3, 0.2 in this order.
PROBABILITIES = torch.tensor([[0.5, 0.3, 0.2]])

CHOICES = [
    sampling(),
    sampling(temperature=0.7),
    sampling(top_k=5),
    sampling(top_p=0.8),
    sampling(temperature=0.7, top_k=5, top_p=0.8),
    sampling(min_p=0.3),
    sampling(temperature=0.7, min_p=0.2, top_p=0.8),
]


def random_logits(rows: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def expected_distribution(logits_V: Tensor, choice: SamplingSettings) -> Tensor:
    """The definition, token by token, in fp64."""
    weights = (logits_V.double() / choice.temperature).exp().tolist()
    likeliest = sorted(range(len(weights)), key=lambda token: -weights[token])
    likeliest = [t for t in likeliest if weights[t] >= choice.min_p * weights[likeliest[0]]]
    likeliest = likeliest[: choice.top_k or None]
    share = choice.top_p * sum(weights[token] for token in likeliest)
    kept, held = [], 0.0
    for token in likeliest:
        if held < share:
            kept.append(token)
            held += weights[token]
    expected_V = torch.zeros(len(weights), dtype=torch.float64)
    expected_V[kept] = torch.tensor([weights[token] / held for token in kept]).double()
    return expected_V


def assert_follow(tokens_B: Tensor, expected_V: Tensor) -> None:
    """Chi-square within four standard deviations; nothing where nothing can come."""
    counts_V = tokens_B.bincount(minlength=len(expected_V))
    possible_V = expected_V > 0
    assert counts_V[~possible_V].sum() == 0
    expected_counts_V = len(tokens_B) * expected_V
    chi_square = ((counts_V - expected_counts_V) ** 2 / expected_counts_V)[possible_V].sum()
    degrees = int(possible_V.sum()) - 1
    assert degrees > 0
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("place", [1, 63, 64, 100, 199])
def test_a_token_without_probability_is_never_drawn(place: int) -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, place] = 0.0
    for draw in (0.0, 0.5, 0.999999):
        assert draw_tokens(logits, torch.tensor([draw]), sampling()).tokens_B.tolist() == [place]


def test_top_p_keeps_the_token_that_crosses_the_share() -> None:
    # 0.5 < 0.6, so the second token is needed too; the third is not
    kept = truncate_probabilities(PROBABILITIES, sampling(top_p=0.6))
    torch.testing.assert_close(kept, torch.tensor([[0.5, 0.3, 0.0]]))
    alone = truncate_probabilities(PROBABILITIES, sampling(top_p=0.5))
    torch.testing.assert_close(alone, torch.tensor([[0.5, 0.0, 0.0]]))


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
def test_top_p_without_waiting_keeps_what_a_sort_keeps_or_nothing(
    top_p: float, spread: float
) -> None:
    """Logits in bf16 have many ties. Rows that keep too many tokens to sort get no token."""
    logits = (spread * random_logits(100, 3000)).bfloat16()
    probabilities = logits.float().softmax(-1)
    ordered = probabilities.sort(descending=True).values
    held = ordered.double().cumsum(-1)
    last = (held < (top_p - 1e-7) * held[:, -1:]).sum(-1, keepdim=True)
    expected = probabilities.masked_fill(probabilities < ordered.gather(1, last), 0)
    choice = sampling(top_p=top_p)
    assert torch.equal(truncate_probabilities(probabilities, choice), expected)
    lacks = last[:, 0] >= NUCLEUS
    found = truncate_probabilities(probabilities, choice, waits=False)
    assert torch.equal(found, expected.masked_fill(lacks[:, None], 0))
    draws = torch.arange(100) / 100
    drawn, exact = (draw_tokens(logits, draws, choice, waits=waits) for waits in (False, True))
    assert torch.equal(drawn.logprobs_B.isneginf(), lacks)
    assert torch.equal(drawn.tokens_B[~lacks], exact.tokens_B[~lacks])
    assert torch.equal(drawn.logprobs_B[~lacks], exact.logprobs_B[~lacks])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_training(choice: SamplingSettings, dtype: torch.dtype) -> None:
    logits, draws = random_logits(40, 200).to(dtype), torch.arange(40) / 40
    barred = torch.arange(40) % 2 == 0
    for bar in (None, barred):
        drawn = draw_tokens(logits, draws, choice, barred_B=bar, end_ids=[3])
        log_softmax = (logits.float() / choice.temperature).log_softmax(-1)
        expected = log_softmax[torch.arange(40), drawn.tokens_B]
        torch.testing.assert_close(drawn.logprobs_B, expected)
        assert drawn.logprobs_B.dtype == torch.float32


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_the_first_of_top_k_is_the_argmax(temperature: float) -> None:
    greedy = sampling(temperature=temperature, top_k=1)
    logits = random_logits(64, 500).bfloat16()
    logits[:, [100, 300, 400]] = 6.0  # a tie
    expected = logits.argmax(dim=-1)
    for draw in (0.0, 0.4, 0.999):
        assert torch.equal(draw_tokens(logits, torch.full((64,), draw), greedy).tokens_B, expected)
    barred = torch.ones(64, dtype=torch.bool)
    others = draw_tokens(
        logits, torch.zeros(64), greedy, barred_B=barred, end_ids=[int(expected[0])]
    )
    logits[:, expected[0]] = -torch.inf
    assert torch.equal(others.tokens_B, logits.argmax(dim=-1))


@pytest.mark.parametrize("choice", CHOICES)
def test_tokens_follow_the_distribution(choice: SamplingSettings) -> None:
    logits = random_logits(1, 150)
    draws = torch.rand(50_000, generator=torch.Generator().manual_seed(1))
    tokens = draw_tokens(logits.expand(50_000, -1), draws, choice).tokens_B
    assert_follow(tokens, expected_distribution(logits[0], choice))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_barred_end_leaves_the_others_their_proportions(choice: SamplingSettings) -> None:
    logits = random_logits(1, 8)
    end_id = int(logits.argmax())
    draws = torch.rand(50_000, generator=torch.Generator().manual_seed(1))
    barred = torch.arange(50_000) % 2 == 0
    many = logits.expand(50_000, -1)
    tokens = draw_tokens(many, draws, choice, barred_B=barred, end_ids=[end_id]).tokens_B
    open_tokens = draw_tokens(many, draws, choice).tokens_B
    assert torch.equal(tokens[~barred], open_tokens[~barred])
    assert (open_tokens[barred] == end_id).any()
    logits[0, end_id] = -torch.inf
    assert_follow(tokens[barred], expected_distribution(logits[0], choice))


def test_what_is_left_beside_a_certain_end_can_still_be_drawn() -> None:
    # In fp32 the two others have probability 0 beside the end.
    logits = torch.tensor([[0.0, 200.0, 0.0]]).expand(2, -1)
    barred = torch.ones(2, dtype=torch.bool)
    draws = torch.tensor([0.2, 0.7])
    drawn = draw_tokens(logits, draws, sampling(), barred_B=barred, end_ids=[1])
    assert drawn.tokens_B.tolist() == [0, 2]
    assert drawn.logprobs_B.tolist() == [-200.0, -200.0]


@pytest.mark.parametrize("choice", CHOICES)
def test_broken_logits_give_a_token_of_the_vocabulary(choice: SamplingSettings) -> None:
    drawn = draw_tokens(torch.full((2, 70), torch.nan), torch.tensor([0.0, 0.9]), choice)
    assert all(0 <= token < 70 for token in drawn.tokens_B.tolist())
    assert drawn.logprobs_B.isnan().all()


@pytest.mark.parametrize("choice", CHOICES)
def test_a_kernel_draws_only_if_no_token_is_left_out(
    choice: SamplingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels sample from the whole distribution."""
    asked: list[float] = []
    first = torch.zeros(1, dtype=torch.long), torch.zeros(1)

    class Kernel:
        def draw(self, *_: Tensor, scale: float, **__: object) -> tuple[Tensor, Tensor]:
            asked.append(scale)
            return first

    kernels = SimpleNamespace(draw_kernel=lambda _: Kernel())
    monkeypatch.setattr("rlhf.rollout.sampling.kernels_for", lambda _: kernels)
    draw_tokens(random_logits(1, 8), torch.tensor([0.5]), choice)
    is_whole = choice == sampling(temperature=choice.temperature)
    assert asked == ([1 / choice.temperature] if is_whole else [])
