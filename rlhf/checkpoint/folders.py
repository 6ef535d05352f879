"""Folders and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which takes the place of ``folder`` when the block succeeds."""
    building = folder.with_name(f"{folder.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    yield building
    if folder.exists():
        shutil.rmtree(folder)
    building.rename(folder)


def save_model(
    folder: Path,
    write: Callable[[Path], None],
    tokenizer: PreTrainedTokenizerBase,
    *,
    description: str,
) -> None:
    """Write a Hugging Face folder: what ``write`` puts there, tokenizer and model card."""
    from huggingface_hub import ModelCard, ModelCardData

    header = ModelCardData(library_name="transformers", tags=["rlhf"]).to_yaml()
    title = f"{folder.parent.name}/{folder.name}"
    card = ModelCard(f"---\n{header}\n---\n\n# {title}\n\n{description}\n")
    with whole_folder(folder) as building:
        write(building)
        tokenizer.save_pretrained(building)
        card.save(building / "README.md")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one move: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f"{path.name}.building")
    building.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(building, path)


def phase_result_path(run_dir: Path, phase: str) -> Path:
    """Where a phase leaves its result; the file is there exactly when the phase is finished."""
    return run_dir / phase / "result.json"


def phase_result(run_dir: Path, phase: str) -> dict[str, Any] | None:
    """The result of a finished phase; None while it is not."""
    path = phase_result_path(run_dir, phase)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result
