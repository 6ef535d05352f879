"""Where we depart from DeepSpeed-Chat and trlx on purpose: what they get, and what we get.

A test is named after the number of the flaw in our list of them. The flawed rule is written out
here, small, so that the difference can be seen. Some of it is tested where it belongs instead:
5 (how tokens are drawn) in ``tests/rollout/test_sampling.py``,
8 (the reference of a trunk that is trained throughout) in ``tests/options/trunk/test_trunk.py``,
10 (data that is too small, in two sets at once, or cached) in ``tests/data``, 11 (a reward model
without a trained head) in ``tests/models/test_build.py``, 17 (resuming) in ``tests/runtime``.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from rlhf.algorithms.advantages import clip_scores, token_rewards
from rlhf.algorithms.kl import estimate_kl
from rlhf.algorithms.ppo import policy_loss
from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.base.errors import ConfigError
from rlhf.base.random_streams import Shuffle
from rlhf.base.types import Responses
from rlhf.config.batches import divide_exactly
from rlhf.data.collate import collate_prompts
from rlhf.data.encoding import Encoder
from rlhf.data.splits import apportion
from rlhf.engine.masters import Masters
from rlhf.models.build import build_actor, build_scorer, require_enough_positions
from rlhf.models.language_model import LanguageModel
from rlhf.models.output_layer import token_logprobs
from rlhf.options.average.models import MovingAverage
from rlhf.phases.shared.scoring import WholeSequences
from tests.algorithms import deepspeed_chat_loops as seeds
from tests.algorithms.padded_batches import assert_close, f64, keep_of, normal
from tests.models_on_disk import small_tokenizer, source_of

ROOT = Path(__file__).parents[2]
END = 1


def test_bug_01_the_reward_model_learns_the_ending_that_the_policy_samples() -> None:
    """Their later steps end texts with a literal that is several tokens of a Llama or OPT."""
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    encoder = Encoder(tokenizer)
    theirs = tokenizer("some words<|endoftext|>").input_ids
    ours = encoder.encode_texts_with_end(["some words"])[0]
    assert tokenizer.eos_token_id not in theirs
    assert len(theirs) > len(ours)
    assert ours[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ours[:-1]


def rollout_ids(pad_id: int) -> tuple[seeds.Experience, Tensor]:
    """A response of two words and an end token under a limit of four, and our mask of it."""
    ids = [[pad_id, 5, 6, 7, 8, END, pad_id]]  # the prompt is three wide
    flat = [[-1.0] * 6]
    return seeds.Experience(ids, 3, pad_id, flat, flat, [[0.0] * 6], [2.0]), keep_of([3], 4)


def test_bug_02_the_end_token_is_an_action_that_is_learned() -> None:
    """Where the padding is the end token, a mask read off the ids leaves the stopping out."""
    experience, keep_BT = rollout_ids(pad_id=END)
    theirs = experience.action_mask()[0][experience.start :]
    assert theirs == [1, 1, 0, 0]
    assert keep_BT[0].tolist() == [True, True, True, False]
    logprobs_BT = torch.full((1, 4), -1.0, requires_grad=True)
    advantages_BT = f64([1, 1, 1, 0]).float()
    for keep, slope_at_the_end in ((torch.tensor([theirs]).bool(), 0.0), (keep_BT, -1.0)):
        loss = policy_loss(logprobs_BT, logprobs_BT.detach(), advantages_BT, keep, cliprange=0.2)
        (slopes_BT,) = torch.autograd.grad(loss.loss, logprobs_BT)
        assert slopes_BT[0, 2] == slope_at_the_end


def test_bug_02_the_score_is_on_the_end_token_whatever_the_padding_is() -> None:
    """With a padding of its own, their late edition puts it on the padding after the end."""
    experience, keep_BT = rollout_ids(pad_id=0)
    theirs = seeds.compute_rewards(experience, late=True)[0][experience.start :]
    assert theirs == [0.0, 0.0, 0.0, 2.0]
    assert experience.action_mask()[0][experience.start :] == [1, 1, 1, 0]
    ours_BT = token_rewards(torch.zeros(1, 4), torch.tensor([2.0]), keep_BT, kl_ctl=0.1)
    assert ours_BT[0].tolist() == [0.0, 0.0, 2.0, 0.0]


def test_bug_03_old_logprobs_are_taken_without_dropout() -> None:
    """With it the ratio is not 1 before anything was learned."""
    model = build_actor(source_of("gpt2", dropout=0.3), small_tokenizer(), seed=0)
    ids_BS, keep = torch.arange(2, 8)[None], keep_of([5], 5)

    def ratio_max() -> float:
        with torch.no_grad():
            old, new = (
                token_logprobs(model(ids_BS).logits[:, :-1], ids_BS[:, 1:])[0] for _ in range(2)
            )
        return policy_loss(new, old, torch.ones_like(old), keep, cliprange=0.2).ratio_max.value()

    torch.manual_seed(0)
    model.train()
    assert abs(ratio_max() - 1.0) > 1e-3
    model.eval()
    assert ratio_max() == 1.0


def test_bug_04_left_padding_moves_no_position() -> None:
    """GPT-2 counts positions by column where it is given none."""
    model = build_actor(source_of("gpt2"), small_tokenizer(), seed=0).eval()
    # nearly equal position embeddings would hide the difference
    torch.nn.init.normal_(model.transformer.wpe.weight, generator=torch.Generator().manual_seed(0))
    prompts = collate_prompts(
        [[5], [3, 4, 5, 6]], ["", ""], torch.zeros(2, 2), pad_id=0, device=torch.device("cpu")
    )
    responses = Responses(torch.tensor([[6, 7], [7, 8]]), keep_of([2, 2], 2), keep_of([1, 1], 1))
    sequences = WholeSequences(prompts, responses)
    left_BS = torch.cat([prompts.ids_BP, responses.ids_BT], dim=1)
    attend_BS = torch.cat([prompts.attend_BP, responses.keep_BT], dim=1)
    with torch.no_grad():
        alone_SV = model(left_BS[:1, 3:]).logits[0].log_softmax(-1)
        expected = [alone_SV[0, 6].item(), alone_SV[1, 7].item()]
        inputs = {"input_ids": left_BS, "attention_mask": attend_BS.long()}
        theirs_BSV = model(**inputs, position_ids=torch.arange(6)[None]).logits.log_softmax(-1)
        ours_BT = sequences.scatter_logprobs(
            LanguageModel(model)(sequences.ids_BS, sequences.positions)
        ).logprobs_BT
    assert_close(ours_BT[0], expected, atol=1e-5)
    assert abs(theirs_BSV[0, 3, 6].item() - expected[0]) > 0.01
    row = theirs_BSV[1, [3, 4], [7, 8]]
    assert_close(ours_BT[1], row.tolist(), atol=1e-5)  # a row without padding is the same


def test_bug_06_a_short_response_stays_in_the_batch() -> None:
    """Dropping it leaves ranks with batches of different size, and hides the fault from PPO."""
    lengths = [[3, 1], [2, 4]]  # of the two ranks
    assert [sum(n > 1 for n in rank) for rank in lengths] == [1, 2]
    for rank in lengths:
        keep_BT = keep_of(rank, 4)
        ended_B = torch.tensor([n < 4 for n in rank])
        scores_B = clip_scores(f64(1, 1), ended_B, clip=5.0, missing_end_penalty=1.0)
        rewards_BT = token_rewards(torch.zeros(2, 4), scores_B.float(), keep_BT, kl_ctl=0.1)
        assert rewards_BT.sum(dim=1).tolist() == [1.0, 1.0 if rank[1] < 4 else 0.0]


def test_bug_07_the_moving_average_is_kept_in_fp32() -> None:
    """A bf16 number moves by 1/256 at the least: 0.8 % of a small change is rounded away."""
    weights = torch.full((4,), 1.25)
    theirs = torch.ones(4, dtype=torch.bfloat16)
    shard = torch.ones(4)
    ours = MovingAverage(Masters([shard], lambda: None), beta=0.992)
    shard.copy_(weights)
    for _ in range(100):
        theirs = torch.lerp(weights.bfloat16(), theirs, 0.992)
        ours.update()
    expected = 1.25 - 0.25 * 0.992**100  # 1.1380
    assert theirs.tolist() == [1.0] * 4
    with ours.swap_in():
        assert_close(shard, [expected] * 4, atol=1e-5)


@pytest.mark.parametrize(
    ("likely", "reference_likely", "kl", "theirs"),
    [
        # KL = 0.8 log 1.6 + 0.2 log 0.4; theirs 0.64 / 0.5 + 0.04 / 0.5 - 1 - KL
        (0.8, 0.5, 0.1927448, 0.1672552),
        # KL = 0.98 log 99; theirs 0.9801 / 0.01 + 0.0001 / 0.99 - 1 - KL
        (0.99, 0.01, 4.5032175, 92.5068836),
    ],
)
def test_bug_08_k3_estimates_the_kl_that_is_meant(
    likely: float, reference_likely: float, kl: float, theirs: float
) -> None:
    """Over two tokens the expectation is exact: theirs is a chi-square less the KL."""
    p_V, q_V = f64(likely, 1 - likely), f64(reference_likely, 1 - reference_likely)
    difference_V = p_V.log() - q_V.log()
    assert_close((p_V * (difference_V.exp() - 1 - difference_V)).sum(), theirs, atol=1e-6)
    for estimator in ("k1", "k3"):
        ours_V = estimate_kl(p_V.log(), q_V.log(), estimator=estimator)
        assert_close((p_V * ours_V).sum(), kl, atol=1e-7)


def test_bug_09_a_logged_loss_does_not_grow_with_the_number_of_micro_batches() -> None:
    """Theirs sums the means of the micro-batches; halves of unequal length skew even their mean."""
    old_BT, keep_BT = -1 - normal(4, 6, seed=0).abs(), keep_of([6, 5, 1, 2], 6)
    new_BT, advantages_BT = old_BT + 0.1 * normal(4, 6, seed=1), normal(4, 6, seed=2)

    def loss_of(rows: slice) -> object:
        inputs = (x[rows] for x in (new_BT, old_BT, advantages_BT, keep_BT))
        return policy_loss(*inputs, cliprange=0.2).actor_loss

    whole, first, second = loss_of(slice(0, 4)), loss_of(slice(0, 2)), loss_of(slice(2, 4))
    theirs = first.value() + second.value()
    assert abs(theirs - whole.value()) > 0.01
    assert abs(theirs / 2 - whole.value()) > 0.01
    assert (first + second).value() == pytest.approx(whole.value(), abs=1e-12)


def their_boundaries(total: int, proportions: list[float]) -> list[int]:
    """Rounded cumulative shares, the surplus taken from every boundary but the first."""
    boundaries = [0]
    for proportion in proportions:
        boundaries.append(boundaries[-1] + round(total * proportion / sum(proportions)))
    surplus = boundaries[-1] - total
    return [0, *(boundary - surplus for boundary in boundaries[1:])]


@pytest.mark.parametrize(
    ("total", "boundaries", "phase_1", "sizes"),
    [
        (7, [0, -1, 3, 7], 6, [0, 4, 3]),  # 3.5 rounds to 4 twice; [0:-1] is nearly everything
        (5, [0, 1, 3, 5], 1, [0, 3, 2]),  # 2.5 rounds to 2 twice: a row for a phase of share 0
        (6, [0, 0, 3, 6], 0, [0, 3, 3]),
    ],
)
def test_bug_10_a_share_of_0_gets_nothing_and_no_record_is_in_two_phases(
    total: int, boundaries: list[int], phase_1: int, sizes: list[int]
) -> None:
    assert their_boundaries(total, [0, 5, 5]) == boundaries
    assert len(range(total)[boundaries[0] : boundaries[1]]) == phase_1
    assert apportion(total, [0, 5, 5]) == sizes


def test_bug_12_losses_are_taken_in_fp32_for_every_model() -> None:
    """A ratio of bf16 log-probabilities is 1 or jumps; a bf16 critic hands on fp32."""
    logits_BTV = torch.zeros(1, 1, 2000, dtype=torch.bfloat16)
    moved_BTV = logits_BTV.clone()
    moved_BTV[..., 0] = 0.02
    ids_BT, one = torch.zeros(1, 1, dtype=torch.long), keep_of([1], 1)
    theirs = [x.log_softmax(-1)[..., 0].float() for x in (moved_BTV, logits_BTV)]
    ours = [token_logprobs(x, ids_BT).logprobs_N for x in (moved_BTV, logits_BTV)]
    ratios = [
        policy_loss(*pair, torch.ones(1, 1), one, cliprange=0.2).ratio_max.value()
        for pair in (theirs, ours)
    ]
    assert abs(ratios[0] - math.exp(0.02)) > 0.01
    assert ratios[1] == pytest.approx(math.exp(0.02), abs=1e-3)
    critic = build_scorer(source_of("llama"), small_tokenizer(), seed=0).bfloat16()
    assert critic(ids_BT.expand(1, 3)).dtype == torch.float32


def test_bug_13_the_schedule_ends_with_the_last_update() -> None:
    """Rollouts of 10 in parts of 4 are three updates, not 2.5; ours have to divide."""
    rollouts = 10
    updates = rollouts * math.ceil(10 / 4)
    theirs = build_lr_schedule(
        "cosine", warmup_steps=0, total_steps=int(rollouts * 10 / 4), min_ratio=0.0
    )
    assert [theirs(step) for step in range(updates - 6, updates)] == pytest.approx([0.0] * 6)
    with pytest.raises(ConfigError, match="rollout=10: must be a multiple of mini_batch=4"):
        divide_exactly(10, 4, total_key="rollout", part_key="mini_batch")
    updates = rollouts * divide_exactly(12, 4, total_key="rollout", part_key="mini_batch")
    ours = build_lr_schedule("cosine", warmup_steps=0, total_steps=updates, min_ratio=0.0)
    assert ours(updates - 2) > 0.0
    assert ours(updates - 1) == pytest.approx(0.0)


def test_bug_14_every_epoch_has_an_order_of_its_own() -> None:
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0, seed=1)
    assert list(sampler) == list(sampler)  # without set_epoch
    ours = Shuffle(8, seed=1)
    first, second = ours.batch_indices(0, 8), ours.batch_indices(1, 8)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_bug_15_nothing_ends_processes_by_name() -> None:
    """Their sweep scripts end every python process of the machine."""
    sources = [ROOT / "Makefile", *(ROOT / "rlhf").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    pattern = re.compile(r"\b(pkill|killall)\b")
    assert pattern.search("pkill -9 python")
    assert not [path for path in sources if pattern.search(path.read_text("utf-8"))]


def test_bug_16_prompt_and_response_must_fit_the_model() -> None:
    """Their generation buffer may be too short for both, and nothing says so beforehand."""
    model = build_actor(
        source_of("opt", fields={"max_position_embeddings": 16}), small_tokenizer(), seed=0
    )
    require_enough_positions(model, 10 + 6, key="model", wanted="prompt + response")
    with pytest.raises(ConfigError, match="prompt \\+ response"):
        require_enough_positions(model, 10 + 7, key="model", wanted="prompt + response")
