"""Plug the teacher into the building of the reference."""

from __future__ import annotations

from dataclasses import replace

from rlhf.base.types import TokenEngine
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.models.sources import ModelSource
from rlhf.phases.shared.policies import policy_source


def find_reference(config: RunConfig, phase: Phase, _: TokenEngine) -> ModelSource | None:
    """Return the source of the teacher; None in a phase without one."""
    if phase is not Phase.ppo:
        return None
    key = "ppo.teacher_path"
    path = str(expand_user_path(str(config.ppo.teacher_path), key=key))
    source = policy_source(config)
    return replace(source, key=key, path=path, revision=None, architecture=None)
