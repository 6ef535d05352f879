"""Functions by which adapters take part in building, optimizing, checking and saving models."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rlhf.base.types import Engine, LogprobOptions, TokenEngine, TokenLogprobs, TokenPositions
from rlhf.config.choices import Phase
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.engine.settings import OptimizerSettings
from rlhf.models.sources import ModelSource
from rlhf.options.lora.keys import LORA_ROLES, LoraConfig, LoraExport, LoraRole
from rlhf.options.lora.lora import (
    adapter_of,
    add_adapters,
    disable_adapters,
    has_adapters,
    is_adapter_name,
    merge_adapters_in_stream,
    save_adapter,
    select_adapter_tensors,
)
from rlhf.phases.shared.exporting import Export
from rlhf.phases.shared.model_checks import build_weightless_model
from rlhf.run.model_folder import tensors_to_save

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [  # what the core calls
    "adapter_of",
    "change_optimizer_settings",
    "check_models",
    "extend_model",
    "find_export",
    "find_reference",
]


def find_lora_settings(lora: LoraConfig, role: Role) -> LoraConfig | None:
    """Return the adapter settings for the model of ``role``; None if it gets no adapters."""
    if not lora.rank or LORA_ROLES.get(role) not in lora.roles:
        return None
    is_critic = role is Role.critic
    return replace(lora, rank=lora.critic_rank or lora.rank) if is_critic else lora


def extend_model(
    config: RunConfig, role: Role, seed: int, model: PreTrainedModel, head: tuple[str, ...]
) -> None:
    """Add adapters to the model of ``role``; its new modules ``head`` are trained in full."""
    lora = find_lora_settings(config.lora, role)
    if lora is not None:
        add_adapters(model, lora, seed=seed, trained=head)


def change_optimizer_settings(
    settings: OptimizerSettings, config: RunConfig, _: Phase, role: Role
) -> OptimizerSettings:
    """Return the settings with the learning rate of the adapters, if the keys set one."""
    lora = config.lora
    lr = lora.critic_lr if role is Role.critic and lora.critic_lr else lora.lr
    return replace(settings, lr_of=lambda name: lr if is_adapter_name(name) else None)


def find_reference(config: RunConfig, _: Phase, actor: TokenEngine) -> AdapterOff | None:
    """Return the policy without its adapters; None if its other weights are trained too."""
    lora = find_lora_settings(config.lora, Role.actor)
    return None if lora is None or lora.train_rest else AdapterOff(actor)


class AdapterOff:
    """A reference that is the policy with its adapters off; implements ``TokenModel``."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    def __call__(
        self, ids_BS: Tensor, positions: TokenPositions, options: LogprobOptions, /
    ) -> TokenLogprobs:
        """Run the forward pass as if there were no adapters."""
        with disable_adapters(self._engine.module):
            return self._engine(ids_BS, positions, options)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Yield the module for evaluation, with the adapters, dropout and gradients off."""
        with disable_adapters(self._engine.module), self._engine.evaluating() as module:
            yield module


def find_export(config: RunConfig, engine: Engine, source: ModelSource | None) -> Export | None:
    """Return how to save a model: as ``lora.export`` says, or merged if ``source`` is None."""
    model: Any = engine.module.pretrained
    if not has_adapters(model):
        return None
    if source is None or config.lora.export is LoraExport.merged:
        return Export(model, engine, tensors_to_save(model), change=merge_adapters_in_stream)
    assert source.path is not None, "the checks refuse adapters on random weights"
    save = partial(_save_adapter, base=source.path, revision=source.revision)
    return Export(model, engine, select_adapter_tensors(model), save)


def _save_adapter(
    folder: Path,
    model: Any,
    stream: Iterable[tuple[str, Tensor]],
    *,
    base: str,
    revision: str | None,
    **_: int,
) -> None:
    save_adapter(folder, model, stream, base=base, revision=revision)


def check_models(config: RunConfig, _: Container[Phase]) -> None:
    """Raise ConfigError if ``lora.target_modules`` names layers that the policy does not have."""
    lora = config.lora
    if not lora.target_modules or not {LoraRole.sft, LoraRole.actor} & {*lora.roles}:
        return
    if policy := build_weightless_model("AutoModelForCausalLM", "model", config.model):
        add_adapters(policy, lora, seed=0)
