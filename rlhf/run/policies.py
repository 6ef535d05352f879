"""The list of all policies that a run may have."""

from __future__ import annotations

from itertools import chain

from rlhf.base.seams import Policy
from rlhf.options import hooks_of

# In the order of training.
TRAINED = (
    Policy("sft", "sft", "sft/model", "SFT model"),
    Policy("dpo", "actor", "dpo/actor", "policy of DPO"),
    Policy("ppo", "actor", "ppo/actor", "actor"),
)
DERIVED: tuple[Policy, ...] = tuple(chain.from_iterable(hooks_of("keys", "POLICIES")))
POLICIES = (*TRAINED, *DERIVED)
DERIVED_MODELS = {policy.model for policy in DERIVED}


def folders_by_policy_name() -> dict[str, list[str]]:
    """Return the model folders of each policy name in samples.jsonl, newest first."""
    found: dict[str, list[str]] = {}
    for policy in POLICIES:
        found.setdefault(policy.model, []).insert(0, policy.folder)
    return found
