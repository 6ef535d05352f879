"""Folders and files appear whole or not at all."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.run.model_folder import replace_folder_atomically, save_model
from tests.models_on_disk import small_tokenizer


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_can_be_read_by_those_whom_the_umask_allows(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with replace_folder_atomically(tmp_path / "model") as building:
            save_file({"a": torch.zeros(2)}, building / "model.safetensors")
            (building / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {mode}


def test_a_model_folder_holds_what_was_written_the_tokenizer_and_a_card(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        assert folder != tmp_path / "ppo" / "actor", "it is not in its place before it is whole"
        (folder / "weights").write_text("numbers")

    tokenizer, folder = small_tokenizer(), tmp_path / "ppo" / "actor"
    save_model(folder, write, tokenizer, description="What it is.", task="text-generation")
    assert (folder / "weights").read_text() == "numbers"
    assert type(tokenizer).from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert card.endswith("# ppo/actor\n\nWhat it is.\n")
    save_model(
        folder,
        write,
        tokenizer,
        description="What it is.",
        task="text-generation",
        base_model="org/base",
    )
    assert (folder / "README.md").read_text().startswith("---\nbase_model: org/base\nlibrary_name:")
