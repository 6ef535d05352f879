"""The list of all policies that a run may have, with the names that files give them."""

from __future__ import annotations

from typing import NamedTuple


class Policy(NamedTuple):
    """The names of a policy that a run may have in its directory."""

    name: str
    """The name in results and evaluations."""
    model: str
    """The name in samples and chats."""
    folder: str
    """The folder in the run directory."""
    label: str
    """The name in summaries and reports."""
    suffix: str = ""
    """The end of the measures' names in result.json, such as score_after_SUFFIX."""


# In the order of training.
TRAINED = (
    Policy("sft", "sft", "sft/model", "SFT model"),
    Policy("dpo", "actor", "dpo/actor", "policy of DPO"),
    Policy("ppo", "actor", "ppo/actor", "actor"),
)
# Policies that are made from trained ones.
DERIVED = (Policy("ppo_ema", "actor_ema", "ppo/actor_ema", "averaged actor", "ema"),)
POLICIES = (*TRAINED, *DERIVED)
DERIVED_MODELS = {policy.model for policy in DERIVED}


def folders_by_policy_name() -> dict[str, list[str]]:
    """Return the model folders of each policy name in samples.jsonl, newest first."""
    folders: dict[str, list[str]] = {}
    for policy in POLICIES:
        folders.setdefault(policy.model, []).insert(0, policy.folder)
    return folders
