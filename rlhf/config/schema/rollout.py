"""Schema and rules of the config group ``rollout``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import When
from rlhf.config.roles import SHARDED_WEIGHTS
from rlhf.config.schema.keys import (
    ABOVE_0,
    ABOVE_0_TO_1,
    AT_LEAST_0,
    EVERY_PHASE,
    FROM_0_BELOW_1,
    ONLY_PPO,
    AtResume,
    Unread,
    key,
    needs,
)

if TYPE_CHECKING:
    from rlhf.options import RolloutConfig

LOGPROBS = needs("backend", "fast", "vllm_server")
REUSE_DEPENDS = needs("reuse_logprobs", "auto")
NO_DROPOUT = Unread(("ppo.actor_dropout",), bool, "use {key}=0")
LIMITS_ROWS = needs("backend", "fast", "hybrid_engine")
FAST = needs("backend", "fast")
SHARDED = Unread(
    ("zero.stage", "zero.auto"),
    lambda stage, is_chosen: stage != SHARDED_WEIGHTS and not is_chosen,
    "use {key}=3",
)
GPU = needs("hardware.device", "cuda", fix="use a GPU hardware profile")
GRAPHS = needs("cuda_graphs", "true")
NO_REUSE = [
    Unread(("lag",), bool, "use {key}=0"),
    needs("ppo.rollout_correction", "none"),
    Unread(("lora.dropout", "lora.rank"), lambda dropout, rank: dropout * rank > 0, "use {key}=0"),
]


@dataclass(kw_only=True)
class RolloutKeys:
    """Keys for sampling responses."""

    max_prompt_tokens: int = key(ABOVE_0)
    """Maximum length of a prompt in tokens; longer prompts are skipped and counted."""
    max_response_tokens: int = key(ABOVE_0)
    """Maximum length of a response in tokens; longer responses are cut off."""
    temperature: float = key(ABOVE_0, affects=EVERY_PHASE)  # saved with each model
    """Logits are divided by this number before sampling."""
    top_k: int = key(AT_LEAST_0, affects=EVERY_PHASE)  # saved with each model
    """Sample only from the k likeliest tokens; 0: from all."""
    top_p: float = key(ABOVE_0_TO_1, affects=EVERY_PHASE)  # saved with each model
    """Sample only from the likeliest tokens that hold this share of probability; 1: from all."""
    min_p: float = key(FROM_0_BELOW_1, affects=EVERY_PHASE)  # saved with each model
    """Sample only from tokens at least this share as likely as the likeliest; 0: from all."""
    eval_temperature: float | None = key(ABOVE_0)
    """Temperature of responses in evaluations; null: temperature."""
    min_response_tokens: int = key(AT_LEAST_0)
    """The end token cannot be sampled before this many tokens; 0: it can come first."""
    stop: list[str]
    """Texts that end a response, as the end token does; they stay in the response."""
    max_rows: int | None = key(ABOVE_0, at_resume=AtResume.rounding, unread=[LIMITS_ROWS])
    """Responses that a rank decodes at once, while others wait; null: all responses of the rank."""
    mean_response_tokens: int | None = key(
        ABOVE_0,
        at_resume=AtResume.rounding,
        unread=[FAST, GPU, GRAPHS, needs("environment.kind", "none")],
    )
    """Expected mean length, for which the KV cache has room; null: room for the maximum length."""
    reuse_logprobs: When = key(affects=ONLY_PPO, unread=[LOGPROBS])
    """Train on the rollout's log-probs. auto: if they agree with training; always: backend=fast."""
    max_logprob_mismatch: float = key(
        AT_LEAST_0, affects=ONLY_PPO, unread=[LOGPROBS, REUSE_DEPENDS, NO_DROPOUT, *NO_REUSE]
    )
    """Largest mean difference, in nats per token, at which reuse_logprobs=auto reuses log-probs."""
    gather_weights: When = key(unread=[FAST, SHARDED])
    """ZeRO-3: all-gather the weights once per rollout, not layer by layer; auto: if they fit."""
    cuda_graphs: bool = key(unread=[FAST, GPU])
    """Run decode steps as CUDA graphs, on a GPU with backend=fast."""
    keep_graphs: When = key(at_resume=AtResume.rounding, unread=[FAST, GPU, GRAPHS])
    """Keep CUDA graphs, and the KV cache, between rollouts; auto: if they fit beside training."""


def check_rollout(rollout: RolloutConfig) -> None:
    """Check that the backend supports the settings, and that no stop text is empty."""
    broken = {
        f"rollout.stop={rollout.stop}: an empty text would end every response at its first token; "
        "remove the empty text from the list": "" in rollout.stop,
        f"rollout.mean_response_tokens={rollout.mean_response_tokens} is above "
        f"rollout.max_response_tokens={rollout.max_response_tokens}; use at most the maximum, or "
        "null": (rollout.mean_response_tokens or 0) > rollout.max_response_tokens,
        f"rollout.reuse_logprobs=always with rollout.backend={rollout.backend}: only "
        "rollout.backend=fast measures log-probs as training does; use rollout.backend=fast, or "
        "rollout.reuse_logprobs=auto": (
            rollout.reuse_logprobs is When.always and rollout.backend != "fast"
        ),
    }
    refuse_broken_rule(broken)
