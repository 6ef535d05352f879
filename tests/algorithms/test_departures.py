"""Where we depart from DeepSpeed-Chat and trlx on purpose: what they get, and what we get.

A test is named after the number of the flaw in ``tests/parity.yaml``, which names the tests of the
other flaws. The flawed rule is written out here, small, so that the difference can be seen.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf.algorithms.advantages import token_rewards
from rlhf.algorithms.ppo import policy_loss
from rlhf.base.types import Responses
from rlhf.data.collate import collate_prompts
from rlhf.data.encoding import Encoder
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.language_model import LanguageModel
from rlhf.models.output_layer import token_logprobs
from rlhf.phases.shared.scoring import WholeSequences
from tests.algorithms import deepspeed_chat_loops as seeds
from tests.algorithms.padded_batches import assert_close, f64, keep_of
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
    theirs = seeds.compute_rewards(experience)[0][experience.start :]
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


def test_bug_15_nothing_ends_processes_by_name() -> None:
    """Their sweep scripts end every python process of the machine."""
    sources = [ROOT / "Makefile", *(ROOT / "rlhf").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    pattern = re.compile(r"\b(pkill|killall)\b")
    assert pattern.search("pkill -9 python")
    assert not [path for path in sources if pattern.search(path.read_text("utf-8"))]
