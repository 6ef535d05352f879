"""One way of generating, in a process of its own: what ``rollout.py`` compares.

A module that ``rollout.py`` runs, not a command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import peak_gb, start, whole_and_first
from shapes import Work, run_config

Generate = Callable[[int, int], Any]  # of a step's number and the response tokens


def by_generate(task: dict[str, Any], work: Work) -> tuple[Generate, Any]:
    """Hugging Face's generate, as a user calls it."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = torch.device(task["device"])
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task["dtype"]]
    folder = Path(task["folder"]) / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def generate(step: int, tokens: int) -> Any:
        prompts = work.prompts(step, vocab=task["vocab"], device=device)
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=1,
            pad_token_id=0,
            cache_implementation=task["cache"],
            disable_compile=True,
        )
        attend_BP = prompts.attend_BP.long()
        return model.generate(prompts.ids_BP, attention_mask=attend_BP, generation_config=settings)

    return generate, device


def by_rollout(task: dict[str, Any], work: Work) -> tuple[Generate, Any]:
    """The backend that the config names, on the actor that PPO trains."""
    from rlhf import RLHFEngine
    from rlhf.base.cpu import num_usable_cores
    from rlhf.engine.devices import set_torch_threads
    from rlhf.phases.shared.backends import build_rollout_backend
    from rlhf.runtime.worker import keep_freed_memory

    set_torch_threads(num_usable_cores())
    folder, device, dtype = Path(task["folder"]), task["device"], task["dtype"]
    precision = [f"hardware.device={device}", f"hardware.dtype={dtype}"]
    config = run_config(folder, work, [f"rollout={task['backend']}", *precision])
    if config.hardware.keep_freed_memory:
        keep_freed_memory()
    engine = RLHFEngine(config)
    only_first = replace(config.rollout, max_response_tokens=1, min_response_tokens=1)
    backends = {
        work.response_tokens: engine.rollout,
        1: build_rollout_backend(
            replace(config, rollout=only_first),
            engine.tokenizer,
            temperature=1.0,
            dtype=engine.settings.dtype,
            ranks=engine.ranks,
        ),
    }

    def generate(step: int, tokens: int) -> Any:
        prompts = work.prompts(step, vocab=task["vocab"], device=engine.ranks.device)
        return backends[tokens].generate(engine.actor, prompts)

    return generate, engine.ranks.device


MAKERS = {"generate": by_generate, "rollout": by_rollout}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of whole generations, of their first tokens alone, and the peak memory."""
    import torch

    work = Work(**task["work"])
    generate, device = MAKERS[task["kind"]](task, work)

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def seconds(step: int, tokens: int) -> float:
        wait()
        started = time.perf_counter()
        generate(step, tokens)
        wait()
        return time.perf_counter() - started

    times = whole_and_first(seconds, tokens=work.response_tokens, repeats=task["repeats"])
    return {**times, "peak_gb": peak_gb(device)}


if __name__ == "__main__":
    start(None, measure)
