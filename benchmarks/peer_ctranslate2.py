"""CTranslate2's generation on the work of ``rollout.py``, which runs this file in its environment.

A module, not a command. Needs ctranslate2, transformers and torch, and nothing of this project.
Scores are returned, which takes the log-softmax of every step, as a rollout's log-probs do.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from common import peak_gb, start, whole_and_first
from shapes import FIRST_ID, Work


def _name_every_token(folder: Path, vocab: int) -> None:
    """Extend the small tokenizer as the converter requires it: all ids, and all special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), vocab)])
    for name in ("bos_token", "unk_token"):
        if getattr(tokenizer, name) is None:
            setattr(tokenizer, name, tokenizer.eos_token)
    tokenizer.save_pretrained(folder)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of whole generations, of their first tokens alone, and the peak memory."""
    import ctranslate2
    import torch
    from ctranslate2.converters import TransformersConverter

    work = Work(**task["work"])
    kind = {"bf16": "bfloat16", "fp32": "float32"}[task["dtype"]]
    with tempfile.TemporaryDirectory() as folder:
        converted = str(Path(folder) / "model")
        source = shutil.copytree(Path(task["folder"]) / "policy", Path(folder) / "policy")
        _name_every_token(source, task["vocab"])
        TransformersConverter(str(source)).convert(converted)
        model = ctranslate2.Generator(
            converted,
            device="cpu",
            compute_type=kind,
            inter_threads=1,
            intra_threads=len(os.sched_getaffinity(0)),
        )
        words = json.loads((Path(converted) / "vocabulary.json").read_text(encoding="utf-8"))

    def seconds(step: int, tokens: int) -> float:
        ids = random.Random(step)
        prompts = [ids.choices(words[FIRST_ID:], k=length) for length in work.prompt_lengths()]
        started = time.perf_counter()
        found = model.generate_batch(
            prompts,
            max_length=tokens,
            min_length=tokens,
            sampling_topk=0,
            sampling_temperature=1.0,
            return_scores=True,
            include_prompt_in_result=False,
        )
        ended = time.perf_counter()
        if any(len(each.sequences_ids[0]) != tokens for each in found):
            raise AssertionError(f"CTranslate2 answered with other lengths than {tokens} tokens")
        return ended - started

    times = whole_and_first(seconds, tokens=work.response_tokens, repeats=task["repeats"])
    return {**times, "peak_gb": peak_gb(torch.device("cpu"))}


if __name__ == "__main__":
    start(None, measure)
