"""The hook that logs all responses of a PPO step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from rlhf.base.types import Rollout, StatefulWithTensors
from rlhf.options.rollout_log.keys import LOG
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.scoring import response_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RolloutLogHook(PpoHook):
    """A hook that logs the responses of every ``ppo.log_rollouts_every``-th step."""

    _context: RunContext | None = None

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:  # noqa: ARG002
        """Keep the context, which has the ranks, the tokenizer and the trackers."""
        self._context = loader.context
        return {}

    def prepare_rollout(
        self, trainer: PPOTrainer, rollout: Rollout
    ) -> tuple[Rollout, dict[str, float]]:
        """Log the responses of all ranks if this step is due; return the rollout as it is."""
        assert self._context is not None, "prepare comes first"
        step, context = trainer.steps_done + 1, self._context
        if step % self.config.ppo.log_rollouts_every == 0:
            lines_here = list(_build_lines(rollout, self.config.rewards, context.tokenizer))
            lines = [line for part in context.ranks.all_gather(lines_here) for line in part]
            context.tracker.append(LOG, "ppo", step, lines)
        return rollout, {}


def _build_lines(
    rollout: Rollout, parts: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, Any]]:
    """Yield a line per response: texts, score with its parts, KL in nats, and length in tokens."""
    keep_BT, prompts, responses = rollout.responses.keep_BT, rollout.prompts, rollout.responses
    kl_BT = (rollout.logprobs_BT - rollout.reference_logprobs_BT) * keep_BT
    numbers = {
        "score": rollout.scores_B,
        "kl": kl_BT.sum(dim=1),
        "tokens": keep_BT.sum(dim=1, dtype=torch.float32),
    }
    if rollout.parts is not None:
        scores_by_part = dict(zip(parts, rollout.parts.scores_BK.unbind(dim=1), strict=True))
        scores_by_part |= rollout.parts.criteria
        numbers |= {f"part {name}": each_B for name, each_B in scores_by_part.items()}
    texts = (prompts.texts, response_texts(tokenizer, responses), responses.ended_B.tolist())
    columns = (*texts, *(each_B.tolist() for each_B in numbers.values()))
    for values in zip(*columns, strict=True):
        yield dict(zip(("prompt", "response", "ended", *numbers), values, strict=True))
