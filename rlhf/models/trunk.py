"""Actor, critic and reference as branches of one model: trlx's hydra.

One pass through the frozen lower blocks serves all three. The upper blocks are trained, the
reference is a frozen copy of them, and the critic a linear head on the actor's last hidden state,
or on that of a trained copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.algorithms.logprobs import PLAIN, Picks, Reading, TokenLogprobs
from rlhf.errors import CapabilityError, ConfigError
from rlhf.models.building import ModelSource, build_actor
from rlhf.models.policy import read_tokens, set_output_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Layout(NamedTuple):
    """Where a model family keeps its blocks, and what follows them before the output layer."""

    blocks: str
    tail: tuple[str, ...]


LLAMA_LAYOUT = Layout("layers", ("norm",))
LAYOUTS = {
    "llama": LLAMA_LAYOUT,
    "mistral": LLAMA_LAYOUT,
    "qwen2": LLAMA_LAYOUT,
    "qwen3": LLAMA_LAYOUT,
    "opt": Layout("decoder.layers", ("decoder.final_layer_norm", "decoder.project_out")),
    "gpt2": Layout("h", ("ln_f",)),
    "gpt_neox": Layout("layers", ("final_layer_norm",)),
}


class TrunkOutput(NamedTuple):
    """What policy and reference think of the picked tokens, and values (B, S) in fp32."""

    policy: TokenLogprobs | None
    reference: TokenLogprobs | None
    values_BS: Tensor


class BlockCall(NamedTuple):
    """What a block was called with: the hidden state, then masks, positions and the like."""

    hidden_BSH: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Branch(nn.Module):
    """A copy of a model's upper blocks and of what follows them."""

    def __init__(self, blocks: Sequence[nn.Module], tail: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(deepcopy(block) for block in blocks)
        self.tail = nn.ModuleList(deepcopy(module) for module in tail)

    def forward(self, calls: Sequence[BlockCall]) -> Tensor:
        """The last hidden state (B, S, H), from the calls of the blocks that these are copies of.

        The hidden state is that of the first call; of the others only masks and positions count.
        """
        hidden_BSH = calls[0].hidden_BSH
        for block, call in zip(self.blocks, calls, strict=True):
            output = block(hidden_BSH, *call.args, **call.kwargs)
            hidden_BSH = output[0] if isinstance(output, tuple) else output
        for module in self.tail:
            hidden_BSH = module(hidden_BSH)
        return hidden_BSH


class SharedTrunk(nn.Module):
    """A causal language model whose upper blocks branch into actor, critic and reference.

    Trained are the top ``num_layers_unfrozen`` blocks, the norm after them, and the output layer
    unless it is tied to the embeddings, which are frozen. The value head starts at zero; it reads
    the actor's last hidden state, or that of the critic's own copy of the top
    ``num_value_layers`` blocks. As in trlx, the critic's loss trains the blocks that it reads.

    Raises:
        CapabilityError: ``pretrained`` is of a family without a layout here.
        ConfigError: more layers are asked for than there are.
    """

    def __init__(
        self, pretrained: PreTrainedModel, *, num_layers_unfrozen: int, num_value_layers: int = 0
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        layout = layout_of(pretrained)
        set_output_layer(pretrained)
        base = pretrained.base_model
        blocks = list(base.get_submodule(layout.blocks))
        tail = [module for name in layout.tail if (module := _part(base, name)) is not None]
        _check_layers(len(blocks), num_layers_unfrozen, num_value_layers)
        self.num_layers_unfrozen, self.num_value_layers = num_layers_unfrozen, num_value_layers
        output, embeddings = pretrained.get_output_embeddings(), pretrained.get_input_embeddings()
        own_output = [] if output.weight is embeddings.weight else [output]

        top = blocks[len(blocks) - num_layers_unfrozen :]
        self.reference = Branch(top, tail)
        self.reference_output = deepcopy(output) if own_output else None
        value_blocks = blocks[len(blocks) - num_value_layers :]
        self.value_branch = Branch(value_blocks, tail) if num_value_layers else None
        self.value_head = nn.Linear(output.in_features, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

        for module in pretrained.modules():
            if "layerdrop" in vars(module):
                module.layerdrop = 0.0  # a branch starts from the call of a block: none is left out
        self.requires_grad_(requires_grad=False)
        for part in [*top, *tail, *own_output, self.value_branch, self.value_head]:
            if part is not None:
                part.requires_grad_(requires_grad=True)

    def train(self, mode: bool = True) -> SharedTrunk:
        """Train or evaluate; the reference is always without dropout."""
        super().train(mode)
        for module in (self.reference, self.reference_output):
            if module is not None:
                module.eval()
        return self

    def forward(
        self,
        ids_BS: Tensor,
        picks: Picks,
        reading: Reading = PLAIN,
        *,
        with_policy: bool = True,
        with_reference: bool = False,
    ) -> TrunkOutput:
        """One pass over right-padded sequences, see ``Policy``."""
        base = self.pretrained.base_model
        blocks = list(base.get_submodule(layout_of(self.pretrained).blocks))
        num_branched = max(self.num_layers_unfrozen, self.num_value_layers)
        with _recorded(blocks[len(blocks) - num_branched :]) as calls:
            last_BSH = base(input_ids=ids_BS, use_cache=False).last_hidden_state
        value_BSH = last_BSH
        if self.value_branch is not None:
            value_BSH = self.value_branch(calls[len(calls) - self.num_value_layers :])
        output = self.pretrained.get_output_embeddings()
        policy = reference = None
        if with_policy:
            policy = read_tokens(output, last_BSH, picks, reading)
        if with_reference:
            reference_BSH = self.reference(calls[len(calls) - self.num_layers_unfrozen :])
            reference = read_tokens(self.reference_output or output, reference_BSH, picks, reading)
        return TrunkOutput(policy, reference, self.value_head(value_BSH).squeeze(-1).float())


def build_trunk(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_layers_unfrozen: int,
    num_value_layers: int,
    seed: int,
) -> SharedTrunk:
    """A shared trunk whose policy is the causal language model of ``source``.

    Raises:
        CheckpointError, ConfigError, CapabilityError: as ``build_actor`` and ``SharedTrunk``.
    """
    return SharedTrunk(
        build_actor(source, tokenizer, seed=seed),
        num_layers_unfrozen=num_layers_unfrozen,
        num_value_layers=num_value_layers,
    )


def critic_state(trunk: SharedTrunk, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """``state``, the whole weights of ``trunk``, as that of its critic alone, ``critic_model``."""
    prefix, layout = trunk.pretrained.base_model_prefix, layout_of(trunk.pretrained)
    base = trunk.pretrained.base_model
    renamed = {f"pretrained.{prefix}.": f"{prefix}.", "value_head.": "score."}
    first = len(base.get_submodule(layout.blocks)) - trunk.num_value_layers
    for index in range(trunk.num_value_layers):
        renamed[f"value_branch.blocks.{index}."] = f"{prefix}.{layout.blocks}.{first + index}."
    tail = [name for name in layout.tail if _part(base, name) is not None]
    for index, name in enumerate(tail):
        renamed[f"value_branch.tail.{index}."] = f"{prefix}.{name}."
    # In this order the critic's own blocks take the place of the actor's.
    return {
        name.replace(old, new, 1): tensor
        for old, new in renamed.items()
        for name, tensor in state.items()
        if name.startswith(old)
    }


def critic_model(trunk: SharedTrunk, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The class and config of the critic as an ordinary model, without memory for its weights."""
    from transformers import AutoModelForSequenceClassification

    config = deepcopy(trunk.pretrained.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


def layout_of(model: PreTrainedModel) -> Layout:
    """Where the model's family keeps its blocks.

    Raises:
        CapabilityError: nobody has said.
    """
    model_type = model.config.model_type
    if model_type not in LAYOUTS:
        raise CapabilityError(
            f"ppo.shared_trunk=true: a model of model_type={model_type} cannot be branched here, "
            f"only {', '.join(LAYOUTS)}; set ppo.shared_trunk=false"
        )
    return LAYOUTS[model_type]


@contextmanager
def _recorded(blocks: Sequence[nn.Module]) -> Iterator[list[BlockCall]]:
    """The calls of ``blocks`` within the context, in the order in which they are made."""
    calls: list[BlockCall] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(BlockCall(args[0], args[1:], kwargs))

    handles = [block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _part(base: nn.Module, name: str) -> nn.Module | None:
    """A part that some models of a family are without."""
    parent, _, child = name.rpartition(".")
    part: nn.Module | None = getattr(base.get_submodule(parent), child)
    return part


def _check_layers(num_layers: int, num_layers_unfrozen: int, num_value_layers: int) -> None:
    if num_layers_unfrozen >= num_layers:
        raise ConfigError(
            f"ppo.num_layers_unfrozen={num_layers_unfrozen}: the model has {num_layers} layers, "
            "and at least one of them must stay frozen; use less, or ppo.shared_trunk=false"
        )
    if num_value_layers > num_layers:
        raise ConfigError(
            f"ppo.num_value_layers={num_value_layers}: the model has {num_layers} layers; use less"
        )
