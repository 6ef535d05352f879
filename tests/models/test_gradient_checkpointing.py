"""The same gradients from layers that are run twice, and no cache lost in sampling."""

import logging
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from rlhf.base.errors import CapabilityError
from rlhf.config.freeze import to_run_config
from rlhf.models.build import ModelSource, build_actor, build_scorer
from tests.conftest import Compose
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import FAMILIES, disturb, some_ids, source_of

IDS = some_ids()
ATTEND = torch.ones_like(IDS, dtype=torch.bool)
LORA = lora_config()


@pytest.fixture
def no_noise():
    """Fail on anything that transformers says."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    transformers_logging.warning_once.cache_clear()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not lines


def count_attention(model: nn.Module) -> Counter[str]:
    """Counts the calls of every attention module: hooks on blocks would miss a second run."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


def gradients(model: nn.Module, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs.float().square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "lora"), [*((family, None) for family in FAMILIES), ("llama", LORA)]
)
def test_gradients_are_the_same_and_layers_run_twice(family, lora, tokenizer, no_noise) -> None:
    """Of all layers, or of the first ones."""
    grads = []
    for layers in (False, True, 1):
        source = source_of(family, gradient_checkpointing=layers)
        actor = build_actor(source, tokenizer, seed=1, extensions=adding(lora)).train()
        scorer = build_scorer(source, tokenizer, seed=1, extensions=adding(lora)).train()
        disturb(actor)
        disturb(scorer)
        calls = [count_attention(model) for model in (actor, scorer)]
        of_actor = gradients(actor, actor(IDS, use_cache=False).logits)
        grads.append([of_actor, gradients(scorer, scorer(IDS))])
        for count in calls:
            again = 2 if layers is True else int(layers)
            assert sorted(count.values()) == sorted(1 + (place < again) for place in range(2))
    plain, *checkpointed = grads
    for found in checkpointed:
        torch.testing.assert_close(found, plain)
    assert all(any(gradient.any() for gradient in each.values()) for each in plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_still_uses_the_cache(family, tokenizer, no_noise) -> None:
    texts = []
    for is_on in (False, True):
        source = source_of(family, gradient_checkpointing=is_on)
        actor = build_actor(source, tokenizer, seed=1).train().eval()
        first = next(m for n, m in actor.named_modules() if n.endswith((".0.mlp", ".0.fc1")))
        seen: list[int] = []
        # In rows of all sequences together: OPT flattens them.
        first.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2).shape[0])
        )
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        with torch.no_grad():
            texts.append(actor.generate(IDS, attention_mask=ATTEND.long(), **options))
        assert seen == [14, 2, 2, 2]
    assert torch.equal(*texts)


def test_it_comes_from_the_config_or_the_argument(compose: Compose, tmp_path: Path) -> None:
    words = ["model.gradient_checkpointing=true", "model.dropout=0.5", "model.attention=eager"]
    config = to_run_config(compose(words)).model
    assert ModelSource.from_config(config, key="model").gradient_checkpointing
    plain = ModelSource.from_folder(tmp_path, base=config)
    assert (plain.gradient_checkpointing, plain.dropout, plain.attention) == (False, 0.0, "eager")


def test_a_model_without_it_is_refused(tokenizer, monkeypatch) -> None:
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(CapabilityError, match="set gradient_checkpointing=false"):
        build_actor(source_of("llama", gradient_checkpointing=True), tokenizer, seed=1)
