"""Scores of EleutherAI's lm-eval on its standard tasks, which it downloads from the hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.base.errors import CapabilityError, ConfigError


def require_lm_eval() -> Any:
    """Return the imported package lm_eval.

    Raises:
        CapabilityError: if lm_eval is not installed.
    """
    try:
        import lm_eval
    except ModuleNotFoundError as error:
        raise CapabilityError(
            "--lm-eval: the package lm-eval is not installed; pip install lm-eval"
        ) from error
    return lm_eval


def run_benchmarks(folders: Mapping[str, Path], tasks: Sequence[str]) -> dict[str, Any]:
    """Return a dict: name in ``folders`` -> task -> metric -> value.

    Raises:
        ConfigError: if lm-eval does not know a task, or cannot download it.
    """
    lm_eval = require_lm_eval()
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        has_template = (folder / "chat_template.jinja").exists()
        try:
            results = lm_eval.simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder)},
                tasks=list(tasks),
                apply_chat_template=has_template,
            )["results"]
        except (KeyError, ValueError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"--lm-eval {' '.join(tasks)}: {reason}") from error
        found[name] = {
            task: {k.partition(",")[0]: v for k, v in values.items() if isinstance(v, float)}
            for task, values in results.items()
        }
    return found
