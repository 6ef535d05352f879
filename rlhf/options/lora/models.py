"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): add, switch off, merge and save.

An adapted layer computes W x + scaling * B A x, with scaling = alpha / rank (equation 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf.base.decoder_modules import LowRank
from rlhf.base.errors import ConfigError
from rlhf.base.types import Engine, LogprobOptions, TokenEngine, TokenLogprobs, TokenPositions
from rlhf.config.choices import ModelInit
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.adapter_folders import ADAPTER, PREFIX, load_adapter_weights
from rlhf.models.pretrained import Adapter, find_adapter_chain
from rlhf.models.sources import ModelSource, config_fields
from rlhf.options.lora.costs import LORA_ROLES
from rlhf.options.lora.keys import LoraConfig, LoraExport
from rlhf.phases.shared.exporting import Export
from rlhf.run.model_folder import tensors_to_save

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [  # what the core calls
    "adapter_lr",
    "adapter_of",
    "check_tokenizer",
    "computing_merged",
    "extend_with_adapters",
    "find_export",
    "find_reference",
]


def find_lora_settings(lora: LoraConfig, role: Role) -> LoraConfig | None:
    """Return the adapter settings for the model of ``role``; None if it gets no adapters."""
    if not lora.rank or LORA_ROLES.get(role) not in lora.roles:
        return None
    is_critic = role is Role.critic
    return replace(lora, rank=lora.critic_rank or lora.rank) if is_critic else lora


def extend_with_adapters(
    lora: LoraConfig, role: Role, seed: int, model: PreTrainedModel, head: tuple[str, ...]
) -> None:
    """Add adapters to the model of ``role``; its new modules ``head`` are trained in full."""
    settings = find_lora_settings(lora, role)
    if settings is not None:
        add_adapters(model, settings, seed=seed, trained=head)


def adapter_lr(lora: LoraConfig, role: Role, name: str) -> float | None:
    """Return the learning rate of the parameter ``name``, or None for the phase's rate."""
    lr = lora.critic_lr if role is Role.critic and lora.critic_lr else lora.lr
    return lr if is_adapter_name(name) else None


def find_reference(config: RunConfig, actor: TokenEngine) -> AdapterOff | None:
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
    """Return how to export adapters, merged if ``source`` is None; None if the model has none."""
    model: Any = engine.module.pretrained
    if not has_adapters(model):
        return None
    if source is None or config.lora.export is LoraExport.merged:
        return Export(model, engine, tensors_to_save(model), change=merge_adapters_in_stream)
    assert source.path is not None, "the checks refuse adapters on random weights"
    save = partial(save_adapter, base=source.path, revision=source.revision)
    adapter = {n: p for n, p in model.named_parameters() if _is_saved_with_adapter(model, n)}
    return Export(model, engine, adapter, save)


def check_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if the model gets new embeddings, which the saved adapter would lack."""
    rows = config_fields(config.model).get("vocab_size")
    is_saved = config.lora.export is LoraExport.adapter
    if not is_saved or config.model.init is not ModelInit.pretrained or not isinstance(rows, int):
        return
    if rows < len(tokenizer):
        raise ConfigError(
            f"lora.export=adapter: model.path={config.model.path} has {rows} embeddings and the "
            f"tokenizer {len(tokenizer)} tokens, and an adapter has no embeddings for the new "
            "tokens; use lora.export=merged"
        )


def add_adapters(
    model: PreTrainedModel, lora: LoraConfig, *, seed: int, trained: tuple[str, ...] = ()
) -> None:
    """Add fp32 adapters to ``model`` in place: A is drawn from ``seed``, B is zero.

    The modules named in ``trained``, such as a scorer's head, are trained in full. Neither they nor
    the output layer get adapters.

    Raises:
        ConfigError: if a name in ``lora.target_modules`` matches no linear layer.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    linear = _find_linear_layers(model, without=trained)
    targets = list(linear)
    if lora.target_modules is not None:
        targets = _select_names_ending_with(targets, lora.target_modules)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        fan_in_fan_out=isinstance(linear[targets[0]], Conv1D),
        task_type="CAUSAL_LM" if model.can_generate() else "SEQ_CLS",
    )
    with torch.random.fork_rng(devices=[]):  # the CPU draws adapters
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model, ADAPTER)
    # Set only after the injection, in which peft would wrap these modules in copies of themselves.
    config.modules_to_save = list(trained) or None
    for name, parameter in model.named_parameters():
        if is_adapter_name(name):
            parameter.data = parameter.data.float()
        elif name.split(".")[0] in trained or (
            lora.train_rest and not name.endswith("base_layer.weight")
        ):
            parameter.requires_grad_(requires_grad=True)


def has_adapters(module: nn.Module) -> bool:
    """Return True if any layer of ``module`` has an adapter."""
    return any(True for _ in _iterate_adapted_layers(module))


