"""Rules for the group ``lora``, and for keys that need adapters."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.config.choices import Device, Dtype, ModelInit, Phase
from rlhf.config.roles import starting_models
from rlhf.config.schema.run import RunConfig
from rlhf.models.sources import ModelSource
from rlhf.options.lora.keys import LoraExport, LoraRole


def check_lora(config: RunConfig) -> None:
    """Check the keys of adapters, and that frozen weights are quantized only with adapters."""
    _check_quantization(config)
    if config.lora.rank:
        _check_adapters(config)


def _check_quantization(config: RunConfig) -> None:
    """Check that the run has what MixZ++ quantizes: frozen weights in fp16 on GPUs."""
    hardware = config.hardware
    if not config.zero.quantize_frozen_weights:
        return
    broken = {
        "zero.quantize_frozen_weights=true: requires LoRA, whose frozen weights it quantizes, and "
        "GPUs; add lora=default and a GPU hardware profile": (
            not config.lora.rank or hardware.device is not Device.cuda
        ),
        f"zero.quantize_frozen_weights=true with hardware.dtype={hardware.dtype}: DeepSpeed "
        "quantizes fp16 weights only; use hardware.dtype=fp16": hardware.dtype is not Dtype.fp16,
    }
    refuse_broken_rule(broken)


def _check_adapters(config: RunConfig) -> None:
    """Check that adapters are on trained models, and that the export saves all trained weights."""
    lora = config.lora
    broken = {
        f"lora.roles=[] with lora.rank={lora.rank}: name the models that get adapters, some of "
        f"{', '.join(LoraRole)}": not lora.roles,
        "lora.export=adapter with lora.train_rest=true: the other trained weights would be lost; "
        "use lora.export=merged": lora.train_rest and lora.export is LoraExport.adapter,
    }
    refuse_broken_rule(broken)
    starts = {"sft": ("model", config.model), "reward": ("reward_model", config.reward_model)}
    for phase, (key, model) in starts.items():
        starts_random = phase in config.phase.order and model.init is ModelInit.random
        if starts_random and phase in lora.roles:
            raise ConfigError(
                f"lora.roles has {phase}, and {key}.init=random: adapters on random weights learn "
                "nothing; use lora.roles=[actor,critic], or a pretrained model"
            )


def check_adapted_layers(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise ConfigError if ``lora.target_modules`` names layers that the policy does not have.

    With lora.export=adapter, an adapter that ``phases`` start from must fit into the saved adapter.
    """
    lora = config.lora
    if lora.export is LoraExport.adapter:
        order = [phase for phase in config.phase.order if phase in phases]
        models = {key: model for phase in order for key, model in starting_models(config, phase)}
        for key, model in models.items():
            source = ModelSource.from_config(model, key=key)
            if (Path(str(source.path)) / "adapter_config.json").is_file():
                from rlhf.models.pretrained import find_adapter_chain
                from rlhf.options.lora.models import fold_adapters

                fold_adapters([], find_adapter_chain(source)[0])
    if not lora.target_modules or not {LoraRole.sft, LoraRole.actor} & {*lora.roles}:
        return
    from rlhf.options.lora.models import add_adapters  # imports torch
    from rlhf.phases.shared.model_checks import build_weightless_model

    if policy := build_weightless_model("AutoModelForCausalLM", "model", config.model):
        add_adapters(policy, lora, seed=0)
