"""Choose the pool that a configuration asks for."""

from __future__ import annotations

from rlhf.config.schema.environment import EnvironmentConfig
from rlhf.environments.factories import environment_factory
from rlhf.environments.local_pool import LocalPool
from rlhf.environments.process_pool import ProcessPool


def build_pool(config: EnvironmentConfig) -> LocalPool | ProcessPool:
    """Return the pool of environments of a rank.

    Raises:
        ConfigError: if the environment cannot be made, or needs processes of its own.
    """
    if config.processes > 0:
        return ProcessPool(config)
    return LocalPool(environment_factory(config))