def is_adapter_name(parameter_name: str) -> bool:
    """Return True if a parameter with this name is part of an adapter."""
    return not {"lora_A", "lora_B"}.isdisjoint(parameter_name.split("."))


@contextmanager
def disable_adapters(module: nn.Module) -> Iterator[None]:
    """Switch off the adapters of ``module`` within the context."""
    layers = [layer for _, layer in _iterate_adapted_layers(module)]
    states_before = [layer._disable_adapters for layer in layers]
    # peft's own switch would also change requires_grad, which ZeRO's optimizer has already read.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_off in zip(layers, states_before, strict=True):
            layer._disable_adapters = was_off


@contextmanager
def computing_merged(config: RunConfig, module: nn.Module) -> Iterator[None]:
    """Compute with merged adapters within the context, if ``module`` will be saved merged.

    Each layer merges its adapter as it is called, so that no copy of all weights is held. Where
    adapters are off, as in a reference, they stay off.
    """
    is_merged = config.lora.export is LoraExport.merged
    changed: list[Any] = []
    for _, layer in _iterate_adapted_layers(module) if is_merged else ():
        for part in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            part.forward = partial(_return_weight, part)
            changed.append(part)
        layer.forward = partial(_forward_merged, layer)
        changed.append(layer)
    try:
        yield
    finally:
        for part in changed:
            del part.forward


def _return_weight(part: nn.Linear, _: Tensor) -> Tensor:
    return part.weight.clone()  # ZeRO-3 frees the weight when the call of the part ends


def _forward_merged(layer: Any, x: Tensor) -> Tensor:
    """Compute W x with the merged W; each weight is read while its module is called (ZeRO-3)."""
    base = layer.base_layer
    if not layer._disable_adapters:
        factors = (part[ADAPTER](x) for part in (layer.lora_A, layer.lora_B))
        base.forward = partial(_forward_with, _build_low_rank(layer, *factors), base)
    try:
        output: Tensor = base(x)
    finally:
        vars(base).pop("forward", None)
    return output


def _forward_with(adapter: LowRank, base: nn.Module, x: Tensor) -> Tensor:
    """Compute what the linear layer ``base`` computes once ``adapter`` is merged into it."""
    merged = copy(base)
    weight = adapter.merged_with(base.weight)  # type: ignore[arg-type]
    merged._parameters = {**base._parameters, "weight": nn.Parameter(weight)}
    output: Tensor = type(base).forward(merged, x)
    return output


