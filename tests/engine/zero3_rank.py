"""One rank of test_zero3_checkpoint: train a step under ZeRO-3, save, and tell the live logits."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhf.algorithms.schedule import build_lr_schedule
from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype, TrainingEngine
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.shared.exporting import Export
from rlhf.run.model_folder import save_model, tensors_to_save
from tests.zero_settings import zero_config


def engine_of(module: torch.nn.Module, ranks: Ranks, role: Role) -> DeepSpeedEngine:
    constant = build_lr_schedule("constant", warmup_steps=0, total_steps=1, min_ratio=1.0)
    zero = zero_config(stage=3, engine=TrainingEngine.deepspeed, param_persistence_threshold=0)
    return DeepSpeedEngine(
        module,
        role=role,
        settings=EngineSettings(zero=zero, dtype=Dtype.fp32),
        plan=BatchPlan(per_rank=2, micro=2, accumulation=1),
        ranks=ranks,
        optimizer=OptimizerSettings(
            lr=0.1,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            schedule=constant,
        ),
    )


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ranks = current_ranks(Device.cpu)
    tokenizer = train_tokenizer(["some text"], vocab_size=300)
    architecture = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "tie_word_embeddings": True,
    }
    source = ModelSource(key="model", path=None, architecture=architecture)
    ids_BS = torch.arange(12).reshape(2, 6) + 10 * ranks.rank
    probe_BS = torch.arange(8)[None]

    actor = engine_of(build_actor(source, tokenizer, seed=1), ranks, Role.actor)
    actor.backward(actor(input_ids=ids_BS).logits.square().mean())
    actor.step()
    with actor.evaluating():
        logits_BSV = actor(input_ids=probe_BS, position_ids=probe_BS).logits
    critic = engine_of(build_scorer(source, tokenizer, seed=2), ranks, Role.critic)
    critic.backward(critic(ids_BS).square().mean())
    critic.step()
    with critic.evaluating():
        values_BS = critic(probe_BS)

    for name, model, engine in (
        ("actor", actor.module, actor),
        ("critic", critic.module.pretrained, critic),
    ):
        export = Export(model, engine, tensors_to_save(model))
        if ranks.is_main:
            save_model(folder / name, export.write, tokenizer, description="")
        else:
            export.write(None)
    if ranks.is_main:
        live = {"logits": logits_BSV.contiguous(), "values": values_BS.contiguous()}
        save_file(live, folder / "live.safetensors")
        shard = sum(p.ds_tensor.numel() for p in actor.module.parameters())
        whole = sum(p.ds_numel for p in actor.module.parameters())
        (folder / "shard.txt").write_text(f"{shard} {whole}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
