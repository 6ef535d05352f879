"""Rollouts by DeepSpeed's Hybrid Engine.

Its kernels run on GPUs alone. On a CPU it runs here with DeepSpeed's own torch versions of them,
which shows everything but the kernels: that its layers fit transformers 5, that masks are right,
and that they read the weights as they are now.
"""

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.errors import CapabilityError
from rlhf.base.types import PromptBatch, Responses
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Device, Dtype
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.data.collate import collate_prompts
from rlhf.engine.deepspeed_engine import DeepSpeedEngine
from rlhf.engine.devices import current_ranks
from rlhf.engine.select import build_engine
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.models.language_model import LanguageModel
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options import Backend
from rlhf.options.average.moving_average import MovingAverage
from rlhf.options.hybrid_engine import hybrid_backend
from rlhf.options.hybrid_engine.hybrid_actor import adapt_policy
from rlhf.options.hybrid_engine.hybrid_rollout import (
    HybridEngineRollout,
    HybridSettings,
    adapt_deepspeed_layers,
    hybrid_engine_unavailable_reason,
)
from rlhf.options.hybrid_engine.supported_models import (
    REASONS,
    Greedy,
    describe_parity_failure,
    model_unsupported_reason,
)
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from rlhf.run.metric_table import describe_undocumented_metric
from tests.conftest import Compose
from tests.engine.test_deepspeed_config import zero
from tests.models_on_disk import save_models
from tests.rollout.decoder_checks import some_prompts, tiny_model
from tests.zero_settings import adamw

PROMPT_TOKENS, MAX_TOKENS, MAX_ROWS = 12, 6, 4
SAMPLING = SamplingSettings(max_tokens=MAX_TOKENS, temperature=1.0, top_k=0, top_p=1.0)
SETTINGS = HybridSettings(
    dtype=torch.float32, max_rows=MAX_ROWS, max_prompt_tokens=PROMPT_TOKENS, cuda_graphs=False
)
SECTION = {"enabled": True, "max_out_tokens": PROMPT_TOKENS + MAX_TOKENS}
END = 37
WORDS: dict[str, Any] = {"pad_id": 0, "stop": StopTexts(train_tokenizer(["a"], vocab_size=260), ())}
ADAMW = adamw(lr=0.05, follow=partial(MovingAverage, beta=0.5))


def prompts_of(lengths: tuple[int, ...], device: str = "cpu") -> PromptBatch:
    draws = torch.rand(len(lengths), MAX_TOKENS, generator=torch.Generator().manual_seed(0))
    place = torch.device(device)
    texts = [""] * len(lengths)
    return collate_prompts(some_prompts(lengths), texts, draws, pad_id=0, device=place)


