"""Sampling of later steps in separate processes, during training (rollout.overlap).

Weights and responses are files in a folder that every rank and every sampling process can read.
Rank 0 and a process send one another lines of JSON. Rank 0 sends a ``SamplerPlace``, then for each
step ``{"step": t, "weights": folder}`` with the prompts of all ranks. The process answers
``{"step": t}`` when it has written the file with its share of the responses, or ``{"error":
message}``.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch

from rlhf.base.atomic import replace_atomically
from rlhf.base.command import quieten_libraries
from rlhf.base.cpu import num_usable_cores
from rlhf.base.errors import CapabilityError, RlhfError, RolloutError
from rlhf.base.isolated_process import IsolatedProcess, serve_messages
from rlhf.base.ranks import Ranks
from rlhf.base.safe_text import print_traceback
from rlhf.base.stored_responses import join_rows, own_responses, pack_responses, unpack_responses
from rlhf.base.types import Engine, PromptBatch, Responses, keep_parameter
from rlhf.config.batches import divide_cores
from rlhf.config.choices import Device, Phase, When
from rlhf.config.freeze import load_run
from rlhf.config.roles import Role
from rlhf.config.schema.keys import YEAR_S
from rlhf.config.schema.run import RunConfig
from rlhf.engine.devices import resolve_dtype, set_torch_threads
from rlhf.engine.idle_threads import sleep_early_on_shared_cores
from rlhf.engine.settings import EngineSettings
from rlhf.engine.torch_engine import TorchEngine
from rlhf.models.tokenizers import load_tokenizer
from rlhf.options.ahead.keys import SCRATCH
from rlhf.phases.ppo.prompts import PromptLoader, StepPrompts, shard_prompt_batch
from rlhf.phases.shared.backends import RolloutBackends, samples_on_server
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.policies import build_policy
from rlhf.run.model_folder import SHARD_BYTES, write_shards

SERVE_FUNCTION = "rlhf.options.ahead.overlapped_sampling:serve_samples"


class SamplerPlace(NamedTuple):
    """The first message to a sampling process: the run, the process's share, and its cores."""

    run_dir: str
    folder: str  # folder for weights and responses
    rank: int  # number of the process, from 0
    num_samplers: int
    threads: int


class SamplingProcesses:
    """A ``StepSampler`` whose processes each answer an equal share of a step's prompts.

    Rank 0 starts the processes and sends them messages. They end when rank 0 ends.
    """

    def __init__(self, context: RunContext, loader: PromptLoader) -> None:
        config, self._ranks = context.config, context.ranks
        self._loader = loader
        self._pad_id = context.tokenizer.pad_token_id
        # The folder of the weights of each step, until the step's responses are returned.
        self._weights_of: dict[int, Path] = {}
        self._written = 0  # number of snapshots of the weights so far
        self._folder = context.run_dir / Phase.ppo / SCRATCH
        if self._ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)  # the files of a killed run
        count = config.rollout.samplers if self._ranks.is_main else 0
        rank_threads, threads = divide_cores(config, num_usable_cores())
        set_torch_threads(rank_threads)
        self._processes = [IsolatedProcess(SERVE_FUNCTION) for _ in range(count)]
        for index, process in enumerate(self._processes):
            place = SamplerPlace(str(context.run_dir), str(self._folder), index, count, threads)
            process.send(place._asdict(), _deadline_in_a_year())
        self._queues = [_start_sending(process) for process in self._processes]

    def begin_sampling(self, actor: Engine, batches: Sequence[PromptBatch]) -> None:
        """Write the actor's weights, and send the prompts of each batch to all processes."""
        self._written += 1
        weights = self._folder / f"weights-{self._written}"
        stream = actor.stream_state(dict(actor.module.named_parameters()))
        if self._ranks.is_main:
            weights.mkdir(parents=True)
            write_shards(weights, stream, SHARD_BYTES)
        for _ in stream:  # all ranks must iterate over the stream, which gathers sharded weights
            pass
        for step in (int(batch.step or 0) for batch in batches):
            self._weights_of[step] = weights
            prompts = self._loader.prompts_of_all_ranks(step - 1)._asdict()
            for queue in self._queues:
                queue.put({"step": step, "weights": str(weights), **prompts})

    def wait_for_responses(self, step: int) -> Responses:
        """Wait until all processes have written their responses; return this rank's responses."""
        from safetensors.torch import load_file

        for process in self._processes:
            with _explain_ended_process():
                answer = process.receive(_deadline_in_a_year())
            if "error" in answer:
                raise RolloutError(f"rollout.overlap=true: {answer['error']}")
        self._ranks.barrier()
        files = sorted(self._folder.glob(f"step-{step}-*.safetensors"))
        parts = [unpack_responses(load_file(file)) for file in files]
        responses = own_responses(join_rows(parts, pad_id=self._pad_id), self._ranks)
        self._ranks.barrier()
        weights = self._weights_of.pop(step)
        if self._ranks.is_main:
            for file in files:
                file.unlink()
            if weights not in self._weights_of.values():
                shutil.rmtree(weights)
        return responses

    def close(self) -> None:
        """End the processes, and remove their files."""
        for process, queue in zip(self._processes, self._queues, strict=True):
            process.close()
            queue.put(None)
        if self._ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)


