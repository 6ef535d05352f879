"""A process that samples responses while ranks train; see overlapped_sampling.py.

Both sides send lines of JSON: first where the run is, then for each step ``{"step": t, "weights":
folder}`` and the prompts of all ranks; the answer is ``{"step": t}`` when the file with this
process's share of the responses is there, or ``{"error": message}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlhf.base.atomic import replace_atomically
from rlhf.base.errors import CapabilityError, RlhfError
from rlhf.base.isolated_process import serve_lines
from rlhf.base.quiet_libraries import quieten_libraries
from rlhf.base.ranks import Ranks
from rlhf.base.safe_text import print_traceback
from rlhf.base.stored_responses import pack_responses
from rlhf.config.choices import Backend, Device, When
from rlhf.config.freeze import load_run
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.engine.devices import resolve_dtype
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.environments.process_pool import build_pool
from rlhf.models.tokenizers import load_tokenizer
from rlhf.phases.ppo.overlapped_sampling import SamplerPlace
from rlhf.phases.ppo.prompts import StepPrompts, shard_prompt_batch
from rlhf.phases.shared.episode_counterpart import build_answering_backend
from rlhf.phases.shared.policies import build_policy


def serve_samples(descriptor: int) -> None:
    """Sample the steps that the socket names, until its other end is closed."""
    serve_lines(descriptor, _answers)


def _answers(messages: Iterator[Any]) -> Iterator[dict[str, Any]]:
    given = next(messages, None)
    if given is None:
        return
    sampler = None
    for call in messages:
        try:
            sampler = sampler or SamplingWorker(SamplerPlace(**given))
            sampler.sample(**call)
        except RlhfError as error:
            yield {"error": str(error)}
        except Exception as error:
            print_traceback(type(error), error, error.__traceback__)
            yield {"error": f"{type(error).__name__}: {error}"}
        else:
            yield {"step": call["step"]}


class SnapshotPolicy(TorchEngine):
    """The policy with the weights of a snapshot."""

    _loaded: Path | None = None

    def load(self, weights: Path) -> None:
        """Load the weights of a snapshot, in the precision in which they are trained."""
        from safetensors.torch import load_file

        if weights == self._loaded:
            return
        parameters = dict(self.module.named_parameters())
        for file in weights.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                parameters[name].data = tensor.to(self._device)
        self._loaded = weights


class SamplingWorker:
    """The policy, and the backend that samples from it, of one sampling process."""

    def __init__(self, place: SamplerPlace) -> None:
        """Build the policy of the run."""
        quieten_libraries()
        torch.set_num_threads(place.threads)
        run_dir, self._folder = Path(place.run_dir), Path(place.folder)
        self._config = config = load_run(run_dir)
        device = _device_of(config, place.rank)
        self._share = Ranks(place.rank, place.num_samplers, device)
        self._tokenizer = load_tokenizer(run_dir / "tokenizer", key="run_dir")
        dtype = resolve_dtype(config.hardware.dtype, config.hardware.device)
        self._policy = SnapshotPolicy(
            build_policy(config, self._tokenizer, dropout=0.0),
            role=Role.actor,
            settings=EngineSettings(zero=config.zero, dtype=dtype),
            ranks=Ranks(device=device),
        )
        self._backend = build_answering_backend(
            build_pool(config.environment) if config.environment.is_used else None,
            config,
            self._tokenizer,
            dtype,
            Ranks(device=device),
            temperature=config.rollout.temperature,
            keeps_graphs=config.rollout.keep_graphs is not When.never,
        )

    def sample(self, *, step: int, weights: str, **prompts: Any) -> None:
        """Write this process's share of the responses of ``step`` to a file."""
        from safetensors.torch import save_file

        self._policy.load(Path(weights))
        batch = shard_prompt_batch(
            StepPrompts(**prompts),
            step=step - 1,
            config=self._config,
            ranks=self._share,
            pad_id=self._tokenizer.pad_token_id,
        )
        responses = self._backend.generate(self._policy, batch)
        name = f"step-{step}-{self._share.rank:05}.safetensors"
        with replace_atomically(self._folder / name) as building:
            save_file(pack_responses(responses), building)


def _device_of(config: RunConfig, index: int) -> torch.device:
    """Return the device of sampling process ``index``: a GPU behind those of the node's ranks.

    A process whose responses a server samples needs no GPU.
    """
    hardware = config.hardware
    if hardware.device is Device.cpu or config.rollout.backend is Backend.vllm_server:
        return torch.device("cpu")
    place, found = hardware.ranks_per_node + index, torch.cuda.device_count()
    if place >= found:
        raise CapabilityError(
            f"rollout.samplers={index + 1} with hardware.ranks_per_node={hardware.ranks_per_node}: "
            f"every sampling process needs a GPU of its own, and this node has {found}; use fewer "
            "ranks_per_node or samplers, or rollout.overlap=false"
        )
    torch.cuda.set_device(place)
    return torch.device("cuda", place)