class Nothing:
    """A compiled extension without a single kernel."""


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's inference layers, new, with its own torch versions of the kernels.

    These call transformers' rotary embedding in the form of its version 4, which it gets here. As
    the kernel does, the products of an MLP add attention's output to the residual in place.
    """
    current_ranks(Device.cpu)  # tells DeepSpeed the device before its first import
    from deepspeed.model_implementations.transformers import ds_transformer
    from deepspeed.ops.transformer.inference import ds_attention, ds_mlp
    from deepspeed.ops.transformer.inference.op_binding import mlp_gemm, workspace
    from deepspeed.ops.transformer.inference.op_binding.base import BaseOp
    from transformers.models.llama import modeling_llama

    context, rotate = workspace.InferenceContext, modeling_llama.apply_rotary_pos_emb

    def rotary_of(_: Any, dim: int, theta: float, device: Any = None) -> Any:
        frequencies = theta ** -(torch.arange(0, dim, 2, device=device) / dim)

        def table(_: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
            angles = torch.outer(torch.arange(tokens, device=device).float(), frequencies)
            return torch.cat([angles, angles], dim=-1).cos(), torch.cat([angles] * 2, dim=-1).sin()

        return table

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Any = 1) -> Any:
        if isinstance(positions, int):
            return rotate(q, k, cos, sin)  # transformers' own call
        tokens = q.shape[2]
        first = 0 if tokens > 1 else context.Instance().current_tokens() - 1
        columns = slice(first, first + tokens)
        return rotate(q, k, cos[None, columns].to(q.dtype), sin[None, columns].to(q.dtype))

    multiply = mlp_gemm.MLPGemmOp.rms_mlp_gemm_fallback

    def multiply_in_place(op: Any, attention: Tensor, residual: Tensor, *args: Any) -> Any:
        found, total = multiply(op, attention, residual, *args)
        return [found, residual.copy_(total)]

    monkeypatch.setattr(mlp_gemm.MLPGemmOp, "rms_mlp_gemm_fallback", multiply_in_place)
    monkeypatch.setattr(BaseOp, "inference_module", Nothing())
    monkeypatch.setattr(context, "_InferenceContext__instance", None)
    monkeypatch.setattr(context, "get_rotary", rotary_of)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    monkeypatch.setattr(ds_transformer.DeepSpeedTransformerInference, "layer_id", 0)
    monkeypatch.setattr(ds_transformer.DeepSpeedTransformerInference, "workspace", None)
    monkeypatch.setattr(ds_attention.DeepSpeedSelfAttention, "num_layers", 0)
    monkeypatch.setattr(ds_attention.DeepSpeedSelfAttention, "_qkv_buffers", [])
    monkeypatch.setattr(ds_mlp.DeepSpeedMLP, "_inter_w_buffers", [])


def actor_of(model: Any, *, stage: int = 0, device: Device = Device.cpu, **fields: Any) -> Any:
    policy = LanguageModel(model)
    adapt_policy(policy)
    dtype = Dtype.fp32 if device is Device.cpu else Dtype.bf16
    sections = {"hybrid_engine": SECTION | fields}
    settings = EngineSettings(zero=zero(stage=stage), dtype=dtype, actor_sections=sections)
    engine = build_engine(
        policy,
        role=Role.actor,
        settings=settings,
        plan=BatchPlan(per_rank=1, micro=1, accumulation=1),
        ranks=current_ranks(device),
        optimizer=ADAMW,
    )
    assert isinstance(engine, DeepSpeedEngine)  # on one rank too
    gc.freeze()  # what was imported: the Hybrid Engine collects garbage before each generation
    return engine


def llama(**fields: Any) -> Any:
    model = tiny_model("llama", num_key_value_heads=4, **fields)
    model.generation_config.eos_token_id = END
    return model


def learn(actor: Any, prompts: PromptBatch) -> None:
    """One optimiser step that moves every weight."""
    from rlhf.base.types import TokenPositions

    rows, columns = prompts.attend_BP.nonzero(as_tuple=True)
    picks = TokenPositions(rows, columns, prompts.ids_BP[rows, columns])
    actor.backward(actor(prompts.ids_BP, picks).logprobs_N.sum())
    actor.step()


def state_of(actor: Any) -> dict[str, Tensor]:
    """Copies of all weights that the model computes with."""
    with actor.gather_parameters(actor.module):
        return {name: p.detach().clone() for name, p in actor.module.named_parameters()}


def same(found: Responses, expected: Responses) -> bool:
    pairs = zip(found[:3], expected[:3], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "fields"),
    [
        *((stage, {}) for stage in (0, 3)),
        *(pytest.param(stage, {}, marks=pytest.mark.soak) for stage in (1, 2)),
        pytest.param(3, {"pin_parameters": False}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("torch_kernels")
def test_responses_are_those_of_generate(stage: int, fields: dict[str, Any]) -> None:
    actor = actor_of(llama(), stage=stage, **fields)
    layer = actor.module.generate.__self__._inference_containers[0].module
    layer.attention._qkv_buffers[1].fill_(torch.nan)  # as memory that nobody has written may be
    assert adapt_deepspeed_layers(actor.module) == 2
    hf, hybrid = HfRollout(SAMPLING, **WORDS), HybridEngineRollout(SAMPLING, SETTINGS, **WORDS)
    # More than max_rows, so in two parts; and fewer prompts than that.
    few, many = prompts_of((5, 1)), prompts_of((5, 1, 9, 3, 12, 4))
    assert same(hybrid.generate(actor, few), hf.generate(actor, few))
    before = hf.generate(actor, many)
    assert same(hybrid.generate(actor, many), before)
    assert before.ended_B.any()
    assert not before.ended_B.all()
    states = [state_of(actor)]
    for _ in range(2):
        learn(actor, many)
        states.append(state_of(actor))
        after = hf.generate(actor, many)
        assert not same(after, before)
        assert same(hybrid.generate(actor, many), after)
    with actor.follower.swap_in():
        # DeepSpeed keeps some of the weights elsewhere: they must have followed too.
        for name, averaged in state_of(actor).items():
            first, second, third = (state[name] for state in states)  # beta is 0.5
            assert not torch.equal(second, third), name
            assert torch.allclose(averaged, 0.25 * (first + second) + 0.5 * third), name
        average = hf.generate(actor, many)
        assert not same(average, after)
        assert same(hybrid.generate(actor, many), average)
    assert same(hybrid.generate(actor, many), after)
    actor.close()


@pytest.mark.usefixtures("torch_kernels")
def test_with_graphs_every_batch_has_one_shape_and_own_layers_are_back() -> None:
    actor = actor_of(llama(attention_dropout=0.9))  # only while it learns
    adapt_deepspeed_layers(actor.module)
    prompts, seen, model = prompts_of((5, 1, 9)), [], actor.module.pretrained
    attention = model.config._attn_implementation
    expected = HfRollout(SAMPLING, **WORDS).generate(actor, prompts)
    engine = actor.module.generate.__self__
    generate = engine._generate

    def watched(**options: Any) -> Tensor:
        ids: Tensor = generate(**options)
        length = options["max_new_tokens"], options["min_new_tokens"]
        seen.append((tuple(options["input_ids"].shape), length, ids.shape[1]))
        return ids

    engine._generate = watched
    backend = HybridEngineRollout(SAMPLING, replace(SETTINGS, cuda_graphs=True), **WORDS)
    found = backend.generate(actor, prompts)
    assert same(backend.generate(actor, prompts), found)
    shape = (MAX_ROWS, PROMPT_TOKENS)
    assert seen == [(shape, (MAX_TOKENS, MAX_TOKENS), PROMPT_TOKENS + MAX_TOKENS)] * 3  # one check
    longest = expected.ids_BT.shape[1]
    assert torch.equal(found.ids_BT[:, :longest], expected.ids_BT)
    assert torch.equal(found.ended_B, expected.ended_B)
    assert not found.keep_BT[:, longest:].any()
    assert model.config._attn_implementation == attention
    assert model.model.layers[0].forward.__self__ is model.model.layers[0]
    assert actor.module.training
    actor.close()


@pytest.mark.usefixtures("torch_kernels")
def test_a_wrong_engine_is_refused() -> None:
    actor, backend = actor_of(llama()), HybridEngineRollout(SAMPLING, SETTINGS, **WORDS)
    with pytest.raises(CapabilityError, match=r"layers fail .*'tuple' object has no attribute"):
        backend.generate(actor, prompts_of((5, 1)))  # its layers are not adapted: they return pairs
    adapt_deepspeed_layers(actor.module)
    container = actor.module.generate.__self__._inference_containers[0].module
    container.mlp.output_w = nn.Parameter(container.mlp.output_w.flip(0))
    for _ in range(2):  # not only the first time
        with pytest.raises(CapabilityError, match=r"of response \d .* use rollout=fast"):
            backend.generate(actor, prompts_of((5, 1, 9)))
    actor.close()


def test_no_layers_are_refused() -> None:
    with pytest.raises(CapabilityError, match=r"replaced no layer of Llama.*use rollout=fast"):
        adapt_deepspeed_layers(llama())  # without any engine


# Three rows, two tokens, three words: row 2 is as sure of word 2 as of word 1, at token 1.
PLAIN = torch.tensor(
    [
        [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]],
        [[0.2, 0.2, 0.6], [0.5, 0.3, 0.2]],
        [[0.6, 0.3, 0.1], [0.1, 0.45, 0.45]],
    ]
).log()
IDS = torch.tensor([[0, 1], [2, 0], [0, 1]])
LOGPROBS = PLAIN.gather(-1, IDS[..., None])[..., 0]


def found_in(ids: Tensor, logprobs: Tensor, dtype: torch.dtype = torch.float32) -> str | None:
    def plain(taken: Tensor) -> Tensor:
        assert torch.equal(taken, ids)
        return PLAIN

    return describe_parity_failure(lambda: Greedy(ids, logprobs), plain, dtype=dtype)


def changed(tensor: Tensor, row: int, token: int, value: float) -> Tensor:
    copy = tensor.clone()
    copy[row, token] = value
    return copy


def test_engines_that_agree_pass() -> None:
    assert found_in(IDS, LOGPROBS) is None
    assert found_in(changed(IDS, 2, 1, 2), LOGPROBS) is None  # a tie, decided otherwise
    # log 0.6, 0.2, 0.2 deviate by 0.6343: 0.0127 is allowed in fp32, 0.063 in bf16.
    assert found_in(IDS, changed(LOGPROBS, 1, 0, PLAIN[1, 0, 2] + 0.012)) is None
    apart = changed(LOGPROBS, 1, 0, PLAIN[1, 0, 2] - 0.06)
    assert found_in(IDS, apart, torch.bfloat16) is None
    assert found_in(IDS, apart) is not None


def test_the_first_difference_is_named() -> None:
    wrong_ids = changed(changed(IDS, 0, 1, 2), 1, 0, 1)
    taken = PLAIN.gather(-1, wrong_ids[..., None])[..., 0]
    found = str(found_in(wrong_ids, taken))
    assert "at token 0 of response 1 greedy decoding takes 1" in found
    assert "own layers take 2" in found
    found = str(found_in(IDS, changed(LOGPROBS, 0, 1, -1.0)))
    assert "at token 1 of response 0 the log-probability of 1 is -1.0000, but -0.2231" in found
    assert found_in(IDS, changed(LOGPROBS, 0, 1, float("nan"))) is not None


def config_of(model_type: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **fields)


def test_models_are_known_by_their_configs() -> None:
    heads = {"hidden_size": 64, "num_attention_heads": 4}
    assert model_unsupported_reason(config_of("llama", **heads)) is None
    assert "has no layers" in str(model_unsupported_reason(config_of("qwen2")))
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for field, value, reason in (
        ("num_key_value_heads", 2, "has num_key_value_heads=2"),
        ("head_dim", 8, "has head_dim=8"),
        ("hidden_act", "gelu", "has hidden_act=gelu"),
        ("attention_bias", True, "has attention_bias=True"),
        ("mlp_bias", True, "has mlp_bias=True"),
        ("rope_parameters", rope, "rope_type=linear"),
    ):
        config = config_of("llama", **heads, **{field: value})
        assert reason in str(model_unsupported_reason(config))


@pytest.mark.soak
@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("model_type", [*REASONS, "qwen2"])
def test_models_that_are_refused_do_not_run(model_type: str) -> None:
    """What the table says of each is so, with the versions that are installed."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    sizes |= {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "num_heads": 4}
    sizes |= {"num_layers": 2, "ffn_dim": 64, "intermediate_size": 64}
    sizes |= {"word_embed_proj_dim": 16, "num_key_value_heads": 4}
    kinds = {"attention_types": [[["global"], 2]]} if model_type == "gpt_neo" else {}
    model = AutoModelForCausalLM.from_config(config_of(model_type, **sizes, **kinds))

    def roll_out() -> None:
        actor = actor_of(model)
        adapt_deepspeed_layers(actor.module)
        HybridEngineRollout(SAMPLING, SETTINGS, **WORDS).generate(actor, prompts_of((5, 1)))

    with pytest.raises((AttributeError, CapabilityError, RuntimeError)):
        roll_out()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="DeepSpeed's kernels run on GPUs only")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_kernels_agree_with_the_model_on_a_gpu(stage: int) -> None:
    """The parity check is part of the first call, and refuses kernels that say otherwise."""
    assert hybrid_engine_unavailable_reason(tensor_parallel=1) is None
    size = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
    actor = actor_of(llama(**size), stage=stage, device=Device.cuda)
    assert adapt_deepspeed_layers(actor.module) == 2
    backend = HybridEngineRollout(SAMPLING, replace(SETTINGS, dtype=torch.bfloat16), **WORDS)
    prompts = prompts_of((5, 1, 9, 3), "cuda")
    assert backend.generate(actor, prompts).keep_BT.any()
    learn(actor, prompts)
    backend.generate(actor, prompts)
    actor.close()


