"""One rank of test_sharded_models: what is built, trained and saved sharded equals the whole."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf.base.ranks import Ranks
from rlhf.base.types import LogprobOptions, SequenceBatch, TokenPositions
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.settings import EngineSettings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.language_model import LanguageModel, Scorer
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options.lora.models import find_export, merge_adapters_in_stream, save_adapter
from rlhf.phases.shared.exporting import Export
from rlhf.run.model_folder import tensors_to_save
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import (
    disturb,
    save_base,
    small_tokenizer,
    some_ids,
    source_of,
    whole_state,
)
from tests.zero_settings import adamw, zero_config

LORA = lora_config()
OPTIONS = LogprobOptions(0.8, entropy_gradient=True)
PLAN = BatchPlan(per_rank=2, micro=2, accumulation=1)
TRAINED = "stored scorer llama"  # the case in which the engine also takes a step
RUN: Any = None  # no key is read to save a whole model
Build = Callable[..., Any]


def inner(model: Any) -> Any:
    return model.pretrained if isinstance(model, Scorer) else model


def sharded_engine(dtype: Dtype, ranks: Ranks) -> Any:
    """Arguments of an engine whose weights are all sharded, however small."""
    zero = zero_config(stage=3, param_persistence_threshold=0)
    return {
        "settings": EngineSettings(zero=zero, dtype=dtype),
        "plan": PLAN,
        "ranks": ranks,
    }


def check(name: str, build: Build, dtype: Dtype, ranks: Ranks, folder: Path) -> None:
    """Weights, outputs and what is saved are those of the whole model; each rank has its half."""
    whole = build(shard=None)
    shared = sharded_engine(dtype, ranks)
    sharded = build(shard=build_parameter_placer(Role.reward, **shared))
    assert all(p.ds_tensor.numel() == -(-p.ds_numel // 2) for p in sharded.parameters()), name
    if dtype is Dtype.bf16:
        for parameter in whole.parameters():
            parameter.data = parameter.data.bfloat16()
    expected = whole_state(inner(whole))
    is_scorer = isinstance(sharded, Scorer)
    engine = DeepSpeedEngine(
        sharded if is_scorer else LanguageModel(sharded),
        role=Role.critic if name == TRAINED else Role.reward,
        optimizer=adamw() if name == TRAINED else None,
        **shared,
    )
    tensors = tensors_to_save(inner(sharded))
    assert list(tensors) == list(expected), name
    for key, tensor in engine.stream_state(tensors):
        assert tensor.dtype == expected[key].dtype, (name, key)
        assert torch.equal(tensor, expected[key]), (name, key)
    with torch.no_grad(), engine.evaluating():
        outputs = [model(some_ids()) for model in (whole.eval(), sharded)]
    values = [o if isinstance(o, Tensor) else o.logits for o in outputs]
    torch.testing.assert_close(values[1], values[0])

    model: Any = engine.module.pretrained
    plain = Export(model, engine, tensors_to_save(model))
    export = find_export(RUN, engine, None) or plain
    export.write(folder if ranks.is_main else None, shard_bytes=4000)
    if ranks.is_main:
        state = dict(merge_adapters_in_stream(inner(whole), expected.items()))
        inner(whole).save_pretrained(folder / "by transformers", state_dict=dict(state))
        saved, reference = (
            {n: t for file in place.glob("*.safetensors") for n, t in load_file(file).items()}
            for place in (folder, folder / "by transformers")
        )
        assert saved.keys() == reference.keys(), name
        assert all(torch.equal(saved[key], reference[key]) for key in saved), name
        assert len(list(folder.glob("model-*"))) > 1
        for file in (folder / "by transformers").glob("*config.json"):
            assert (folder / file.name).read_text() == file.read_text(), (name, file.name)
        source = ModelSource(key="k", path=str(folder))
        loaded = (build_scorer if is_scorer else build_actor)(source, small_tokenizer(), seed=9)
        for key, tensor in whole_state(inner(loaded)).items():
            assert torch.equal(tensor, state[key].float()), (name, key)
    if name == TRAINED:
        check_step(engine, ranks, folder / "trained")
    engine.close()


def check_step(engine: DeepSpeedEngine, ranks: Ranks, folder: Path) -> None:
    """What is saved after a step gives the scores that the sharded model gives."""

    def scores() -> Tensor:
        with torch.no_grad(), engine.evaluating():
            return engine(some_ids())

    before = scores()
    engine.backward(engine(some_ids() + ranks.rank).square().mean())
    engine.step()
    after = scores()
    assert not torch.equal(after, before)
    folder.mkdir(exist_ok=True)
    model: Any = engine.module.pretrained
    Export(model, engine, tensors_to_save(model)).write(folder if ranks.is_main else None)
    if ranks.is_main:
        loaded = build_scorer(ModelSource(key="k", path=str(folder)), small_tokenizer(), seed=9)
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(some_ids()), after)


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


def check_policy(family: str, ranks: Ranks, *, tied: bool) -> None:
    """The chunks of a policy's output layer see its whole weight, in both passes."""
    ids_BS = torch.arange(12).reshape(2, 6) + 10 * ranks.rank + 3
    keep_BS = torch.arange(6) < torch.tensor([[4], [6]])
    batch = SequenceBatch(ids_BS, keep_BS, keep_BS)
    source = source_of(family, fields={"tie_word_embeddings": tied})
    plain, sharded = (build_actor(source, small_tokenizer(), seed=1) for _ in "ab")
    shared = sharded_engine(Dtype.fp32, ranks)
    policy = LanguageModel(sharded)
    engine = DeepSpeedEngine(policy, role=Role.actor, optimizer=adamw(), **shared)
    expected, loss = plain_loss(plain, batch), loss_of(engine, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    expected.backward()
    gradients = [ranks.sum(p.grad) for p in plain.parameters() if p.grad is not None]
    engine.backward(loss)
    norm = torch.tensor(engine.step().grad_norm)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients), rtol=1e-5, atol=0)
    with engine.evaluating():
        after = loss_of(engine, batch)
    assert (after - expected).abs() > 1e-2 * expected.abs(), "the step has moved the weights"