def _start_sending(process: IsolatedProcess) -> SimpleQueue[Mapping[str, Any] | None]:
    """Return a queue whose messages a thread sends to ``process``; None ends the thread.

    A process that samples reads no message until it has finished a step, and the prompts of a step
    are more than a socket holds: sending from the main thread would wait for it.
    """
    queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()

    def send_all() -> None:
        with suppress(OSError):  # the process has ended; whoever waits for its answer raises
            while (message := queue.get()) is not None:
                process.send(message, _deadline_in_a_year())

    Thread(target=send_all, daemon=True).start()
    return queue


def _deadline_in_a_year() -> float:
    """Return a deadline that is never reached, since the watchdog ends a run that hangs."""
    return time.monotonic() + YEAR_S


@contextmanager
def _explain_ended_process() -> Iterator[None]:
    """Raise a RolloutError if receiving fails because a sampling process has ended."""
    try:
        yield
    except OSError as error:
        raise RolloutError(
            "rollout.overlap=true: a sampling process has ended; its last lines, if there are any, "
            "are above. If it was killed for lack of memory, use a smaller rollout.max_rows, or "
            "rollout.overlap=false"
        ) from error


def serve_samples(descriptor: int) -> None:
    """Sample the steps that are requested over a socket, until its other end is closed."""
    with sleep_early_on_shared_cores():
        serve_messages(descriptor, _answer_messages)


def _answer_messages(messages: Iterator[Any]) -> Iterator[dict[str, Any]]:
    place = next(messages, None)
    if place is None:
        return
    sampler = None
    for call in messages:
        try:
            sampler = sampler or SamplingWorker(SamplerPlace(**place))
            sampler.sample(**call)
        except RlhfError as error:
            yield {"error": str(error)}
        except Exception as error:
            print_traceback(type(error), error, error.__traceback__)
            yield {"error": f"{type(error).__name__}: {error}"}
        else:
            yield {"step": call["step"]}


class SnapshotPolicy(TorchEngine):
    """The policy of a sampling process, with the weights of a snapshot."""

    _loaded: Path | None = None

    def load(self, weights: Path) -> None:
        """Copy a snapshot into the parameters in place: CUDA graphs refer to their memory."""
        from safetensors.torch import load_file

        if weights == self._loaded:
            return
        parameters = dict(self.module.named_parameters())
        for file in weights.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                parameters[name].data.copy_(tensor)
        self._loaded = weights


class SamplingWorker:
    """The policy of one sampling process, and the backend that samples from the policy."""

    def __init__(self, place: SamplerPlace) -> None:
        """Build the run's policy and its backend."""
        quieten_libraries()
        set_torch_threads(place.threads)
        run_dir, self._folder = Path(place.run_dir), Path(place.folder)
        self._config = config = load_run(run_dir)
        device = _choose_device(config, place.rank)
        self._share = Ranks(place.rank, place.num_samplers, device)
        self._tokenizer = load_tokenizer(run_dir / "tokenizer", key="run_dir")
        dtype = resolve_dtype(config.hardware.dtype, config.hardware.device)
        self._policy = SnapshotPolicy(
            build_policy(
                config,
                self._tokenizer,
                dropout=0.0,
                shard=None if device.type == "cpu" else keep_parameter,
            ),
            role=Role.actor,
            settings=EngineSettings(zero=config.zero, dtype=dtype),
            ranks=Ranks(device=device),
        )
        rows = math.ceil(config.ppo.rollout_batch_size / place.num_samplers)
        backends = RolloutBackends(config, self._tokenizer, dtype, Ranks(device=device), rows)
        self._backend = backends.build(
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


def _choose_device(config: RunConfig, index: int) -> torch.device:
    """Return the device of sampling process ``index``: a GPU that no rank of the node uses.

    A process whose responses a server samples needs no GPU.
    """
    hardware = config.hardware
    if hardware.device is Device.cpu or samples_on_server(config):
        return torch.device("cpu")
    gpu, num_gpus = hardware.ranks_per_node + index, torch.cuda.device_count()
    if gpu >= num_gpus:
        raise CapabilityError(
            f"rollout.samplers={config.rollout.samplers} with "
            f"hardware.ranks_per_node={hardware.ranks_per_node}: every "
            f"sampling process needs its own GPU, and this node has {num_gpus}; use fewer "
            "ranks_per_node or samplers, or rollout.overlap=false"
        )
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)
