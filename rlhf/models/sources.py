"""The place from which a model is loaded, with the configuration's options for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.base.errors import CheckpointError
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import ModelInit
from rlhf.config.schema.model import ModelConfig
from rlhf.models.load_errors import RUN_FOLDER, load_failure


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The place of a model's weights, and options; errors name the config key ``key``."""

    key: str
    path: str | None
    revision: str | None = None
    architecture: dict[str, Any] | None = None
    attention: str | None = None
    dropout: float = 0.0
    gradient_checkpointing: bool | int = False  # an int n: only in the first n layers
    compiles: bool = False
    trust_remote_code: bool = False

    @classmethod
    def from_config(cls, model: ModelConfig, *, key: str, dropout: float = 0.0) -> ModelSource:
        """Return the source that ``model`` describes; ``path`` is None if weights are random."""
        is_random = model.init is ModelInit.random
        place = None if is_random else model.path
        return cls(
            key=f"{key}.architecture" if is_random else f"{key}.path",
            path=place and str(expand_user_path(place, key=f"{key}.path")),
            revision=model.revision,
            architecture=model.architecture if is_random else None,
            attention=model.attention,
            dropout=dropout,
            gradient_checkpointing=model.gradient_checkpointing,
            compiles=model.compile,
            trust_remote_code=model.trust_remote_code,
        )

    @classmethod
    def from_folder(cls, folder: Path, *, base: ModelConfig) -> ModelSource:
        """Return the source of a model in ``folder`` that a run has trained from ``base``."""
        return cls(
            key=RUN_FOLDER,
            path=str(folder),
            attention=base.attention,
            compiles=base.compile,
            trust_remote_code=base.trust_remote_code,
        )

    def failure(self, reason: str, *, what: str = "a model") -> CheckpointError:
        """Return the error to raise if ``path`` does not hold ``what``."""
        return load_failure(self.path, reason, key=self.key, what=what)
