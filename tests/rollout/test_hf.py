"""Responses of generate: ends that must wait, and stop texts, against a free run's tokens."""

from dataclasses import replace

import pytest
import torch

from rlhf.base.types import PromptBatch, Responses
from rlhf.data.collate import collate_prompts
from rlhf.models.tokenizers import train_tokenizer
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, StopTexts, draw_tokens
from tests.plain_engine import PlainEngine
from tests.rollout.decoder_checks import VOCABULARY, some_prompts, tiny_model

ROWS, MAX_TOKENS = 12, 10
SAMPLING = SamplingSettings(max_tokens=MAX_TOKENS, temperature=1.0, top_k=0, top_p=1.0)
TOKENIZER = train_tokenizer(["words"], vocab_size=260)  # the first tokens are one byte each
NEVER = VOCABULARY  # no token of the model


@pytest.fixture(scope="module")
def actor() -> PlainEngine:
    return PlainEngine(tiny_model("llama"))


@pytest.fixture(scope="module")
def prompts() -> PromptBatch:
    ids = some_prompts((5, 1, 9) * (ROWS // 3))
    draws = torch.rand(ROWS, MAX_TOKENS, generator=torch.Generator().manual_seed(0))
    return collate_prompts(ids, [""] * ROWS, draws, pad_id=0, device=torch.device("cpu"))


def generate(
    actor: PlainEngine,
    prompts: PromptBatch,
    *,
    end_ids: tuple[int, ...] = (NEVER,),
    min_tokens: int = 0,
    stop: tuple[str, ...] = (),
) -> Responses:
    sampling = replace(SAMPLING, min_tokens=min_tokens)
    actor.module.generation_config.eos_token_id = list(end_ids)
    backend = HfRollout(sampling, pad_id=0, stop=StopTexts(TOKENIZER, stop))
    return backend.generate(actor, prompts)


@pytest.fixture(scope="module")
def free(actor: PlainEngine, prompts: PromptBatch) -> list[list[int]]:
    """Responses that nothing ends."""
    responses = generate(actor, prompts)
    assert not responses.ended_B.any()
    return responses.ids_BT.tolist()


def kept(responses: Responses) -> list[list[int]]:
    rows = zip(responses.ids_BT, responses.keep_BT, strict=True)
    return [ids_T[keep_T].tolist() for ids_T, keep_T in rows]


@torch.no_grad()
def test_the_end_token_waits_for_min_tokens(
    actor: PlainEngine, prompts: PromptBatch, free: list[list[int]]
) -> None:
    end_ids = free[0][1], free[1][2]  # row 0 would end with its second token, row 1 with its third
    assert [len(ids) for ids in kept(generate(actor, prompts, end_ids=end_ids))[:2]] == [2, 3]
    responses = generate(actor, prompts, end_ids=end_ids, min_tokens=4)
    attended = zip(prompts.ids_BP, prompts.attend_BP, strict=True)
    prompt_ids = [ids_P[attend_P].tolist() for ids_P, attend_P in attended]
    for row, response in enumerate(kept(responses)):
        assert len(response) >= 4
        for step, token in enumerate(response):
            logits = actor.module(torch.tensor([prompt_ids[row] + response[:step]])).logits[:, -1]
            if step < 4:
                logits[:, end_ids] = -torch.inf
            draw = prompts.draws_BT[row, step][None]
            assert draw_tokens(logits, draw, SAMPLING).tokens_B.item() == token
    assert responses.ended_B.any()


def test_stop_texts_end_responses_right_behind_them(
    actor: PlainEngine, prompts: PromptBatch, free: list[list[int]]
) -> None:
    stops = (TOKENIZER.decode(free[1][2:4]), TOKENIZER.decode(free[2][:1]))
    end_id = free[3][5]
    responses = generate(actor, prompts, end_ids=(end_id,), stop=stops)
    expected, ended = [], []
    for ids in free:
        ends = [
            n
            for n in range(1, MAX_TOKENS + 1)
            if ids[n - 1] == end_id or any(text in TOKENIZER.decode(ids[:n]) for text in stops)
        ]
        expected.append(ids[: ends[0]] if ends else ids)
        ended.append(bool(ends))
    assert kept(responses) == expected
    assert responses.ended_B.tolist() == ended
    assert (responses.ids_BT[~responses.keep_BT] == 0).all()
    lengths = {len(ids) for ids in expected}
    assert {1, 4} <= lengths
    assert len(lengths) > 3
    assert not all(ended)
