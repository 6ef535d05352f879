"""Write model folders that appear complete or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.atomic import replace_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@contextmanager
def replace_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill, which replaces ``folder`` if the block succeeds."""
    with replace_atomically(folder) as building:
        building.mkdir(parents=True)
        yield building
        apply_umask(building)


def apply_umask(folder: Path) -> None:
    """Give the weights in ``folder`` its own permissions; safetensors lets only the owner read."""
    for file in folder.rglob("*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)


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
    with replace_folder_atomically(folder) as building:
        write(building)
        tokenizer.save_pretrained(building)
        card.save(building / "README.md")
