"""Rollouts on a vLLM server, which gets the actor's weights before each rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf.base.decoder_modules import end_token_ids
from rlhf.base.ranks import Ranks
from rlhf.base.types import Engine, PromptBatch, Responses
from rlhf.options.vllm.weight_transfer import ServerWeights
from rlhf.phases.shared.exporting import Export
from rlhf.rollout.fast import pad_responses, unpad_prompts
from rlhf.rollout.sampling import SamplingSettings


class VllmServerRollout:
    """A ``RolloutBackend`` that samples on a vLLM server.

    Rank 0 sends the weights. Every rank then checks that the server has the version just sent, and
    requests the responses to its own prompts.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        stop: Sequence[str],
        weights: ServerWeights,
        *,
        export: Callable[[Engine], Export],
        pad_id: int,
        ranks: Ranks,
    ) -> None:
        self._sampling = sampling
        self._stop = list(stop)
        self._weights = weights
        self._client = weights.client
        self._export = export
        self._pad_id = pad_id
        self._ranks = ranks
        self._version = ""

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt.

        Raises:
            RolloutError: if the server fails, or samples with weights other than the actor's.
        """
        if not prompts.continues:
            self._version = self._send_weights(actor)
        self._require_weight_version()
        seeds = (prompts.draws_BT[:, 0].double() * 2**31).long().tolist()
        sampled = self._client.sample(unpad_prompts(prompts), seeds, self._vllm_settings(actor))
        self._require_weight_version()
        return pad_responses(sampled, pad_id=self._pad_id, device=prompts.ids_BP.device)

    def _send_weights(self, actor: Engine) -> str:
        """Give the server the actor's weights; return their version, on every rank.

        Every rollout does this: an evaluation may have swapped in the weights' moving average.
        """
        export, version = self._export(actor), ""
        if self._ranks.is_main:
            version = self._weights.replace(export)
        else:
            export.write(None)
        return self._ranks.all_gather(version)[0]

    def _require_weight_version(self) -> None:
        found = self._client.fetch_weight_version()
        if found != self._version:
            raise self._client.build_error(
                f"it samples with the weights {found}, and this step needs {self._version}: "
                "another run gives it weights, or it was started again; give every run a server of "
                "its own"
            )

    def _vllm_settings(self, actor: Engine) -> dict[str, object]:
        """Return the sampling settings under vLLM's names; they replace all server defaults."""
        sampling = self._sampling
        return {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": True,  # else vLLM would use the end tokens of its own model folder
            "stop_token_ids": list(end_token_ids(actor.module.pretrained)),
            "stop": self._stop,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
