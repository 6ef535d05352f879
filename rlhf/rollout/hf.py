"""Rollouts with Hugging Face's generate, which works with every causal model but is slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.base.decoder_modules import end_token_ids
from rlhf.base.heartbeat import beat
from rlhf.base.stored_responses import join_rows
from rlhf.base.types import Engine, PromptBatch, Responses, take_rows
from rlhf.rollout.sampling import SamplingSettings, StopTexts, draw_tokens

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList


@dataclass
class HfRollout:
    """A ``RolloutBackend`` that samples with ``generate`` from the weights being trained."""

    sampling: SamplingSettings
    _: KW_ONLY
    pad_id: int
    stop: StopTexts
    max_rows: int | None = None  # number of responses sampled at once; None for all

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt; its random numbers are the prompt's row of draws_BT."""
        with actor.evaluating() as module:
            policy: Any = getattr(module, "pretrained", module)  # unwrap the Hugging Face model
            parts = [
                self.sample(policy, part, policy.generate, synced_gpus=actor.is_sharded)
                for part in split_prompts(prompts, self.max_rows)
            ]
        return join_rows(parts, pad_id=self.pad_id)

    def sample(
        self,
        policy: Any,
        prompts: PromptBatch,
        generate: Callable[..., Tensor],
        *,
        ends_early: bool = True,
        **options: Any,
    ) -> Responses:
        """Sample responses from ``policy`` with ``generate``, the policy's method or a replacement.

        Without ``ends_early``, max_tokens tokens are always drawn and each response is cut at its
        end token afterwards; the result is the same. ``options`` are passed to ``generate``.
        """
        from transformers import GenerationConfig

        end_ids = end_token_ids(policy)
        settings = GenerationConfig(
            max_new_tokens=self.sampling.max_tokens,
            do_sample=False,  # the logits processor draws the token
            eos_token_id=list(end_ids) if ends_early else None,
            pad_token_id=self.pad_id,
        )
        num_rows, prompt_tokens = prompts.ids_BP.shape
        stopped_at: list[int | None] = [None] * num_rows
        with replace_generation_config(settings, policy):
            sequences_BS = generate(
                input_ids=prompts.ids_BP,
                attention_mask=prompts.attend_BP.long(),
                generation_config=settings,
                logits_processor=self._build_logits_processors(prompts, end_ids),
                stopping_criteria=self._build_stopping_criteria(prompt_tokens, stopped_at),
                **options,
            )
        return self._cut_responses(sequences_BS[:, prompt_tokens:], end_ids, stopped_at)

    def _build_logits_processors(
        self, prompts: PromptBatch, end_ids: tuple[int, ...]
    ) -> LogitsProcessorList:
        from transformers import LogitsProcessorList

        num_rows, prompt_tokens = prompts.ids_BP.shape
        all_rows_B = torch.ones(num_rows, dtype=torch.bool, device=prompts.ids_BP.device)

        def mask_all_but_drawn_token(ids_BS: Tensor, logits_BV: Tensor) -> Tensor:
            step = ids_BS.shape[1] - prompt_tokens
            drawn = draw_tokens(
                logits_BV,
                # Under ZeRO-3 a finished rank takes part in further steps, with its last draw.
                prompts.draws_BT[:, min(step, prompts.draws_BT.shape[1] - 1)],
                self.sampling,
                barred_B=all_rows_B if step < self.sampling.min_tokens else None,
                end_ids=end_ids,
            )
            only_BV = torch.full_like(logits_BV, -torch.inf)
            return only_BV.scatter_(1, drawn.tokens_B[:, None], 0.0)

        return LogitsProcessorList([mask_all_but_drawn_token])

    def _build_stopping_criteria(
        self, prompt_tokens: int, stopped_at: list[int | None]
    ) -> StoppingCriteriaList:
        """Return criteria that end rows at stop texts and record the token index of each end."""
        from transformers import StoppingCriteriaList

        def has_stopped(ids_BS: Tensor, *_: object, **__: object) -> Tensor:
            beat()
            responses = ids_BS[:, prompt_tokens:].tolist() if self.stop else []
            for row, response_ids in enumerate(responses):
                if stopped_at[row] is None and self.stop.completes_stop_text(response_ids):
                    stopped_at[row] = len(response_ids) - 1
            return torch.tensor([at is not None for at in stopped_at], device=ids_BS.device)

        return StoppingCriteriaList([has_stopped])

    def _cut_responses(
        self, ids_BT: Tensor, end_ids: tuple[int, ...], stopped_at: list[int | None]
    ) -> Responses:
        is_end_BT = torch.isin(ids_BT, ids_BT.new_tensor(end_ids))
        for row, place in enumerate(stopped_at):
            if place is not None:
                is_end_BT[row, place] = True
        ends_before_BT = is_end_BT.long().cumsum(dim=1) - is_end_BT.long()
        keep_BT = ends_before_BT == 0
        ids_BT = ids_BT.masked_fill(~keep_BT, self.pad_id)
        return Responses(ids_BT, keep_BT, (is_end_BT & keep_BT).any(dim=1))


def split_prompts(prompts: PromptBatch, most: int | None) -> list[PromptBatch]:
    """Split a batch into batches of at most ``most`` prompts; if it is None, keep one batch."""
    total = len(prompts.texts)
    starts = range(0, total, most or total)
    return [take_rows(prompts, list(range(total))[start:][:most]) for start in starts]


@contextmanager
def replace_generation_config(settings: GenerationConfig, policy: Any) -> Iterator[None]:
    """Replace the policy's generation config with ``settings`` within the context.

    transformers fills unset fields from the checkpoint's own generation config. A repetition
    penalty from it would change the distribution from which tokens are sampled.
    """
    original = policy.generation_config
    policy.generation_config = settings
    try:
        yield
    finally:
        policy.generation_config = original
