"""Responses and what the models think of them, against plain computation on unpadded sequences."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.base.errors import RewardError
from rlhf.base.types import PromptBatch, Responses, Rollout
from rlhf.data.collate import collate_prompts
from rlhf.data.synthetic import prompt_of_request
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.shared.scoring import (
    JudgeScores,
    ModelOutputs,
    ModelScores,
    ResponseScores,
    WholeSequences,
    score_responses,
)
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from tests.phases.ppo.ppo_pieces import TEMPERATURE, TOKENIZER, separate_engine
from tests.plain_engine import PlainEngine
from tests.pretend_cuda.gpu import Event, Gpu
from tests.rounding import assert_near, terms_of

MAX_TOKENS = 6
SAMPLING = SamplingSettings(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, top_k=0, top_p=1.0)
CPU = torch.device("cpu")
WAITS = (Event.sync, Event.to_device, Event.to_host)


@pytest.fixture(scope="module")
def models() -> SeparateModels:
    return separate_engine().models


@pytest.fixture(scope="module")
def prompts() -> PromptBatch:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (3, 7, 1, 5)]
    draws = torch.rand(4, MAX_TOKENS, generator=generator)
    return collate_prompts(ids, list("abcd"), draws, pad_id=0, device=CPU)


def rollout_of(models: SeparateModels, prompts: PromptBatch, *, end_id: int) -> Rollout:
    models.actor.module.pretrained.generation_config.eos_token_id = end_id
    backend = HfRollout(SAMPLING, pad_id=0, stop=StopTexts(TOKENIZER, []))
    responses = backend.generate(models.actor, prompts)
    return score_responses(models, prompts, responses, micro_batch_size=4)


@pytest.fixture(scope="module")
def rollout(models: SeparateModels, prompts: PromptBatch) -> Rollout:
    # The end token is one that row 1 samples third, so that one response ends early.
    free = rollout_of(models, prompts, end_id=1)
    return rollout_of(models, prompts, end_id=int(free.responses.ids_BT[1, 2]))


def terms_of_scores(models: SeparateModels) -> int:
    """The terms of the sums in a log-probability of the longest sequence, an upper bound."""
    return terms_of(models.actor.module, 7 + MAX_TOKENS) + len(TOKENIZER)


def unpadded(rollout: Rollout, row: int) -> tuple[list[int], list[int]]:
    prompt = rollout.prompts.ids_BP[row][rollout.prompts.attend_BP[row]].tolist()
    response = rollout.responses.ids_BT[row][rollout.responses.keep_BT[row]].tolist()
    return prompt, response


def test_logprobs_values_and_scores_are_those_of_each_sequence_alone(
    models: SeparateModels, rollout: Rollout
) -> None:
    terms = terms_of_scores(models)
    for row in range(4):
        prompt, response = unpadded(rollout, row)
        ids = torch.tensor([prompt + response])
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)  # where each token is predicted
        with torch.no_grad():
            for model, name in (
                (models.actor, "logprobs"),
                (models.reference, "reference_logprobs"),
            ):
                logits = model.module.pretrained(ids).logits[0, places] / TEMPERATURE
                expected = logits.log_softmax(-1)[torch.arange(len(response)), response]
                got = getattr(rollout, f"{name}_BT")[row, : len(response)]
                assert_near(got, expected, terms=terms)
            critic, reward = models.critic.module.pretrained, models.scores.model.module.pretrained
            values = critic.score(critic.model(ids).last_hidden_state)[0, places, 0]
            score = reward(ids).logits[0, 0]
        got = rollout.values_BT[row, : len(response)]
        assert_near(got, values, terms=terms)
        assert not rollout.values_BT[row, len(response) :].any()
        assert_near(rollout.scores_B[row], score, terms=terms)


def test_scores_that_are_not_finite_end_the_run(
    models: SeparateModels, prompts: PromptBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (float("nan"), float("inf"), -1e16):
        monkeypatch.setattr(
            models,
            "scores",
            lambda batch, v=value: ResponseScores(torch.full((len(batch.ids_BS),), v)),
        )
        with pytest.raises(RewardError, match=r"the reward model failed in PPO step 3: .* 4 resp"):
            rollout_of(models, prompts._replace(step=3), end_id=1)


def test_a_judge_scores_the_text_of_each_response() -> None:
    prompt = prompt_of_request("Repeat this: boat fig.")
    texts = [" Sure! boat fig.", " boat fig.", " fig.", " boat fig."]
    ended = [True, True, True, False]
    rows = [
        TOKENIZER.encode(text) + [TOKENIZER.eos_token_id] * end
        for text, end in zip(texts, ended, strict=True)
    ]
    length = max(map(len, rows))
    ids_BT = torch.tensor([row + [TOKENIZER.pad_token_id] * (length - len(row)) for row in rows])
    keep_BT = torch.tensor([[place < len(row) for place in range(length)] for row in rows])
    prompts = collate_prompts([[5]] * 4, [prompt] * 4, torch.zeros(4, length), pad_id=0, device=CPU)
    responses = Responses(ids_BT, keep_BT, torch.tensor(ended))
    scores_B, _ = JudgeScores(GoldJudge(), TOKENIZER)(WholeSequences(prompts, responses))
    torch.testing.assert_close(scores_B, torch.tensor([1.0, 0.904, 0.0, 0.784]))


def test_neighbours_are_of_like_length_and_come_back_in_order(
    models: SeparateModels, rollout: Rollout
) -> None:
    widths: list[int] = []

    class Recorded:
        rewards = None

        def score(self, sequences: WholeSequences, *, with_policy: bool = True) -> ModelOutputs:
            widths.append(sequences.ids_BS.shape[1])
            return models.score(sequences)

    again = score_responses(Recorded(), rollout.prompts, rollout.responses, micro_batch_size=2)
    lengths = [3 + 6, 7 + 3, 1 + 6, 5 + 6]
    kept = rollout.responses.keep_BT.sum(dim=1)
    assert (rollout.prompts.attend_BP.sum(dim=1) + kept).tolist() == lengths
    assert widths == [11, 9]  # rows 3 and 1, then 0 and 2
    terms = terms_of_scores(models)
    for name in ("logprobs_BT", "reference_logprobs_BT", "values_BT", "scores_B"):
        got, expected = getattr(again, name), getattr(rollout, name)
        assert_near(got, expected, terms=terms)


def to_gpu(batch: Any) -> Any:
    """Return the named tuple ``batch`` with its tensors on the GPU."""
    return type(batch)(*(x.to("cuda") if isinstance(x, Tensor) else x for x in batch))


def test_no_pass_waits_for_the_pass_before(
    models: SeparateModels, prompts: PromptBatch, rollout: Rollout, gpu: Gpu
) -> None:
    """The host joins the sequences of all micro-batches, and then launches pass after pass."""
    engines = (models.actor, models.reference, models.critic, models.scores.model)
    *others, reward = (PlainEngine(deepcopy(each.module).to("cuda")) for each in engines)
    copied = SeparateModels(*others, ModelScores(reward), temperature=TEMPERATURE)
    waits: list[int] = []

    def score(*args: Any, **options: Any) -> ModelOutputs:
        def note() -> None:
            waits.append(sum(counts.events[each] for each in WAITS))

        note()
        outputs = SeparateModels.score(copied, *args, **options)
        note()
        return outputs

    scored_by = SimpleNamespace(score=score, rewards=None)
    with gpu.counting() as counts:
        found = score_responses(
            scored_by, to_gpu(prompts), to_gpu(rollout.responses), micro_batch_size=2
        )
    assert len(waits) == 2 * 2
    assert len(set(waits)) == 1, counts.lines(Event.sync)
    assert_near(found.scores_B.cpu(), rollout.scores_B, terms=terms_of_scores(models))


def test_a_loss_does_not_wait_for_the_gpu(rollout: Rollout, gpu: Gpu) -> None:
    sequences = WholeSequences(*map(to_gpu, (rollout.prompts, rollout.responses)))
    numbers_N = torch.arange(1.0, len(sequences.positions.ids_N) + 1, device="cuda")
    numbers_N.requires_grad_(requires_grad=True)
    with gpu.counting() as counts:
        found_BT = sequences.scatter(numbers_N)
        found_BT.square().sum().backward()
    assert counts.events[Event.sync] == 0
    keep_BT = rollout.responses.keep_BT
    assert torch.equal(found_BT.cpu()[keep_BT], numbers_N.cpu())
    assert not found_BT.cpu()[~keep_BT].any()
    assert torch.equal(numbers_N.grad.cpu(), 2 * numbers_N.detach().cpu())
