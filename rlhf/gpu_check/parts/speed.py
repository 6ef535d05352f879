"""Measure rollouts and PPO steps in tokens per second, and transformers on the same weights.

Shapes: B = prompts, P = prompt tokens, T = response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from rlhf.base.foreign_errors import reason_of
from rlhf.base.types import PromptBatch
from rlhf.config.freeze import load_run
from rlhf.gpu_check.rows import (
    CheckSetting,
    Finding,
    Size,
    Task,
    measured_finding,
    skipped_finding,
)
from rlhf.gpu_check.runs import SHORT_RUN, run_to_end
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.phases.shared.backends import build_rollout_backend
from rlhf.rollout.fast import unpad_prompts

COMMON = (
    *SHORT_RUN,
    *("phase.order=[sft,ppo]", "model@reward_model=gold", "sft.epochs=0.1", "sft.batch_size=32"),
    "model.vocab_size=400",
)
# Name of the model, prompts per step, tokens per response, overrides that choose the model.
SHAPES: dict[Size, tuple[str, int, int, tuple[str, ...]]] = {
    Size.tiny: ("tiny model", 16, 16, ()),
    Size.full: ("OPT-350M", 64, 256, ("model=opt_350m", "model.init=random", "model.path=null")),
}
FORCED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def tasks(setting: CheckSetting) -> Iterator[Task]:
    """Yield tasks for two PPO runs, then for each way to generate with the first run's policy."""
    name, prompts, tokens, model = SHAPES[setting.size]
    words = [*COMMON, *model, "ppo.steps=3"]
    words += [f"ppo.rollout_batch_size={prompts}", f"ppo.mini_batch_size={prompts}"]
    words += [f"rollout.{bound}_response_tokens={tokens}" for bound in ("max", "min")]
    shape = f"{name}, {prompts} prompts, {tokens} tokens"
    for backend in ("fast", "hf"):
        run_dir, rollout = setting.folder / backend, f"rollout={backend}"
        yield Task(
            f"PPO step, {rollout}, {shape}", partial(_time_ppo_step, run_dir, [*words, rollout])
        )
    ways = GenerationWays(setting.folder / "fast", prompts, tokens)
    for name, has_graphs in {"rollout=fast": True, "without CUDA graphs": False}.items():
        generate = partial(ways.generate_fast, has_graphs=has_graphs)
        yield Task(name, partial(_time_generation, ways, generate))
    for cache in ("dynamic", "static"):
        way = partial(ways.generate_with_transformers, cache)
        yield Task(f"generate, {cache} cache", partial(_time_other_library, ways, way))
    yield Task(
        "generate_batch", partial(_time_other_library, ways, ways.generate_batch_with_transformers)
    )


def _time_ppo_step(run_dir: Path, words: list[str]) -> Finding:
    ended = run_to_end(run_dir, *words)
    _ = ended.result  # a run that failed raises here
    last = [line for line in ended.metrics if "time/step_seconds" in line][-1]
    parts = ("step", "generate", "score", "train")
    seconds = {part: last[f"time/{part}_seconds"] for part in parts}
    speed = last["speed/tokens_per_second"]
    split = ", ".join(f"{part} {seconds[part]:.2f}" for part in parts[1:])
    return measured_finding(
        f"{speed:,.0f} tokens/s; {seconds['step']:.2f} s a step ({split})",
        tokens_per_second=speed,
        **{f"{part}_seconds": value for part, value in seconds.items()},
    )


class GenerationWays:
    """Ways to generate ``tokens`` tokens for each of ``prompts`` prompts with one policy."""

    def __init__(self, run_dir: Path, prompts: int, tokens: int) -> None:
        self._run_dir = run_dir
        self._texts = [
            f"\n\nHuman: Say it {n} times: {n * n}.\n\nAssistant:" for n in range(prompts)
        ]
        self.tokens = tokens

    @cached_property
    def _engine(self) -> RLHFEngine:
        return RLHFEngine(load_run(self._run_dir))

    @cached_property
    def _prompts(self) -> PromptBatch:
        return self._engine.prompts(self._texts)

    @contextmanager
    def _policy_with_sdpa(self) -> Iterator[Any]:
        """Yield the policy with SDPA attention, the default of transformers."""
        with self._engine.actor.evaluating() as module:
            policy: Any = getattr(module, "pretrained", module)
            attention = policy.config._attn_implementation
            policy.set_attn_implementation("sdpa")
            try:
                yield policy
            finally:
                policy.set_attn_implementation(attention)

    def generate_fast(self, *, has_graphs: bool) -> int:
        """Generate with rollout=fast; return the number of tokens."""
        engine = self._engine
        config = replace(
            engine.config, rollout=replace(engine.config.rollout, cuda_graphs=has_graphs)
        )
        backend = build_rollout_backend(
            config,
            engine.tokenizer,
            temperature=1.0,
            dtype=engine.settings.dtype,
            ranks=engine.ranks,
        )
        responses = backend.generate(engine.actor, self._prompts)
        return int(responses.keep_BT.sum())

    def generate_with_transformers(self, cache: str) -> int:
        """Generate with ``generate`` of transformers; return the number of tokens."""
        from transformers import GenerationConfig

        prompts, tokenizer = self._prompts, self._engine.tokenizer
        settings = GenerationConfig(
            **FORCED,
            min_new_tokens=self.tokens,
            max_new_tokens=self.tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            cache_implementation=cache,
            disable_compile=True,
        )
        with self._policy_with_sdpa() as policy:
            ids_BS = policy.generate(
                prompts.ids_BP,
                attention_mask=prompts.attend_BP.long(),
                generation_config=settings,
            )
        return int(ids_BS[:, prompts.ids_BP.shape[1] :].numel())

    def generate_batch_with_transformers(self) -> int:
        """Generate with ``generate_batch`` of transformers; return the number of tokens."""
        from transformers import GenerationConfig

        # Without an end token, every response has ``tokens`` tokens.
        settings = GenerationConfig(
            **FORCED, max_new_tokens=self.tokens, eos_token_id=-1, pad_token_id=0
        )
        with self._policy_with_sdpa() as policy:
            found = policy.generate_batch(unpad_prompts(self._prompts), generation_config=settings)
        tokens = sum(len(each.generated_tokens) for each in found.values())
        if tokens != self.tokens * len(self._texts):
            raise RuntimeError(f"generate_batch: {tokens} tokens came back; it prints why")
        return tokens


def _time_generation(ways: GenerationWays, generate: Callable[[], int]) -> Finding:
    """Generate twice; return the speed of the second call, after kernels have been compiled."""
    seconds, tokens = [], 0
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        tokens = generate()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    speed = tokens / seconds[-1]
    return measured_finding(
        f"{speed:,.0f} tokens/s; {1e3 * seconds[-1] / ways.tokens:.1f} ms a decode step",
        tokens_per_second=speed,
        seconds=seconds[-1],
        first_seconds=seconds[0],
    )


def _time_other_library(ways: GenerationWays, generate: Callable[[], int]) -> Finding:
    """Measure another library's generation; return a skipped finding if the library raises."""
    try:
        return _time_generation(ways, generate)
    except Exception as error:
        return skipped_finding(f"does not run here: {reason_of(error)}")
