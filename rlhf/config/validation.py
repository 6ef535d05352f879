"""Check a whole configuration by the rules of all groups; find secrets in it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf.base.errors import ConfigError, refuse_broken_rule
from rlhf.base.safe_text import SECRETS, redact
from rlhf.config.batches import batch_plans, rollout_plan
from rlhf.config.choices import Phase
from rlhf.config.effects import refuse_two_replacements
from rlhf.config.schema.checkpoint import check_checkpoint
from rlhf.config.schema.data import check_data
from rlhf.config.schema.hardware import check_hardware
from rlhf.config.schema.keys import ANSWERING_PHASES, check_bounds
from rlhf.config.schema.model import check_models, check_sequence_lengths
from rlhf.config.schema.ppo import check_ppo
from rlhf.config.schema.rewards import check_rewards
from rlhf.config.schema.rollout import check_rollout
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.supervised import check_reward
from rlhf.config.schema.zero import check_training_engine, check_zero
from rlhf.methods import installed_methods, refuse_broken_methods
from rlhf.options import check_exclusions
from rlhf.options.ahead.rules import check_lag
from rlhf.options.average.rules import check_average
from rlhf.options.corrections.rules import check_correction
from rlhf.options.environments.environment_rules import check_environment
from rlhf.options.fused_layers.rules import check_fused_layers
from rlhf.options.hybrid_engine.rules import check_hybrid_engine
from rlhf.options.judges.rules import check_judges
from rlhf.options.lora.rules import check_lora
from rlhf.options.ptx.rules import check_corpus_batches
from rlhf.options.trunk.rules import check_trunk

OPTIONS_CHECKS = (
    check_lag,
    check_correction,
    check_average,
    check_trunk,
    check_fused_layers,
    check_lora,
    check_judges,
    check_hybrid_engine,
)


def validate(config: RunConfig) -> None:
    """Raise ConfigError if ``config`` breaks a rule; the message suggests a fix."""
    refuse_broken_methods()
    texts = [(key, str(entry)) for key, entry in iterate_entries(asdict(config))]
    check_secrets(texts)
    check_control_characters(texts)
    check_bounds(config)
    check_name_and_order(config.name, config.phase.order)
    # Environments come first: the core's rules would raise less helpful errors.
    check_environment(config)
    check_rewards(config)
    check_reward(config)
    check_models(config)
    check_sequence_lengths(config)
    check_data(config)
    check_hardware(config.hardware)
    check_zero(config)
    check_training_engine(config)
    if ANSWERING_PHASES(config) & set(config.phase.order):
        check_rollout(config.rollout)
    if Phase.ppo in config.phase.order:
        check_ppo(config.ppo)
    check_options(config)
    check_checkpoint(config)
    batch_plans(config)
    if Phase.ppo in config.phase.order:
        rollout_plan(config)
        check_corpus_batches(config)


def check_options(config: RunConfig) -> None:
    """Check that the options in use can be combined; check the rules of options and methods."""
    check_exclusions(config)
    refuse_two_replacements(config)
    for check in OPTIONS_CHECKS:
        check(config)
    for method in installed_methods():
        method.check(config)


def check_control_characters(texts: Iterable[tuple[str, str]]) -> None:
    """Check that no text has control characters: they could command a terminal or split a line.

    Texts to search for in responses (rollout.stop, patterns) may have line breaks and tabs.
    """
    for key, text in texts:
        allowed = "\n\t" if key == "rollout.stop" or key.endswith(".pattern") else ""
        if not text.isprintable() and any(
            unicodedata.category(c) == "Cc" and c not in allowed for c in text
        ):
            raise ConfigError(f"{key}={text!r}: must have no control characters; remove them")


def check_name_and_order(name: str, order: list[Phase]) -> None:
    """Check that the name is one path component, and that phases are in InstructGPT's order."""
    listed = f"phase.order=[{','.join(order)}]"
    broken = {
        f"name={name}: must be the name of a folder in runs/, without slashes and not latest": (
            Path(name).name != name or name in {"", "..", "latest"}
        ),
        f"{listed}: dpo replaces ppo; remove dpo or ppo from the list": {Phase.ppo, Phase.dpo}
        <= {*order},
        f"{listed}: must list one phase or more, each once, in the order {', '.join(Phase)}": (
            not order or order != [phase for phase in Phase if phase in order]
        ),
    }
    refuse_broken_rule(broken)


READ_VARIABLE = r"""\$\{\s*oc\.env\s*:\s*["'\\]*(\w+)"""


def check_secrets(texts: Iterable[tuple[str, str]]) -> None:
    """Check that no text looks like a secret; the error names the key but not the secret.

    ``texts`` are pairs of a key and its text.
    """
    for key, text in texts:
        if key.endswith(".revision"):  # a commit has the form of a W&B key
            continue
        for name, secret in SECRETS.items():
            if re.search(secret["pattern"], text):
                raise ConfigError(
                    f"{key}: the value looks like {name}. A configuration is stored in the run "
                    "directory and shown in reports, so it must not hold secrets; "
                    f"{secret.get('instead', 'set an environment variable')}"
                )


def refuse_secret_values(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Check that no value is a secret, not even one that ``${oc.env:...}`` has read."""
    words = (f"{key}={entry}" for key, entry in iterate_entries(asdict(config)))
    refuse_secrets_in_command(words, environment)


def refuse_secrets_in_command(words: Iterable[str], environment: Mapping[str, str]) -> None:
    """Check that no word holds a secret or reads one by ``${oc.env:...}``: Hydra stores words."""
    resolved = {w: re.sub(READ_VARIABLE, lambda m: environment.get(m[1], ""), w) for w in words}
    together = "\n".join({*resolved, *resolved.values()})
    # First search all texts at once, which is fast; almost always there is no secret.
    if redact(together, environment) == together:
        return
    for word, text in resolved.items():
        if any(redact(candidate, environment) != candidate for candidate in (word, text)):
            raise ConfigError(
                f"{redact(word, environment)}: is or holds a key or a password, and commands and "
                "configurations are stored and shown in reports; remove it, and let the "
                "library that needs it read it from the environment (HF_TOKEN, WANDB_API_KEY) or "
                "from ~/.netrc"
            )


def iterate_entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, entry) for each name and value in nested mappings and lists; skip None."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from iterate_entries(item, f"{key}.{name}".lstrip("."))
            yield key, name
    elif isinstance(value, list):
        for item in value:
            yield from iterate_entries(item, key)
    elif value is not None:
        yield key, value
