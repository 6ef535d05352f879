"""A sequence-classification model with a value at every position: a reward model or critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from rlhf.base.errors import CapabilityError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scorer(nn.Module):
    """A one-label classification model whose head is applied to every token, not only the last.

    The reward model's score is its value at the end token; the critic's values are taken before
    each response token. Both are saved as the Hugging Face folder of ``pretrained``.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.head_name = _head_name(pretrained)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return fp32 values (B, S) of right-padded sequences: no token attends to the padding."""
        trunk = getattr(self.pretrained, self.pretrained.base_model_prefix)
        head = getattr(self.pretrained, self.head_name)
        hidden_BSH = trunk(input_ids=ids_BS, use_cache=False).last_hidden_state
        values_BS1: Tensor = head(hidden_BSH)
        return values_BS1.squeeze(-1).float()


def _head_name(pretrained: PreTrainedModel) -> str:
    heads: list[str] = [
        name
        for name, child in pretrained.named_children()
        if isinstance(child, nn.Linear) and child.out_features == 1
    ]
    if len(heads) == 1:
        return heads[0]
    raise CapabilityError(
        f"{type(pretrained).__name__} has no single linear head of one label beside its trunk "
        f"(children: {[name for name, _ in pretrained.named_children()]}); "
        "use a decoder such as OPT, Llama, Qwen, GPT-2 or Pythia"
    )
