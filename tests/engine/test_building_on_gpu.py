"""While models and engines are built, GPU and host hold no more than needed, and one parameter."""

from pathlib import Path

import pytest
import torch
from torch import nn

from rlhf.base.errors import ConfigError
from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype, Kernels
from rlhf.config.roles import Role
from rlhf.engine import masters
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.kernels.kernel_checks import choose_kernels
from rlhf.kernels.torch_adamw import fp32_weights
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.pretrained import Shard
from rlhf.models.sources import ModelSource
from tests.engine.test_torch_engine import ADAMW
from tests.lora_settings import adding, lora_config
from tests.models.test_damaged_folders import change_json
from tests.models_on_disk import FAMILIES, save_base, small_tokenizer, source_of, whole_state
from tests.pretend_cuda.gpu import Gpu
from tests.zero_settings import zero_config

LAYERS, SIZE = 16, 128
WEIGHTS = LAYERS * SIZE * SIZE


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))


def engine_of(module: nn.Module, device: torch.device, *, is_trained: bool) -> TorchEngine:
    return TorchEngine(
        module,
        role=Role.actor if is_trained else Role.reference,
        settings=EngineSettings(zero=zero_config(stage=1), dtype=Dtype.bf16),
        ranks=Ranks(0, 1, device),
        optimizer=ADAMW if is_trained else None,
    )


@pytest.mark.parametrize(
    ("trained", "bytes_per_weight"),
    [
        (0, 2),  # a frozen model
        (1, 2 + 14 / LAYERS),  # as with adapters: one layer with master, moments and average
        (LAYERS, 2 + 14),
    ],
)
def test_weights_come_one_by_one(
    gpu: Gpu, trained: int, bytes_per_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layers()
    for layer in module[trained:]:
        layer.requires_grad_(requires_grad=False)
    monkeypatch.setattr(masters, "CHUNK", 256)
    choose_kernels(Kernels.off)  # comparing AdamW's kernel takes memory too, of a few weights
    before = gpu.used
    gpu.reset_peak()
    engine = engine_of(module, torch.device("cuda", 0), is_trained=bool(trained))
    one = SIZE * SIZE if trained else 256  # frozen weights are rounded in chunks
    assert gpu.used - before == pytest.approx(bytes_per_weight * WEIGHTS, rel=0.01)
    assert gpu.peak <= gpu.used + 3 * 4 * one
    there = [p.detach().cpu() for p in module.parameters()]
    here = [p.detach() for p in layers().parameters()]
    assert all(p.device.type == "cuda" for p in module.parameters())
    for weights, expected in zip(there, here, strict=True):
        torch.testing.assert_close(weights.float(), expected, rtol=2**-8, atol=0)
    if trained:
        exact = [fp32_weights(shard).cpu() for shard in engine._optimizer.masters.shards]
        for master, expected in zip(exact, here[:trained], strict=True):
            assert torch.equal(master, expected.flatten())


def unsharded(stage: int, *, ranks: int = 8) -> Shard | None:
    """What one of the ranks does with each parameter of a model that is loaded in bf16."""
    return build_parameter_placer(
        Role.actor,
        settings=EngineSettings(zero=zero_config(stage=stage), dtype=Dtype.bf16),
        plan=BatchPlan(per_rank=1, micro=1, accumulation=1),
        ranks=Ranks(0, ranks, torch.device("cuda", 0)),
    )


@pytest.mark.parametrize("is_trained", [True, False])
def test_one_gpu_gets_its_weights_from_the_file(gpu: Gpu, is_trained: bool, tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    save_base(tmp_path, "llama", tokenizer).bfloat16().save_pretrained(tmp_path)
    source = ModelSource(key="k", path=str(tmp_path))
    expected = build_actor(source, tokenizer, seed=3)
    model = build_actor(source, tokenizer, seed=3, shard=unsharded(1, ranks=1))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "no fp32 copy on the host"
    engines = [
        engine_of(each, torch.device("cuda", 0), is_trained=is_trained)
        for each in (model, expected)
    ]
    for weights, same in zip(*(engine.module.parameters() for engine in engines), strict=True):
        assert weights.dtype is torch.bfloat16
        assert torch.equal(weights, same)


def test_a_file_of_several_precisions_is_checked_too(gpu: Gpu, tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    base = save_base(tmp_path, "llama", tokenizer).bfloat16()
    base.model.norm.float()
    base.save_pretrained(tmp_path)
    source = ModelSource(key="k", path=str(tmp_path))
    build_actor(source, tokenizer, seed=3, shard=unsharded(1, ranks=1))
    change_json(tmp_path / "config.json", rms_norm_eps=-10.0)
    with pytest.raises(ConfigError, match="no causal language model has these fields"):
        build_actor(source, tokenizer, seed=3, shard=unsharded(1, ranks=1))


BUILT = [(family, 1, torch.bfloat16) for family in FAMILIES]
BUILT += [("llama", stage, stored) for stage in (0, 1) for stored in (None, torch.float32)]


@pytest.mark.parametrize(("family", "stage", "stored"), BUILT)
def test_a_rank_sends_each_parameter_in_its_precision(
    gpu: Gpu, family: str, stage: int, stored: torch.dtype | None, tmp_path: Path
) -> None:
    tokenizer, source = small_tokenizer(), source_of(family)
    if stored is not None:
        save_base(tmp_path, family, tokenizer).to(stored).save_pretrained(tmp_path)
        source = ModelSource(key="k", path=str(tmp_path))
    expected = whole_state(build_scorer(source, tokenizer, seed=3).pretrained)
    gpu.reset_peak()
    model = build_scorer(source, tokenizer, seed=3, shard=unsharded(stage)).pretrained
    dtype = torch.bfloat16 if stage else torch.float32
    parameters = dict(model.named_parameters())
    assert {(p.device.type, p.dtype) for p in parameters.values()} == {("cuda", dtype)}
    assert gpu.peak <= gpu.used + max(p.nbytes for p in parameters.values())
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach().cpu(), expected[name].to(dtype)), name


@pytest.mark.parametrize("stage", [0, 1])
def test_adapters_on_sent_layers_are_those_of_the_cpu(gpu: Gpu, stage: int) -> None:
    spec = lora_config()
    source, tokenizer = source_of("llama"), small_tokenizer()
    expected = whole_state(build_actor(source, tokenizer, seed=3, extensions=adding(spec, seed=3)))
    model = build_actor(
        source, tokenizer, seed=3, extensions=adding(spec, seed=3), shard=unsharded(stage)
    )
    dtype = torch.bfloat16 if stage else torch.float32
    for name, parameter in model.named_parameters():
        assert (parameter.device.type, parameter.dtype) == ("cuda", dtype), name
        assert torch.equal(parameter.detach().cpu(), expected[name].to(dtype)), name
