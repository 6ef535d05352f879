"""Sampling of coming steps: in turn with training, or at the same time in processes of its own.

Weights and responses are files in a folder, named by step, which every rank and every sampling
process can read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from rlhf.base.cpu import num_usable_cores
from rlhf.base.errors import RolloutError
from rlhf.base.isolated_process import IsolatedProcess
from rlhf.base.stored_responses import join_rows, rows_of_rank, unpack_responses
from rlhf.base.types import Engine, PromptBatch, Responses
from rlhf.checkpoint.streaming import SHARD_BYTES, write_shards
from rlhf.config.batches import divide_cores
from rlhf.config.choices import Backend, Phase
from rlhf.config.schema.keys import YEAR_S
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.shared.checkpoints import StatefulWithTensors
from rlhf.phases.shared.context import RunContext
from rlhf.rollout.ahead import AfterSampling, SamplingAhead, SamplingInTurn, StepSampler

if TYPE_CHECKING:
    from rlhf.phases.ppo.rlhf_engine import RLHFEngine

SERVES = "rlhf.phases.ppo.sampling_process:serve_samples"


def sample_ahead(
    context: RunContext, engine: RLHFEngine, loader: PromptLoader, *, steps: int
) -> dict[str, StatefulWithTensors]:
    """Let ``engine`` sample rollout.lag steps ahead; return what checkpoints store, by name."""
    rollout, ranks = context.config.rollout, context.ranks
    if rollout.lag == 0:
        return {}
    sampler: StepSampler = SamplingInTurn(engine.rollout)
    if rollout.overlap:
        sampler = engine.samplers = SamplingProcesses(context, loader)
    engine.rollout = ahead = SamplingAhead(
        sampler,
        lambda step: loader.batch(step - 1),
        lag=rollout.lag,
        steps=steps,
        pad_id=context.tokenizer.pad_token_id,
        ranks=ranks,
    )
    if rollout.overlap and rollout.backend is Backend.vllm_server:
        engine.policy = engine.policy._replace(
            sampling=AfterSampling(engine.policy.sampling, ahead),
            greedy=AfterSampling(engine.policy.greedy, ahead),
        )
    return {"pending": ahead}


class SamplerPlace(NamedTuple):
    """The first message to a sampling process: its run, its share and its cores."""

    run_dir: str
    folder: str  # for weights and responses
    rank: int  # among ``num_samplers`` processes
    num_samplers: int
    threads: int


class SamplingProcesses:
    """A ``StepSampler`` whose processes each answer an equal share of a step's prompts.

    Rank 0 starts them and talks to them. They end with it, and with the run.
    """

    def __init__(self, context: RunContext, loader: PromptLoader) -> None:
        config, self._ranks = context.config, context.ranks
        self._loader = loader
        self._pad_id = context.tokenizer.pad_token_id
        self._weights_of: dict[int, Path] = {}  # by step whose responses are not taken yet
        self._written = 0  # snapshots of the weights
        self._folder = context.run_dir / Phase.ppo / "sampling"
        if self._ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)  # of an attempt that was killed
        count, (own, threads) = config.rollout.samplers, divide_cores(config, num_usable_cores())
        torch.set_num_threads(own)
        started = range(count if self._ranks.is_main else 0)
        self._processes = [IsolatedProcess(SERVES) for _ in started]
        for index, process in enumerate(self._processes):
            place = SamplerPlace(str(context.run_dir), str(self._folder), index, count, threads)
            process.send(place._asdict(), _in_a_year())

    def begin(self, actor: Engine, batches: Sequence[PromptBatch]) -> None:
        """Write the actor's weights, and send the processes the prompts of each batch."""
        self._written += 1
        weights = self._folder / f"weights-{self._written}"
        stream = actor.stream_state(dict(actor.module.named_parameters()))
        if self._ranks.is_main:
            weights.mkdir(parents=True)
            write_shards(weights, stream, SHARD_BYTES)
        for _ in stream:  # every rank takes part in it
            pass
        for step in (int(batch.step or 0) for batch in batches):
            self._weights_of[step] = weights
            prompts = self._loader.prompts_of_all_ranks(step - 1)._asdict()
            for process in self._processes:
                with _explain_end():
                    process.send({"step": step, "weights": str(weights), **prompts}, _in_a_year())

    def finish(self, step: int) -> Responses:
        """Return this rank's responses of ``step`` as soon as all processes have written theirs."""
        from safetensors.torch import load_file

        for process in self._processes:
            with _explain_end():
                answer = process.receive(_in_a_year())
            if "error" in answer:
                raise RolloutError(f"rollout.overlap=true: {answer['error']}")
        self._ranks.barrier()
        files = sorted(self._folder.glob(f"step-{step}-*.safetensors"))
        parts = [unpack_responses(load_file(file)) for file in files]
        found = rows_of_rank(join_rows(parts, pad_id=self._pad_id), self._ranks)
        self._ranks.barrier()
        weights = self._weights_of.pop(step)
        if self._ranks.is_main:
            for file in files:
                file.unlink()
            if weights not in self._weights_of.values():
                shutil.rmtree(weights)
        return found

    def close(self) -> None:
        """End the processes, and remove their files."""
        for process in self._processes:
            process.close()
        if self._ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)


def _in_a_year() -> float:
    """Return a deadline that never comes: the watchdog ends a run whose step never ends."""
    return time.monotonic() + YEAR_S


@contextmanager
def _explain_end() -> Iterator[None]:
    """Raise a RolloutError if the process that the block talks to has ended."""
    try:
        yield
    except OSError as error:
        raise RolloutError(
            "rollout.overlap=true: a sampling process has ended; its last lines, if there are any, "
            "are above. If it was killed for lack of memory, use a smaller rollout.max_rows, or "
            "rollout.overlap=false"
        ) from error
