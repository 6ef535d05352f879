"""The hook with which a teacher that reads another prompt than the policy grades each token.

Shapes: B = sequences of this rank, T = response tokens.
"""

from __future__ import annotations

import torch

from rlhf.base.errors import DataError
from rlhf.base.heartbeat import beat
from rlhf.base.types import Rollout, take_rows
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import collate_prompts
from rlhf.data.encoding import Encoder
from rlhf.data.records import Record, describe_row
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.ppo.targets import STEPS, TargetMaker, Targets, TargetSteps
from rlhf.phases.shared.context import RunContext, phase_records, phase_tokens
from rlhf.phases.shared.scoring import WholeSequences, split_rows
from rlhf_lab.distillation import COLUMN, DistillationKeys

TEACHER_KL = "teacher_kl_BT"  # key in Rollout.extras: log p_policy - log p_teacher; 0 at padding


class DistillationHook(PpoHook):
    """A hook that penalises KL to the reference on the teacher's prompts, if the data has any."""

    @classmethod
    def check_data(cls, context: RunContext) -> None:
        """Raise DataError for the first row that PPO uses without a prompt for the teacher."""
        config, records = context.config, phase_records(context, Phase.ppo).train
        if DistillationKeys.of(config).teacher_prompt_column is not None:
            encoder = Encoder(context.tokenizer, config.data.template)
            for row in phase_tokens(context, Phase.ppo).train["row"]:
                _encode_prompt(config, encoder, records[row])

    def annotate_scored_rollout(self, trainer: PPOTrainer, rollout: Rollout) -> Rollout:
        """Return the rollout with estimates (B, T) of each response token's KL to the teacher."""
        config, engine, plain = self.config, trainer.engine, rollout.prompts
        if DistillationKeys.of(config).teacher_prompt_column is None:
            return rollout
        models, texts = engine.models, plain.texts
        assert isinstance(models, SeparateModels), "the rules refuse models that share weights"
        encoder = Encoder(engine.tokenizer, config.data.template)
        rows = zip(texts, plain.columns or [{}] * len(texts), strict=True)
        records = [Record(text, columns=columns) for text, columns in rows]
        ids = [_encode_prompt(config, encoder, record) for record in records]
        pad_id, device = engine.tokenizer.pad_token_id, engine.ranks.device
        hinted = collate_prompts(ids, texts, plain.draws_BT, pad_id=pad_id, device=device)
        scored = []
        for part in split_rows(list(range(len(texts))), engine.plan.micro):
            beat()
            whole = WholeSequences(take_rows(hinted, part), take_rows(rollout.responses, part))
            scored.append(models.response_logprobs(models.reference, whole))
        kl_BT = rollout.logprobs_BT - torch.cat(scored)
        kl_BT = kl_BT.masked_fill(~rollout.responses.keep_BT, 0.0)
        return rollout._replace(
            measures={**rollout.measures, "teacher_kl": kl_BT.sum(dim=1)},
            extras={**rollout.extras, TEACHER_KL: kl_BT},
        )

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Add a step that subtracts each token's KL to the teacher from the token's advantage.

        The step precedes the steps of other methods that read advantages, such as Clip-Cov's.
        """
        built_in = len(STEPS)
        return (*steps[:built_in], _subtract_teacher_kl, *steps[built_in:])


def _encode_prompt(config: RunConfig, encoder: Encoder, record: Record) -> list[int]:
    """Return the token ids of a record's prompt for the teacher; raise DataError if unusable."""
    column = str(DistillationKeys.of(config).teacher_prompt_column)
    most = config.rollout.max_prompt_tokens
    text = (record.columns or {}).get(column)
    ids = encoder.encode_prompts([text])[0] if isinstance(text, str) and text.strip() else []
    if 0 < len(ids) <= most:
        return ids
    raise DataError(
        f"{COLUMN}={column}: {describe_row(record)} has {text!r:.60}, of {len(ids)} tokens; "
        f"must be a text of 1 to rollout.max_prompt_tokens={most} tokens"
    )


def _subtract_teacher_kl(maker: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Subtract each token's KL to the teacher from its whitened advantage, if KL was measured."""
    if TEACHER_KL not in rollout.extras:  # such as an answer to a held-out prompt
        return targets
    plain, kl_BT = targets.advantages, rollout.extras[TEACHER_KL]
    taught_BT = plain.advantages_BT - DistillationKeys.of(maker.config).teacher_coef * kl_BT
    return targets._replace(advantages=plain._replace(advantages_BT=taught_BT))
