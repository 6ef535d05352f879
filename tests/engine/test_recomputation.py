"""ZeRO-3 releases frozen weights that recomputation has gathered."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.config.choices import Dtype
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.models.build import build_actor
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import train_tokenizer
from tests.architectures import sizes
from tests.engine.test_torch_engine import engine_of
from tests.lora_settings import adding, lora_config

LAYERS = 3
LLAMA = sizes("llama", 16, 32, layers=LAYERS)
# Gathered weights would otherwise be kept for as long as they are few, which is always here.
KEEP_NOTHING = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}


def num_gathered(weights: Iterable[nn.Parameter]) -> int:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return sum(p.ds_status is not ZeroParamStatus.NOT_AVAILABLE for p in weights)


def test_frozen_weights_of_one_layer_at_a_time_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    tokenizer = train_tokenizer(["some text"], vocab_size=300)
    source = ModelSource(key="model", path=None, architecture=LLAMA, gradient_checkpointing=True)
    lora = lora_config()
    module = build_actor(source, tokenizer, seed=1, extensions=adding(lora))
    frozen = [p for p in module.parameters() if not p.requires_grad]
    engine = engine_of(
        DeepSpeedEngine,
        stage=3,
        dtype=Dtype.fp32,
        module=module,
        extra={"zero_optimization": KEEP_NOTHING},
    )
    fetch, seen = PartitionedParameterCoordinator.fetch_sub_module, [0]

    def counted(coordinator: Any, *arguments: Any, **how: Any) -> None:
        fetch(coordinator, *arguments, **how)
        seen.append(num_gathered(frozen))

    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", counted)
    in_a_layer = sum(not p.requires_grad for p in module.model.layers[0].parameters())
    for _ in range(2):  # the second backward pass follows DeepSpeed's trace of the first
        loss = engine(input_ids=torch.arange(12).reshape(2, 6)).logits.square().mean()
        assert num_gathered(frozen) == 0
        engine.backward(loss)
        assert num_gathered(frozen) == 0
    engine.step()
    assert max(seen) == in_a_layer == 9, "recomputation needs a layer's weights together"
