"""Rules for KTO."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def check(config: RunConfig) -> None:
    """Check that KTO gets no key of pairs, and batches that have a mismatched response."""
    dpo = config.dpo
    if Phase.dpo not in config.phase.order or dpo.unpaired is None:
        return
    reason = "the loss of marks has none; remove it, or use dpo.loss=sigmoid"
    broken = {
        f"dpo.label_smoothing={dpo.label_smoothing}: {reason}": dpo.label_smoothing > 0,
        f"dpo.label_noise={dpo.label_noise}: {reason}": dpo.label_noise > 0,
        "dpo.batch_size=1: the KL estimate gives each prompt the response to another prompt of "
        "the batch; use 2 or more": dpo.batch_size == 1,
    }
    refuse_broken_rule(broken, "dpo.loss=kto with ")
