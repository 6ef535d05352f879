"""The fast rollout as PPO uses it, against Hugging Face's generate and plain forward passes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.base.types import PromptBatch, Responses
from rlhf.config.choices import When
from rlhf.data.collate import collate_prompts
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.language_model import LanguageModel
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options.lora.keys import LoraConfig
from rlhf.rollout.fast import FastRollout, spare_bytes
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from tests.architectures import sizes
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import disturb
from tests.plain_engine import PlainEngine
from tests.rollout.decoder_checks import fast_rollout
from tests.rounding import assert_near, terms_of

TOKENIZER = train_tokenizer(["words to learn from"], vocab_size=260)
END, TOKENS = 7, 9
ARCHITECTURE = sizes("qwen3", 32, 48, heads=4, num_key_value_heads=2, head_dim=8)
ARCHITECTURE |= {"initializer_range": 0.5}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}


def actor_of(
    architecture: dict[str, Any], lora: LoraConfig | None = None, ends: int | list[int] = END
) -> PlainEngine:
    source = ModelSource(key="model", path=None, architecture=architecture)
    model = build_actor(source, TOKENIZER, seed=1, extensions=adding(lora))
    model.generation_config.eos_token_id = ends
    return PlainEngine(LanguageModel(model))


def prompts_of(lengths: list[int], *, seed: int = 0) -> PromptBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(8, 258, (n,), generator=generator).tolist() for n in lengths]
    draws_BT = torch.rand(len(ids), TOKENS, generator=generator)
    return collate_prompts(ids, [""] * len(ids), draws_BT, pad_id=0, device=torch.device("cpu"))


def settings(**changes: Any) -> SamplingSettings:
    plain = {"max_tokens": TOKENS, "temperature": 0.9, "top_k": 0, "top_p": 1.0}
    return SamplingSettings(**(plain | changes))


def fast(sampling: SamplingSettings, *, stop: Sequence[str] = (), **settings: Any) -> FastRollout:
    return fast_rollout(sampling, stop=StopTexts(TOKENIZER, stop), cuda_graphs=True, **settings)


def by_generate(
    sampling: SamplingSettings,
    actor: PlainEngine,
    prompts: PromptBatch,
    stop: Sequence[str] = (),
) -> Responses:
    texts = StopTexts(TOKENIZER, stop)
    return HfRollout(sampling, pad_id=0, stop=texts).generate(actor, prompts)


def assert_same(first: Responses, second: Responses) -> None:
    assert torch.equal(first.ids_BT, second.ids_BT)
    assert torch.equal(first.keep_BT, second.keep_BT)
    assert torch.equal(first.ended_B, second.ended_B)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "max_rows"), [(ARCHITECTURE, 2), (GPT2, None)], ids=["qwen3", "gpt2"]
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.3, "min_tokens": 4}],
    ids=["plain", "greedy", "top-k", "top-p", "min-p and min-tokens"],
)
def test_the_same_draws_give_the_tokens_of_generate(
    architecture: dict[str, Any], changes: dict[str, Any], max_rows: int | None
) -> None:
    actor, prompts = actor_of(architecture), prompts_of([3, 8, 1, 5, 5, 2, 11])
    sampling = settings(**changes)
    responses = fast(sampling, max_rows=max_rows).generate(actor, prompts)
    assert_same(responses, by_generate(sampling, actor, prompts))


@pytest.mark.parametrize("architecture", [ARCHITECTURE, GPT2], ids=["qwen3", "gpt2"])
@pytest.mark.parametrize("changes", [{}, {"min_tokens": 3}], ids=["plain", "min-tokens"])
def test_every_end_token_ends_a_response(
    architecture: dict[str, Any], changes: dict[str, Any]
) -> None:
    ends = [END, *range(30, 60)]
    actor, prompts = actor_of(architecture, ends=ends), prompts_of([3, 8, 1] * 8)
    responses = fast(settings(**changes)).generate(actor, prompts)
    assert_same(responses, by_generate(settings(**changes), actor, prompts))
    last = responses.ids_BT[range(24), responses.keep_BT.sum(dim=1) - 1]
    assert torch.equal(responses.ended_B, torch.isin(last, torch.tensor(ends)))
    assert len(set(last[responses.ended_B].tolist())) > 2


def test_logprobs_are_those_of_a_forward_pass() -> None:
    actor, prompts = actor_of(ARCHITECTURE), prompts_of([3, 8, 1])
    responses = fast(settings(top_k=20)).generate(actor, prompts)
    assert responses.logprobs_BT is not None
    model: Any = actor.module.pretrained
    for row in range(3):
        prompt = prompts.ids_BP[row][prompts.attend_BP[row]]
        response = responses.ids_BT[row][responses.keep_BT[row]]
        with torch.no_grad():
            logits_SV = model(torch.cat([prompt, response])[None]).logits[0] / 0.9
        expected_T = logits_SV[len(prompt) - 1 : -1].log_softmax(-1).gather(1, response[:, None])
        got_T = responses.logprobs_BT[row][: len(response)]
        terms = terms_of(model, len(prompt) + len(response)) + logits_SV.shape[1]
        assert_near(got_T, expected_T[:, 0], terms=terms)
        assert not responses.logprobs_BT[row][len(response) :].any()


def test_it_follows_the_weights_as_they_change() -> None:
    actor, prompts, backend = actor_of(ARCHITECTURE), prompts_of([3, 8, 1, 4]), fast(settings())
    before = backend.generate(actor, prompts)
    for step in range(3):
        disturb(actor.module, seed=step, size=0.1)
        responses = backend.generate(actor, prompts)
        assert_same(responses, by_generate(settings(), actor, prompts))
    assert not torch.equal(before.ids_BT, responses.ids_BT[:, : before.ids_BT.shape[1]])


@pytest.mark.parametrize("architecture", [ARCHITECTURE, GPT2], ids=["qwen3", "gpt2"])
def test_adapters_are_merged_for_the_rollout_and_left_as_they_were(
    architecture: dict[str, Any],
) -> None:
    lora = lora_config(rank=3, alpha=6.0)
    actor, prompts = actor_of(architecture, lora), prompts_of([3, 8, 1, 4])
    disturb(actor.module)
    weights = {name: w.clone() for name, w in actor.module.state_dict().items()}
    responses = fast(settings()).generate(actor, prompts)
    assert_same(responses, by_generate(settings(), actor, prompts))
    assert all(torch.equal(w, weights[name]) for name, w in actor.module.state_dict().items())


def test_stop_texts_end_a_response() -> None:
    actor, prompts = actor_of(ARCHITECTURE), prompts_of([4] * 20)
    free = fast(settings()).generate(actor, prompts)
    text = TOKENIZER.decode(free.ids_BT[3, 2:4].tolist())
    responses = fast(settings(), stop=[text]).generate(actor, prompts)
    assert_same(responses, by_generate(settings(), actor, prompts, stop=[text]))
    assert responses.ended_B[3]
    assert int(responses.keep_BT[3].sum()) <= 4


def test_limits_cap_each_response() -> None:
    actor, prompts = actor_of(ARCHITECTURE), prompts_of([4, 4, 4])
    responses = fast(settings(min_tokens=TOKENS)).generate(actor, prompts, limits=[1, 5, 3])
    assert responses.keep_BT.sum(dim=1).tolist() == [1, 5, 3]
    assert not responses.ended_B.any()


def test_a_response_goes_on_from_its_first_tokens_as_it_did() -> None:
    actor, prompts = actor_of(ARCHITECTURE), prompts_of([4, 6, 1, 5, 5])
    text = TOKENIZER.decode(fast(settings()).generate(actor, prompts).ids_BT[0, 2:4].tolist())
    backend = fast(settings(min_tokens=3), stop=[text], max_rows=2)
    whole = backend.generate(actor, prompts)
    places = [(int(n) - 1) * row // 4 for row, n in enumerate(whole.keep_BT.sum(dim=1))]
    assert len(set(places)) > 2
    prefixes = [ids[:place].tolist() for ids, place in zip(whole.ids_BT, places, strict=True)]
    again = backend.generate(actor, prompts, prefixes=prefixes)
    assert_same(again, whole)
    assert whole.logprobs_BT is not None
    for row, place in enumerate(places):
        assert not again.logprobs_BT[row, :place].any()
        torch.testing.assert_close(again.logprobs_BT[row, place:], whole.logprobs_BT[row, place:])


class Sharded(PlainEngine):
    """Says that its weights are shards, and counts how often they were gathered."""

    is_sharded = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.gathered_modules: list[nn.Module] = []

    def gather_parameters(self, module: nn.Module) -> Any:
        self.gathered_modules.append(module)
        return super().gather_parameters(module)


def test_what_torch_keeps_for_later_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a training step nearly all of a GPU is used or kept, and little of it is in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 800)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 250)
    assert spare_bytes(torch.device("cuda", 0)) == 650


@pytest.mark.parametrize(("choice", "times"), [("auto", 1), ("always", 1), ("never", 0)])
def test_sharded_weights_are_gathered_once_or_layer_by_layer(choice: str, times: int) -> None:
    actor, prompts = Sharded(actor_of(ARCHITECTURE).module), prompts_of([3, 8])
    backend = fast(settings(), gather_weights=When(choice))
    responses = backend.generate(actor, prompts)
    assert len(actor.gathered_modules) == times
    plain = PlainEngine(actor.module)
    assert_same(responses, by_generate(settings(), plain, prompts))