def save_sources(folder: Path) -> None:
    """One family in fp32, one in bf16 and in several files, and an adapter over the first."""
    tokenizer = small_tokenizer()
    save_base(folder / "llama", "llama", tokenizer)
    half = build_actor(source_of("opt"), tokenizer, seed=1).bfloat16()
    half.save_pretrained(folder / "half", max_shard_size="20KB")
    assert len(list((folder / "half").glob("model-*.safetensors"))) > 1
    base = folder / "llama"
    adapted = build_actor(
        ModelSource(key="k", path=str(base)), tokenizer, seed=1, extensions=adding(LORA)
    )
    disturb(adapted)
    (folder / "adapter").mkdir()
    save_adapter(folder / "adapter", adapted, whole_state(adapted).items(), base=str(base))


def cases(folder: Path) -> Iterator[tuple[str, Build]]:
    """Ways to build a model, each with its name."""
    tokenizer, wider = small_tokenizer(), train_tokenizer(["more and other words"], vocab_size=280)
    random = {
        "few words": source_of("gpt2", fields={"vocab_size": 200}),
        "tied": source_of("llama", fields={"tie_word_embeddings": True}),
    }
    names = ("llama", "half", "adapter")
    stored = {name: ModelSource(key="k", path=str(folder / name)) for name in names}

    def case(build: Build, source: ModelSource, words: Any = tokenizer, **options: Any) -> Build:
        return lambda shard: build(source, words, seed=3, shard=shard, **options)

    for name, source in random.items():
        yield f"random {name}", case(build_actor, source)
    for name, source in stored.items():
        if name != "adapter":
            yield f"stored scorer {name}", case(build_scorer, source)
        if name != "half":
            yield f"stored {name}", case(build_actor, source)
    yield "more words", case(build_actor, stored["half"], wider)
    yield "adapters, scorer", case(build_scorer, stored["half"], extensions=adding(LORA, seed=3))


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    ranks = current_ranks(Device.cpu)
    if ranks.is_main:
        save_sources(folder)
    ranks.barrier()
    for number, (name, build) in enumerate(cases(folder)):
        written = folder / f"written {name}"
        if ranks.is_main:
            written.mkdir()
        check(name, build, (Dtype.fp32, Dtype.bf16)[number % 2], ranks, written)
    for family, tied in (("llama", True), ("llama", False), ("opt", True)):
        check_policy(family, ranks, tied=tied)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