def merge_adapters_in_stream(
    model: nn.Module, stream: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named weights of ``stream`` with adapters merged: W + scaling * B A.

    ``stream`` yields all whole weights of ``model``, whose own weights may be shards. A layer's W,
    A and B must follow one another in the stream; they are kept until all three have arrived. The
    sum is computed in fp32 and rounded to the dtype of W.
    """
    layers, held = dict(_iterate_adapted_layers(model)), dict[str, Tensor]()
    parts = ("base_layer.weight", f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight")
    names = {f"{layer}.{part}": layer for layer in layers for part in parts}
    for name, tensor in stream:
        if name not in names:
            yield name.replace(".base_layer.", "."), tensor
            continue
        layer = names[name]
        held[name] = tensor.clone()
        if len(held) == len(parts):
            weight, a_RI, b_OR = (held.pop(f"{layer}.{part}") for part in parts)
            yield f"{layer}.weight", _build_low_rank(layers[layer], a_RI, b_OR).merged_with(weight)


def adapter_of(linear: nn.Module) -> LowRank | None:
    """Return the adapter of the layer ``linear``, or None if the layer has no adapter."""
    if not _is_adapted(linear):
        return None
    layer: Any = linear
    return _build_low_rank(layer, *(part[ADAPTER].weight for part in (layer.lora_A, layer.lora_B)))


def _build_low_rank(layer: Any, a_RI: Tensor, b_OR: Tensor) -> LowRank:
    """Return A and B as an adapter; both are transposed for GPT-2, which stores weights (I, O)."""
    factors = (b_OR.T, a_RI.T) if layer.fan_in_fan_out else (a_RI, b_OR)
    return LowRank(*factors, scaling=layer.scaling[ADAPTER])


def save_adapter(
    folder: Path,
    model: PreTrainedModel,
    stream: Iterable[tuple[str, Tensor]],
    *,
    base: str,
    revision: str | None = None,
    **_: int,
) -> None:
    """Write the adapters, and a scorer's head, as a folder that peft can load over ``base``.

    ``stream`` yields whole weights of ``model``, at least of the adapters and a new head.
    ``base`` is the folder or hub id (at ``revision``) that the model was loaded from. Adapters that
    were merged into the model when it was loaded are folded into the adapter that is written.

    Raises:
        ConfigError: if other weights were trained too, which the folder would lack.
    """
    from safetensors.torch import save_file

    config, source = model.peft_config[ADAPTER], ModelSource(key="model.path", path=base)
    earlier, bottom = find_adapter_chain(replace(source, revision=revision))
    if any(
        p.requires_grad and not _is_saved_with_adapter(model, n)
        for n, p in model.named_parameters()
    ):
        raise ConfigError(
            "lora.export=adapter with lora.train_rest=true: the adapters do not contain all "
            "trained weights; use lora.export=merged"
        )
    weights = {
        name.replace(f".{ADAPTER}.", "."): tensor.to("cpu", copy=True)
        for name, tensor in stream
        if _is_saved_with_adapter(model, name)
    }
    if earlier:  # peft loads one adapter on a whole model
        config, weights = fold_adapters([(config, weights)], earlier)
    config = copy(config)
    base = str(bottom.path)
    if Path(base).is_dir():
        base = str(Path(base).absolute())  # peft finds it from any working directory
    config.base_model_name_or_path, config.revision = base, bottom.revision
    config.inference_mode = True
    config.save_pretrained(str(folder))
    save_file(
        {f"{PREFIX}{name}": weight for name, weight in weights.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def fold_adapters(
    stack: Sequence[tuple[Any, dict[str, Tensor]]], chain: Iterable[Adapter]
) -> tuple[Any, dict[str, Tensor]]:
    """Return the config and weights of one adapter that adds what many adapters add together.

    ``stack`` has the config and weights of new adapters, and ``chain`` the stored ones below, from
    the last to the first trained. A layer gets A = [A1; A2] and B = [s1 B1, s2 B2], with the
    scalings s, zero-padded to the largest rank. The last trained version of a whole module is kept.

    Raises:
        ConfigError: if an adapter has other weights than A, B and whole modules.
    """
    from peft.utils.other import get_pattern_key

    stack = [*stack, *((each.config, load_adapter_weights(each.source)) for each in chain)]
    layers, folded, heads = defaultdict[str, list[LowRank]](list), dict[str, Tensor](), set[str]()
    for config, weights in reversed(stack):
        heads |= (whole_modules := set(config.modules_to_save or ()))
        for name, weight in weights.items():
            layer, part, _ = name.rpartition(".lora_A.")
            if part and (b_OR := weights.get(f"{layer}.lora_B.weight")) is not None:
                pattern = get_pattern_key(config.alpha_pattern, layer)
                alpha = config.alpha_pattern.get(pattern, config.lora_alpha)
                scaling = alpha / len(weight) ** (0.5 if config.use_rslora else 1)
                layers[layer].append(LowRank(weight.float(), b_OR.float(), scaling))
            elif not whole_modules.isdisjoint(name.split(".")):
                folded[name] = weight
            elif not name.endswith(".lora_B.weight"):
                raise ConfigError(
                    f"lora.export=adapter: the run starts from an adapter that has {name}, which "
                    "cannot be part of the adapter to save; use lora.export=merged"
                )
    ranks = [sum(len(part.a_RI) for part in parts) for parts in layers.values()]
    rank = max(ranks, default=0)  # an adapter may have whole modules only
    for layer, parts in layers.items():
        a_RI = torch.cat([part.a_RI for part in parts])
        b_OR = torch.cat([part.scaling * part.b_OR for part in parts], dim=1)
        folded[f"{layer}.lora_A.weight"] = pad(a_RI, (0, 0, 0, rank - len(a_RI)))
        folded[f"{layer}.lora_B.weight"] = pad(b_OR, (0, rank - len(a_RI)))
    config = copy(stack[0][0])
    config.r = config.lora_alpha = rank
    config.target_modules, config.modules_to_save = set(layers), sorted(heads) or None
    return config, folded


def _is_saved_with_adapter(model: PreTrainedModel, name: str) -> bool:
    """Return True if an adapter folder contains weight ``name``, of an adapter or a new head."""
    heads = model.peft_config[ADAPTER].modules_to_save or []
    return is_adapter_name(name) or name.partition(".")[0] in heads


def _iterate_adapted_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        if _is_adapted(layer):
            yield name, layer


def _is_adapted(layer: nn.Module) -> bool:
    """Return True if ``layer`` has an adapter, without importing peft, which takes 100 MB."""
    return hasattr(layer, "lora_A")


def _find_linear_layers(
    model: PreTrainedModel, *, without: tuple[str, ...]
) -> dict[str, nn.Module]:
    """Return linear layers by full name, except the output layer and modules in ``without``."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not output and name not in without
    }


def _select_names_ending_with(names: list[str], endings: list[str]) -> list[str]:
    """Return the ``names`` that end with one of ``endings``, compared in whole dotted parts."""
    for ending in endings:
        if not any(f".{name}".endswith(f".{ending}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"lora.target_modules={endings}: no linear layer of the model is named "
                f"{ending!r} (output layers get no adapters); choose from {', '.join(known[:12])}"
            )
    return [name for name in names if any(f".{name}".endswith(f".{e}") for e in endings)]
