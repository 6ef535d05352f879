"""The names of a model's parts in each family, from the table families.yaml.

All names are attribute paths, in ``Family`` from the base model and in ``BlockNames`` from a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.decoder_modules import BlockModules, BlockOrder, DecoderModules
from rlhf.base.packaged_yaml import read_yaml_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockNames(NamedTuple):
    """The names of the modules in one transformer block."""

    attention_norm: str
    mlp_norm: str
    query_key_value: Sequence[str]  # three modules, or one whose output has q, k, v per head
    output: str
    up: str
    down: str
    gate: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """The module names of a model family; a feature works if the names that it uses are set."""

    has_plain_output: bool = True
    """The logits are the output layer of the last hidden state, without scaling or capping."""
    blocks: str | None = None
    """The list of blocks, for options that copy them."""
    tail: Sequence[str] = ()
    """The modules between the last block and the output layer; some models lack some of them."""
    block: BlockNames | None = None
    """For fused decoding (``rollout=fast``); otherwise the model's own cache is used."""
    tokens: str = "embed_tokens"
    positions: str | None = None
    """Learned position embeddings."""
    project_in: str | None = None
    rotary: str | None = "rotary_emb"
    order: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For a field of the config, the order of norms, attention and MLP if the field is true, and if
    it is false. Without such a field the order is norm_first."""
    activation: str = "hidden_act"
    """The config's field with the name of the activation."""


def _build_family(names: dict[str, Any]) -> Family:
    block = names.get("block")
    return Family(**names | {"block": None if block is None else BlockNames(**block)})


FAMILIES = {
    name: _build_family(names)
    for name, names in read_yaml_beside(__file__, "families.yaml").items()
}
UNKNOWN = Family(has_plain_output=False)


def family_of(model: PreTrainedModel) -> Family:
    """Return the family of ``model``, or ``UNKNOWN``, which supports none of the features."""
    return FAMILIES.get(model.config.model_type, UNKNOWN)


def find_decoder_modules(model: PreTrainedModel, *, tokens: int) -> DecoderModules | None:
    """Return the modules of ``model`` for fused decoding of sequences of up to ``tokens`` tokens.

    Returns None if the family has no ``block``, if the sliding window is shorter than ``tokens``,
    or if rotary frequencies change with the sequence length.
    """
    config, family, base = model.config, family_of(model), model.base_model
    layers = find_submodule(base, family.blocks)
    if family.block is None or not layers:
        return None
    window = getattr(config, "sliding_window", None)
    if window is not None and window < tokens:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        return None
    blocks = [_find_block_modules(block, family.block) for block in layers]
    # Read widths from the weights: config.json may have fields that the family ignores.
    widths = [module.out_features for module in blocks[0].query_key_value]
    joined = sum(widths) // 3
    query, key, *_ = widths if len(widths) > 1 else (joined, joined)
    head_dim = query // config.num_attention_heads
    positions = find_submodule(base, family.positions)
    tail = (find_submodule(base, name) for name in family.tail)
    return DecoderModules(
        tokens=find_submodule(base, family.tokens),
        positions=positions,
        position_offset=getattr(positions, "offset", 0),
        project_in=find_submodule(base, family.project_in),
        rotary=find_submodule(base, family.rotary),
        blocks=blocks,
        order=_find_order_within_block(config, family),
        final=[module for module in tail if module is not None],
        head=model.get_output_embeddings(),
        num_heads=config.num_attention_heads,
        num_kv_heads=key // max(1, head_dim),
        head_dim=head_dim,
        activation=getattr(config, family.activation),
    )


def _find_order_within_block(config: Any, family: Family) -> BlockOrder:
    for key, (if_true, if_false) in family.order.items():
        return BlockOrder(if_true if getattr(config, key) else if_false)
    return BlockOrder.norm_first


def find_submodule(module: Any, name: str | None) -> Any:
    """Return the child of ``module`` at the dotted ``name``; None if it does not exist."""
    if name is None:
        return None
    return reduce(lambda part, child: getattr(part, child, None), name.split("."), module)


def _find_block_modules(block: Any, names: BlockNames) -> BlockModules:
    joined = tuple(find_submodule(block, name) for name in names.query_key_value)
    single = {
        field: find_submodule(block, name)
        for field, name in names._asdict().items()
        if field != "query_key_value"
    }
    return BlockModules(query_key_value=joined, **single)
