"""Build the backend that samples responses from the policy: the core's, or an option's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rlhf.base.ranks import Ranks
from rlhf.base.types import RolloutBackend
from rlhf.config.choices import Dtype
from rlhf.config.schema.run import RunConfig
from rlhf.data.records import Record
from rlhf.engine.devices import TORCH_DTYPES
from rlhf.kernels.kernel_checks import choose_kernels
from rlhf.models.families import find_decoder_modules
from rlhf.options import Backend
from rlhf.rollout.fast import FastRollout, FastSettings, KeptDecoder
from rlhf.rollout.hf import HfRollout
from rlhf.rollout.sampling import SamplingSettings, StopTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.options.environments.responses import EnvironmentPartner
    from rlhf.rollout.decoders.layers import AdapterOf


class BackendParts(NamedTuple):
    """The arguments that an option's rollout backend gets in addition to the configuration."""

    settings: SamplingSettings
    stop: StopTexts
    pad_id: int
    dtype: Dtype  # a resolved type, not auto
    ranks: Ranks


def samples_on_server(config: RunConfig) -> bool:
    """Return True if a server, which has only one version of the weights, samples responses."""
    return config.rollout.backend is Backend.vllm_server


def build_rollout_backend(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    temperature: float,
    dtype: Dtype,
    ranks: Ranks,
    rows: int | None = None,
    greedy: bool = False,
    kept: KeptDecoder | None = None,
) -> RolloutBackend:
    """Build the backend of ``rollout.backend``, which samples responses at ``temperature``.

    ``dtype`` must not be auto. With ``greedy`` the backend always takes the most likely token. The
    backends fast and hf sample at most rollout.max_rows and at most ``rows`` responses at once
    (None: no limit). Only fast reads ``kept``, in which it leaves CUDA graphs and KV cache.
    """
    rollout = config.rollout
    rows = min((each for each in (rollout.max_rows, rows) if each), default=None)
    settings = SamplingSettings(
        max_tokens=rollout.max_response_tokens,
        temperature=temperature,
        top_k=1 if greedy else rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        min_tokens=rollout.min_response_tokens,
    )
    stop, pad_id = StopTexts(tokenizer, rollout.stop), tokenizer.pad_token_id
    parts = BackendParts(settings, stop, pad_id, dtype, ranks)
    if rollout.backend is Backend.hybrid_engine:
        from rlhf.options.hybrid_engine.hybrid_backend import build_hybrid_backend

        return build_hybrid_backend(config, parts)
    if rollout.backend is Backend.vllm_server:
        from rlhf.options.vllm.server_backend import build_server_backend

        return build_server_backend(config, parts)
    if rollout.backend is Backend.hf:
        return HfRollout(settings, pad_id=pad_id, stop=stop, max_rows=rows)
    return FastRollout(
        settings,
        FastSettings(
            dtype=TORCH_DTYPES[dtype],
            max_rows=rows,
            mean_tokens=rollout.mean_response_tokens,
            gather_weights=rollout.gather_weights,
            cuda_graphs=rollout.cuda_graphs,
        ),
        pad_id=pad_id,
        stop=stop,
        adapter_of=_find_adapter_reader(config),
        find_modules=find_decoder_modules,
        ranks=ranks,
        kept=kept,
    )


def _find_adapter_reader(config: RunConfig) -> AdapterOf:
    """Return a function from a linear layer to its adapter, or to None without an adapter."""
    if config.lora.rank > 0:
        from rlhf.options.lora.models import adapter_of

        return adapter_of
    return lambda _: None


class RolloutBackends:
    """A builder of rollout backends; with an environment, a partner answers the policy's turns."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PreTrainedTokenizerBase,
        dtype: Dtype,
        ranks: Ranks,
        rows: int,
    ) -> None:
        """Start the partner's processes, if an option has a partner; ``close`` ends them.

        The backends fast and hf sample at most ``rows`` responses at once.
        """
        self._tokenizer, self._ranks, self._kept = tokenizer, ranks, KeptDecoder()
        self._build = partial(
            build_rollout_backend, config, tokenizer, dtype=dtype, ranks=ranks, rows=rows
        )
        choose_kernels(config.hardware.kernels)
        self._partner: EnvironmentPartner | None = None
        if config.environment.is_used:
            from rlhf.options.environments.responses import open_partner

            self._partner = open_partner(config)

    def build(
        self, *, temperature: float, greedy: bool = False, keeps_graphs: bool = False
    ) -> RolloutBackend:
        """Build a backend with ``build_rollout_backend``, and let the partner wrap it."""
        kept = self._kept if keeps_graphs else None
        backend = self._build(temperature=temperature, greedy=greedy, kept=kept)
        if self._partner is None:
            return backend
        return self._partner.wrap_backend(backend, self._tokenizer, self._ranks)

    def comparison_values(self, records: Sequence[Record]) -> dict[str, float]:
        """Return the partner's values with which results on ``records`` can be compared, or {}."""
        return {} if self._partner is None else self._partner.comparison_values(records)

    def close(self) -> None:
        """End the partner's processes, if there is a partner."""
        if self._partner is not None:
            self._partner.close()
