"""One rank of test_policy_zero3: a step of a policy whose weights are sharded."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.base.types import LogprobOptions, SequenceBatch, TokenPositions
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype, TrainingEngine
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.settings import EngineSettings
from rlhf.models.build import build_actor
from rlhf.models.language_model import LanguageModel
from tests.models_on_disk import small_tokenizer, source_of
from tests.zero_settings import adamw, zero_config

OPTIONS = LogprobOptions(0.8, entropy_gradient=True)


def engine_of(module: torch.nn.Module, ranks: Ranks, role: Role) -> DeepSpeedEngine:
    zero = zero_config(stage=3, engine=TrainingEngine.deepspeed, param_persistence_threshold=0)
    return DeepSpeedEngine(
        module,
        role=role,
        settings=EngineSettings(zero=zero, dtype=Dtype.fp32),
        plan=BatchPlan(per_rank=2, micro=2, accumulation=1),
        ranks=ranks,
        optimizer=adamw(),
    )


def loss_of(policy: Any, batch: SequenceBatch) -> Tensor:
    found = policy(batch.ids_BS, TokenPositions.from_batch(batch), OPTIONS)
    return -found.logprobs_N.sum() - 0.3 * found.entropy_N.sum()


def plain_loss(model: Any, batch: SequenceBatch) -> Tensor:
    """The same from all logits."""
    logs_BSV = (model(batch.ids_BS).logits / OPTIONS.temperature).log_softmax(-1)
    kept_BS = batch.keep_BS[:, 1:]
    logprobs_BS = logs_BSV[:, :-1].gather(2, batch.ids_BS[:, 1:, None])[..., 0]
    entropy_BS = -(logs_BSV.exp() * logs_BSV).sum(-1)[:, :-1]
    return -logprobs_BS[kept_BS].sum() - 0.3 * entropy_BS[kept_BS].sum()


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ranks, found = current_ranks(Device.cpu), []
    ids_BS = torch.arange(12).reshape(2, 6) + 10 * ranks.rank + 3
    keep_BS = torch.arange(6) < torch.tensor([[4], [6]])
    batch = SequenceBatch(ids_BS, keep_BS, keep_BS)
    for family, tied in (("llama", True), ("llama", False), ("opt", True)):
        source = source_of(family, fields={"tie_word_embeddings": tied})
        plain, sharded = (build_actor(source, small_tokenizer(), seed=1) for _ in "ab")
        engine = engine_of(LanguageModel(sharded), ranks, Role.actor)
        losses = [plain_loss(plain, batch), loss_of(engine, batch)]
        losses[0].backward()
        gradients = [ranks.sum(p.grad) for p in plain.parameters() if p.grad is not None]
        engine.backward(losses[1])
        report = engine.step()
        norm = torch.nn.utils.get_total_norm(gradients)
        with engine.evaluating():
            after = loss_of(engine, batch)
        found.append([*losses, norm, torch.tensor(report.grad_norm), after])
    if ranks.is_main:
        torch.save([[float(x) for x in row] for row in found], folder / "found.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
