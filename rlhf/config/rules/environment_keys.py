"""Rules for the keys of the config group ``environment`` alone, without the rest of a run."""

from __future__ import annotations

from rlhf.base.errors import ConfigError
from rlhf.config.choices import EnvironmentKind
from rlhf.config.schema.environment import EnvironmentConfig

EMBEDDED = (
    EnvironmentKind.number_guessing,
    EnvironmentKind.calculator,
    EnvironmentKind.blackjack,
)
OF_PACKAGES = (
    EnvironmentKind.gymnasium,
    EnvironmentKind.textarena,
    EnvironmentKind.reasoning_gym,
    EnvironmentKind.gem,
)
OF_CODE = (EnvironmentKind.tools, EnvironmentKind.custom)


def check_environment_keys(environment: EnvironmentConfig) -> None:
    """Check the keys that a kind of environment needs, and those that it does not read.

    Raises:
        ConfigError: if a key is missing, has the wrong form, or is not read.
    """
    kind = environment.kind
    needed = {"id": kind in OF_PACKAGES, "target": kind in OF_CODE}
    for name, is_needed in needed.items():
        value = getattr(environment, name)
        if is_needed and not value:
            example = "MODULE:CLASS" if name == "target" else "NAME"
            raise ConfigError(
                f"environment.{name} is missing: kind={kind} needs it; add "
                f"environment.{name}={example}"
            )
        if value and not is_needed:
            raise ConfigError(f"environment.{name}={value}: kind={kind} does not read it; use null")
    if kind in OF_CODE and not all(str(environment.target).partition(":")):
        raise ConfigError(
            f"environment.target={environment.target}: kind={kind} needs MODULE:CLASS, such as "
            "my_games:Chess"
        )
    if kind in OF_CODE and not environment.run_code:
        raise ConfigError(
            f"environment.target={environment.target} runs code; if you have read it, add "
            "environment.run_code=true"
        )
    if environment.processes == 0 and kind not in EMBEDDED:
        raise ConfigError(
            f"environment.processes=0 with kind={kind}: only {', '.join(EMBEDDED)} run in the "
            "rank's own process; use environment.processes=4"
        )
