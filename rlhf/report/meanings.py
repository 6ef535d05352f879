"""Describe what the numbers of a result measure: only numbers of one meaning are compared.

Scores have the meaning of what gave them. A reward model is known by the hash of its weights, so
runs that share it (``from_run``, the store of phases) agree, and all other runs do not.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.checkpoint.manifest import MANIFEST
from rlhf.checkpoint.results import read_json_object
from rlhf.config.choices import ModelInit, RewardKind
from rlhf.report.summary import objective_name

SHOWN = 8  # digits of a hash


def measure_meanings(
    folder: Path, keys: Mapping[str, Any], phases: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return, by title in comparisons, what measures mean that differ between runs.

    ``keys`` is the configuration of the run in ``folder``, ``phases`` the results of its phases.
    """
    accuracy_of = "DPO" if "dpo" in phases else "the reward model"
    meanings = {
        "score": f"by {_scorer(folder, keys)}",
        "accuracy": f"of {accuracy_of} on {_texts(keys)}",
        "perplexity": f"of {_texts(keys)}",
    }
    name = objective_name(phases)
    measured = next((title for title in meanings if title in name), None)
    return meanings | {"objective": f"{name}, {meanings[measured]}" if measured else name}


def _scorer(folder: Path, keys: Mapping[str, Any]) -> str:
    """Return a name of what scores the answers: a reward model, the judge, or ``rewards``."""
    parts = {key: value for key, value in keys.items() if key.startswith("rewards.")}
    kinds = {value for key, value in parts.items() if re.fullmatch(r"rewards\.[^.]+\.kind", key)}
    if not parts and keys.get("reward_model.init") == ModelInit.gold:
        return "the judge"
    found = [f"rewards {_digest(parts)}"] if parts else []
    if not parts or RewardKind.model in kinds:
        found.append(f"reward model {_weights_of_reward_model(folder, keys)}")
    return " with ".join(found)


def _weights_of_reward_model(folder: Path, keys: Mapping[str, Any]) -> str:
    """Return a hash of the weights that the run scored with, or of the keys that choose them."""
    path = folder / "reward" / MANIFEST
    if path.is_file():
        files = read_json_object(path)["files"]
        return _digest({name: files[name] for name in files if name.endswith(".safetensors")})
    return _digest({key: keys[key] for key in keys if key.startswith("reward_model.")})


def _texts(keys: Mapping[str, Any]) -> str:
    """Return a name of the data and of the tokenizer that divides its texts."""
    data = [keys.get(f"data.{name}") for name in ("source", "path", "eval_path", "subset")]
    tokenizer = [keys.get(f"model.{name}") for name in ("tokenizer", "path", "vocab_size")]
    named = [str(value) for value in (*data, *tokenizer) if value is not None]
    return " ".join(named)


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:SHOWN]
