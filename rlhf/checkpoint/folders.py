"""Write folders and files that appear complete or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.atomic import replacing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which replaces ``folder`` if the block succeeds."""
    with replacing(folder) as building:
        building.mkdir(parents=True)
        yield building


def save_model(
    folder: Path,
    write: Callable[[Path], None],
    tokenizer: PreTrainedTokenizerBase,
    *,
    description: str,
) -> None:
    """Write a Hugging Face folder: the files of ``write``, the tokenizer and a model card."""
    from huggingface_hub import ModelCard, ModelCardData

    header = ModelCardData(library_name="transformers", tags=["rlhf"]).to_yaml()
    title = f"{folder.parent.name}/{folder.name}"
    card = ModelCard(f"---\n{header}\n---\n\n# {title}\n\n{description}\n")
    with whole_folder(folder) as building:
        write(building)
        tokenizer.save_pretrained(building)
        card.save(building / "README.md")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically: a reader sees the old file or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as building:
        building.write_text(json.dumps(content, indent=2) + "\n")


def phase_result_path(run_dir: Path, phase: str) -> Path:
    """Return the path of a phase's result; the file exists exactly if the phase is finished."""
    return run_dir / phase / "result.json"


def phase_result(run_dir: Path, phase: str) -> dict[str, Any] | None:
    """Return the result of a finished phase; None if the phase is not finished."""
    path = phase_result_path(run_dir, phase)
    if not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    return result
