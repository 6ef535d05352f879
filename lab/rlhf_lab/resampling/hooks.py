"""Replace prompts by DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476.

An estimator that compares the responses to one prompt learns nothing if all have the same score. So
such a prompt is replaced by other prompts until scores differ, or the rounds are used up.
"""

from __future__ import annotations

import torch

from rlhf.base.stored_responses import join_rows
from rlhf.base.types import Rollout, StatefulWithTensors, take_rows
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.ppo.step_metrics import equal_scores_mask
from rlhf_lab.resampling import ResamplingKeys


class ResamplingHook(PpoHook):
    """A hook that replaces prompts before a step learns from them.

    Prompts and random numbers are keyed by step and round, and a prompt is replaced because of its
    own scores only. So neither resuming nor the number of ranks changes a response.
    """

    _loader: PromptLoader | None = None

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:
        """Keep the loader, which supplies the new prompts."""
        self._loader = loader
        return {}

    def prepare_rollout(
        self, trainer: PPOTrainer, rollout: Rollout
    ) -> tuple[Rollout, dict[str, float]]:
        """Return the scored responses of a step after all rounds of resampling."""
        assert self._loader is not None, "prepare comes first"
        ranks, pad_id = self._loader.context.ranks, self._loader.context.tokenizer.pad_token_id
        rounds = ResamplingKeys.of(self.config).resampling_rounds
        size = self.config.ppo.responses_per_prompt
        rollout = _set_replaced_share(rollout, 0.0)
        for number in range(1, rounds + 1):
            scores_B = trainer.target_maker.clipped_scores(rollout)
            has_equal_scores = equal_scores_mask(scores_B.view(-1, size)).tolist()
            equal = [group for group, is_equal in enumerate(has_equal_scores) if is_equal]
            # Every rank samples for as many prompts as the rank that needs most, since all must
            # take part in the passes of sharded models. A rank drops its surplus responses.
            most = int(ranks.max(torch.tensor(len(equal), device=ranks.device)))
            if most == 0:
                break
            others = [group for group, is_equal in enumerate(has_equal_scores) if not is_equal]
            groups = (equal + others)[:most]
            rows = [group * size + index for group in groups for index in range(size)]
            prompts = take_rows(self._loader.own_prompts(trainer.steps_done, attempt=number), rows)
            fresh = _set_replaced_share(trainer.generate_experience(prompts), 1.0)
            source_rows = list(range(len(rollout.scores_B)))
            for index, row in enumerate(rows[: len(equal) * size]):
                source_rows[row] = len(source_rows) + index
            seconds = _sum_seconds_by_part(rollout, fresh)
            rollout = take_rows(join_rows([rollout, fresh], pad_id=pad_id), source_rows)
            rollout = rollout._replace(seconds=seconds)
        return rollout, {}


def _set_replaced_share(rollout: Rollout, share: float) -> Rollout:
    """Return ``rollout`` with the measure replaced_share: 1.0 for new prompts, otherwise 0.0."""
    share_B = torch.full_like(rollout.scores_B, share)
    return rollout._replace(measures={**rollout.measures, "replaced_share": share_B})


def _sum_seconds_by_part(rollout: Rollout, fresh: Rollout) -> dict[str, float]:
    first, second = rollout.seconds or {}, fresh.seconds or {}
    return {name: first[name] + second[name] for name in first}
