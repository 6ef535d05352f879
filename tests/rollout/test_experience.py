"""Responses and what the models think of them, against plain computation on unpadded sequences."""

from __future__ import annotations

import pytest
import torch

from rlhf.data.collate import collate_prompts
from rlhf.models.building import ModelSource, build_actor, build_scorer
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.ppo_models import SeparateModels
from rlhf.rollout.experience import collect
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, draw_tokens
from rlhf.types import PromptBatch, Rollout, take_rows
from tests.plain_engine import PlainEngine

ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.5,  # far from uniform, so that a wrong token shows
}
TEMPERATURE = 0.8
MAX_TOKENS = 6
SAMPLING = SamplingSettings(max_tokens=MAX_TOKENS, temperature=TEMPERATURE, top_k=0, top_p=1.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models() -> SeparateModels:
    tokenizer = train_tokenizer(["words"], vocab_size=260)
    source = ModelSource(key="model", path=None, architecture=ARCHITECTURE)
    actors = [PlainEngine(build_actor(source, tokenizer, seed=seed)) for seed in (1, 2)]
    scorers = [PlainEngine(build_scorer(source, tokenizer, seed=seed)) for seed in (3, 4)]
    return SeparateModels(*actors, *scorers, temperature=TEMPERATURE)


@pytest.fixture(scope="module")
def prompts() -> PromptBatch:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 258, (n,), generator=generator).tolist() for n in (3, 7, 1, 5)]
    draws = torch.rand(4, MAX_TOKENS, generator=generator)
    return collate_prompts(ids, list("abcd"), draws, pad_id=0, device=CPU)


def rollout_of(
    models: SeparateModels, prompts: PromptBatch, *, end_id: int, micro: int = 4
) -> Rollout:
    backend = HfRollout(SAMPLING, end_id=end_id, pad_id=0)
    responses = backend.generate(models.actor, prompts)
    return collect(models.opinions, prompts, responses, micro_batch_size=micro)


@pytest.fixture(scope="module")
def rollout(models: SeparateModels, prompts: PromptBatch) -> Rollout:
    # The end token is one that row 1 samples third, so that one response ends early.
    free = rollout_of(models, prompts, end_id=1)
    return rollout_of(models, prompts, end_id=int(free.responses.ids_BT[1, 2]))


def unpadded(rollout: Rollout, row: int) -> tuple[list[int], list[int]]:
    prompt = rollout.prompts.ids_BP[row][rollout.prompts.attend_BP[row]].tolist()
    response = rollout.responses.ids_BT[row][rollout.responses.keep_BT[row]].tolist()
    return prompt, response


def test_a_response_keeps_its_end_token_and_nothing_behind_it(rollout: Rollout) -> None:
    keep, ended = rollout.responses.keep_BT, rollout.responses.ended_B
    assert ended[1]
    assert keep[1].tolist() == [True] * 3 + [False] * 3
    assert (rollout.responses.ids_BT[1, 3:] == 0).all()
    for row in range(4):
        if not ended[row]:
            assert keep[row].all(), "a response that never ended keeps all its tokens"


def test_tokens_are_where_their_draws_fall(models: SeparateModels, rollout: Rollout) -> None:
    for row in range(4):
        prompt, response = unpadded(rollout, row)
        for step, token in enumerate(response):
            ids = torch.tensor([prompt + response[:step]])
            with torch.no_grad():
                logits = models.actor.module(ids).logits[:, -1]
            draw = rollout.prompts.draws_BT[row, step][None]
            assert draw_tokens(logits, draw, SAMPLING).item() == token


def test_logprobs_values_and_scores_are_those_of_each_sequence_alone(
    models: SeparateModels, rollout: Rollout
) -> None:
    for row in range(4):
        prompt, response = unpadded(rollout, row)
        ids = torch.tensor([prompt + response])
        places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)  # where each token is predicted
        with torch.no_grad():
            for model, name in (
                (models.actor, "logprobs"),
                (models.reference, "reference_logprobs"),
            ):
                logits = model.module(ids).logits[0, places] / TEMPERATURE
                expected = logits.log_softmax(-1)[torch.arange(len(response)), response]
                got = getattr(rollout, f"{name}_BT")[row, : len(response)]
                torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            critic, reward = models.critic.module.pretrained, models.reward.module.pretrained
            values = critic.score(critic.model(ids).last_hidden_state)[0, places, 0]
            score = reward(ids).logits[0, 0]
        got = rollout.values_BT[row, : len(response)]
        torch.testing.assert_close(got, values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(rollout.scores_B[row], score, atol=1e-5, rtol=1e-5)


def test_neighbours_and_micro_batches_change_nothing(
    models: SeparateModels, prompts: PromptBatch, rollout: Rollout
) -> None:
    end_id = int(rollout.responses.ids_BT[1, 2])
    for rows in ([1], [2, 0], [3, 2, 1, 0]):
        part = rollout_of(models, take_rows(prompts, rows), end_id=end_id, micro=1)
        width = part.logprobs_BT.shape[1]
        keep = part.responses.keep_BT
        assert torch.equal(keep, rollout.responses.keep_BT[rows][:, :width])
        for name in ("logprobs_BT", "values_BT"):
            got, expected = getattr(part, name), getattr(rollout, name)[rows][:, :width]
            torch.testing.assert_close(got[keep], expected[keep], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.scores_B, rollout.scores_B[rows], atol=1e-5, rtol=1e-5)


def test_the_checkpoint_own_generation_settings_do_not_bend_the_policy(
    models: SeparateModels, prompts: PromptBatch
) -> None:
    plain = rollout_of(models, prompts, end_id=1)
    own = models.actor.module.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size = 5.0, 1
    try:
        bent = rollout_of(models, prompts, end_id=1)
    finally:
        own.repetition_penalty, own.no_repeat_ngram_size = None, None
    assert torch.equal(bent.responses.ids_BT, plain.responses.ids_BT)
    assert models.actor.module.generation_config is own