@pytest.mark.slow
@pytest.mark.usefixtures("torch_kernels")
def test_ppo_learns_from_its_rollouts(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of PPO on the CPU: its rules and the look at the machine are passed over."""
    monkeypatch.setattr(hybrid_backend, "hybrid_engine_unavailable_reason", lambda **_: None)
    monkeypatch.setattr(hybrid_backend, "op_unavailable_reason", lambda _: None)
    save_models(tmp_path, policy="some words", reward="some words")
    paths = ["phase=ppo", "model=pretrained", "model@reward_model=pretrained"]
    paths += [f"model.path={tmp_path / 'policy'}", f"reward_model.path={tmp_path / 'reward'}"]
    sizes = ["ppo.rollout_batch_size=4", "ppo.mini_batch_size=4", "rollout.max_response_tokens=5"]
    sizes += ["rollout.max_prompt_tokens=10", "hardware.dtype=fp32", "ppo.steps=1"]
    sizes += ["data.template=plain"]
    config = to_run_config(compose([*paths, *sizes]))
    stats = {}
    for backend in (Backend.hf, Backend.hybrid_engine):
        chosen = replace(config, rollout=replace(config.rollout, backend=backend))
        engine = RLHFEngine(chosen)
        is_hybrid = backend is Backend.hybrid_engine
        assert isinstance(engine.actor, DeepSpeedEngine if is_hybrid else TorchEngine)
        trainer = PPOTrainer(engine, chosen.ppo)
        prompts = engine.prompts(["some", "words", "to learn", "from"], step=0)
        stats[backend] = trainer.train_rlhf(trainer.generate_experience(prompts))
        engine.close()
    hf, hybrid = (stats[b].metrics for b in (Backend.hf, Backend.hybrid_engine))
    assert hybrid.pop("rollout/accelerated_layers") == 1
    assert hybrid.keys() == hf.keys()
    assert describe_undocumented_metric("rollout/accelerated_layers") is None
    for name in ("ppo/score_mean", "ppo/response_tokens", "ppo/entropy", "ppo/actor_loss"):
        assert hybrid[name] == pytest.approx(hf[name], rel=1e-3, abs=1e-5), name
