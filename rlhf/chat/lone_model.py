"""One language model to chat with that belongs to no run, from a folder or the hub's cache."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.base.errors import CheckpointError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_paths import expand_user_path
from rlhf.chat.talker import Talker, holds_model, load_talker, require_language_model
from rlhf.config.choices import Dtype
from rlhf.config.freeze import FROZEN
from rlhf.models.sources import ModelSource, load_failure
from rlhf.models.tokenizers import load_tokenizer
from rlhf.rollout.sampling import SamplingSettings

if TYPE_CHECKING:
    from transformers import GenerationConfig

KEY = "MODEL_FOLDER"
MAX_TOKENS = 256


class LoneModel:
    """The model in a folder, with its own tokenizer, chat template and sampling settings."""

    def __init__(self, folder: Path) -> None:
        """Read the model's settings.

        Raises:
            CheckpointError: if the model gives scores.
        """
        self.folder = require_language_model(folder, key=KEY)
        self._own = _read_generation_config(folder)

    @cached_property
    def talker(self) -> Talker:
        """Return the model."""
        return load_talker(
            ModelSource(key=KEY, path=str(self.folder)),
            load_tokenizer(self.folder, key=KEY),
            Dtype.auto,
        )

    @property
    def form_notice(self) -> str | None:
        """Return a notice if the tokenizer has no chat template."""
        if self.talker.expects_turns:
            return None
        return (
            "The tokenizer has no chat template: each line is plain text by itself, which the "
            "model continues."
        )

    @property
    def sampling(self) -> SamplingSettings:
        """Return the sampling that generation_config.json recommends; greedy if it has none."""
        own, positions = self._own, self.talker.num_positions
        return SamplingSettings(
            max_tokens=MAX_TOKENS if positions is None else min(MAX_TOKENS, positions // 2),
            temperature=(own.temperature or 1.0) if own.do_sample else 0.0,
            top_k=own.top_k or 0,
            top_p=own.top_p or 1.0,
        )

    def iterate_compared_models(self) -> Iterator[tuple[str, Talker]]:
        """Refuse to compare: there is one model."""
        raise CheckpointError(
            f"/compare needs the directory of a run with two policies; {self.folder} is one model"
        )

    def score(self, *_: object) -> None:
        """Return None: there is no reward model."""


def find_lone_model(place: Path) -> LoneModel | None:
    """Return the model in the folder ``place``, or of that name in the hub's cache; None: a run.

    Raises:
        CheckpointError: if ``place`` is neither a run nor a model on this machine.
    """
    folder = expand_user_path(place, key="RUN_DIR")
    if (folder / FROZEN).exists():
        return None
    if not folder.is_dir():
        return LoneModel(_cached_snapshot(place))
    if holds_model(folder):
        return LoneModel(folder)
    raise CheckpointError(
        f"{folder} is not the directory of a run: it has no {FROZEN}; and it holds no model: it "
        "has no config.json"
    )


def _cached_snapshot(place: Path) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(place), local_files_only=True))
    except (OSError, ValueError) as error:  # not in the cache, or no name of the hub
        raise CheckpointError(
            f"{place} is no folder, and no model of that name is in the hub's cache on this "
            "machine: give the directory of a run or the folder of a model"
        ) from error


def _read_generation_config(folder: Path) -> GenerationConfig:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").is_file():
        return GenerationConfig()
    with translate_errors(partial(load_failure, folder, key=KEY, what="a model")):
        return GenerationConfig.from_pretrained(folder)
