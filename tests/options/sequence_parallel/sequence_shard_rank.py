"""One rank of test_sequence_parts: the losses and gradients of its part, summed over the ranks."""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from rlhf.base.types import SequenceBatch
from rlhf.config.choices import Device
from rlhf.engine.devices import current_ranks
from rlhf.engine.zero3_partition import skip_shm_kernel_compilation
from rlhf.models.build import build_actor
from rlhf.models.language_model import LanguageModel, kept_token_logprobs
from rlhf.options.sequence_parallel.models import (
    SequenceShardModel,
    build_sequence_parallel_attention,
    count_heads,
    get_attention_function,
    set_attention_function,
)
from tests.models_on_disk import small_tokenizer, some_ids, source_of

TOKENS = 9  # odd, so that the last part has padding
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"max_position_embeddings": TOKENS},  # the padding has no position of its own
    "llama": {},
    "qwen3": {},  # a single head for keys and values
    "gpt_neox": {},
}
KEPT = {"both parts": (6, 2), "the last part": (7, 6)}  # first kept token of each row


def step(model: Any, batch: SequenceBatch) -> tuple[Tensor, list[Tensor]]:
    """The loss of ``model``, and its gradient."""
    model.zero_grad()
    loss = -kept_token_logprobs(model, batch).sum()
    loss.backward()
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


def main(folder: Path) -> None:
    skip_shm_kernel_compilation()
    deepspeed.init_distributed("gloo", verbose=False)
    ranks, found = current_ranks(Device.cpu), {}
    ids_BS = some_ids(2, TOKENS)
    for family, fields in FAMILIES.items():
        whole, mine = (
            build_actor(source_of(family, fields=fields), small_tokenizer(), seed=1) for _ in "ab"
        )
        part = SequenceShardModel(mine, part=ranks.rank, parts=2, tokens=TOKENS)
        heads = count_heads(mine)
        set_attention_function(
            mine,
            build_sequence_parallel_attention(
                get_attention_function(mine), heads, ranks=ranks, size=2, sequences=2
            ),
        )
        for where, first in KEPT.items():
            keep_BS = torch.arange(TOKENS) >= torch.tensor(first)[:, None]
            batch = SequenceBatch(ids_BS, torch.ones_like(keep_BS), keep_BS)
            loss, gradients = step(LanguageModel(whole), batch)
            own, parts = step(part, batch)
            found[family, where] = {
                "losses": [float(loss.detach()), float(ranks.sum(own))],
                "error": max(
                    float((ranks.sum(of_part) - all_of_it).abs().max())
                    for of_part, all_of_it in zip(parts, gradients, strict=True)
                ),
                "largest": max(float(gradient.abs().max()) for gradient in gradients),
            }
    if ranks.is_main:
        torch.save(found, folder / "found.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
