"""Types of all packages: batches, rollouts, and the interfaces between packages.

Shapes, here and everywhere: B = sequences, P = prompt tokens (left-padded), T = response tokens
(right-padded), S = P + T tokens of whole sequences, V = vocabulary. A ``keep_*`` mask is True at
tokens that count; an ``attend_*`` mask is True at tokens that may be attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, device, nn


class SequenceBatch(NamedTuple):
    """Whole sequences, right-padded; ``keep_BS`` marks the tokens that enter the loss."""

    ids_BS: Tensor
    attend_BS: Tensor
    keep_BS: Tensor


class PreferenceBatch(NamedTuple):
    """Pairs of sequences with a common prompt; row i of both belongs to pair i."""

    chosen: SequenceBatch
    rejected: SequenceBatch

    def concatenate(self) -> SequenceBatch:
        """Return all chosen sequences, then all rejected sequences, for one pass over both."""
        return SequenceBatch(*map(torch.cat, zip(self.chosen, self.rejected, strict=True)))


Extras = list[Mapping[str, Any]]  # for each row, the values of additional data columns by name


class PromptBatch(NamedTuple):
    """Prompts to answer: left-padded ids, their texts, and additional columns of the data.

    ``draws_BT`` holds one uniform random number for each response token that is sampled, over all
    turns, so that a response does not depend on the other rows or on the number of ranks.
    """

    ids_BP: Tensor
    attend_BP: Tensor
    draws_BT: Tensor
    texts: list[str]
    columns: Extras | None = None  # columns that rewards read; None: rewards read none
    step: int | None = None  # number of the PPO step, from 1; None: held-out prompts
    seeds: list[int] | None = None  # seeds of the environment's episodes; None: no environment
    keeps_weights: bool = False  # True: the weights are those of the previous batch


NO_NUMBER = -1  # fills the padding of integer tensors (B, T)


class Responses(NamedTuple):
    """Sampled responses, right-padded to T; the end token, if there is one, is kept.

    ``keep_BT`` is True at tokens that the policy wrote, which count in losses and statistics;
    ``attend_BT`` also at an environment's tokens. ``ended_B`` is False if a response was cut off.
    ``extras`` are tensors and lists that options add, by name, with one entry per response.
    """

    ids_BT: Tensor
    keep_BT: Tensor
    ended_B: Tensor
    logprobs_BT: Tensor | None = None  # under the policy that sampled; None: not measured
    extras: Mapping[str, Any] = {}  # what options add, such as "attend_BT"

    @property
    def attend_BT(self) -> Tensor:
        """Return the mask (B, T) that is True at all tokens of the sequence."""
        attend_BT: Tensor = self.extras.get("attend_BT", self.keep_BT)
        return attend_BT


class TermScores(NamedTuple):
    """Scores of the K parts of ``rewards``, before normalisation and weighting."""

    scores_BK: Tensor
    failed_BK: Tensor  # bool: the part gave no score, and scores_BK has its fallback
    criteria: Mapping[str, Tensor] = {}  # scores (B,) by PART.CRITERION, of parts with criteria
    of_tokens: Mapping[str, Tensor] = {}
    """Rewards (B, T) by part, of parts that reward tokens; their sums are in scores_BK."""


class Rollout(NamedTuple):
    """Responses with all inputs of PPO's updates, computed before the first update.

    ``measures`` are numbers (B,) by name, whose means are logged as ppo/NAME; ``extras`` are
    tensors and lists that options add, by name, with one entry per response.
    """

    prompts: PromptBatch
    responses: Responses
    logprobs_BT: Tensor  # under the policy at the step's start, or reused from the rollout
    reference_logprobs_BT: Tensor
    values_BT: Tensor
    scores_B: Tensor
    seconds: Mapping[str, float] | None = None  # durations of "generate" and "score"
    parts: TermScores | None = None  # scores_B is the parts' weighted sum; None: no parts
    last_values_B: Tensor | None = None  # values after the last token
    reuses_logprobs: bool = False  # logprobs_BT were measured by the rollout backend
    measures: Mapping[str, Tensor] = {}
    extras: Mapping[str, Any] = {}

    @property
    def sampled_logprobs_BT(self) -> Tensor:
        """Return the log-probs that the sampler measured; ``logprobs_BT`` if it measured none."""
        measured_BT = self.responses.logprobs_BT
        return self.logprobs_BT if measured_BT is None else measured_BT


Batch = TypeVar("Batch", bound=tuple[Any, ...])


def take_rows(batch: Batch, rows: list[int], device: torch.device | None = None) -> Batch:
    """Return ``rows`` of ``batch`` (a named tuple) in this order, moved to ``device`` if given."""
    indices = torch.tensor(rows, dtype=torch.long)

    def take(part: Any) -> Any:
        if isinstance(part, tuple):
            return take_rows(part, rows, device)
        if isinstance(part, Mapping):
            return {name: take(value) for name, value in part.items()}
        if isinstance(part, list):
            return [part[row] for row in rows]
        if not isinstance(part, Tensor):
            return part
        taken = part[copy_to_device(indices, part.device)]
        if device is None or device.type == taken.device.type:
            return taken
        return copy_to_device(taken, device)

    return type(batch)(*map(take, batch))


class TokenPositions(NamedTuple):
    """Tokens of right-padded sequences whose log-probabilities are to be computed."""

    rows_N: Tensor
    columns_N: Tensor  # column of the hidden state that predicts the token: one before the token
    ids_N: Tensor

    @classmethod
    def from_batch(cls, batch: SequenceBatch) -> TokenPositions:
        """Return the positions of all kept tokens except in column 0, which nothing predicts."""
        rows_N, columns_N = batch.keep_BS[:, 1:].nonzero(as_tuple=True)
        return cls(rows_N, columns_N, batch.ids_BS[rows_N, columns_N + 1])


class TokenLogprobs(NamedTuple):
    """Log-probabilities of given tokens under a policy, and entropies of its distributions."""

    logprobs_N: Tensor  # log pi(token), nats, fp32
    entropy_N: Tensor | None  # entropy of the whole distribution, nats; None: not computed


class LogprobOptions(NamedTuple):
    """Options for computing log-probabilities from logits.

    The temperature must be the sampling temperature of the tokens: otherwise PPO's ratio would
    compare two different policies. The entropy has a gradient only with ``entropy_gradient``.
    """

    temperature: float = 1.0
    with_entropy: bool = True
    entropy_gradient: bool = False


class TokenTargets(NamedTuple):
    """Rewards and advantages of a rollout's tokens, before whitening."""

    rewards_BT: Tensor
    advantages_BT: Tensor


class StepReport(NamedTuple):
    """Result of one optimizer step."""

    learning_rate: float
    grad_norm: float
    is_skipped: bool
    has_overflowed: bool = False  # fp16 gradients of this model overflowed on any rank; set by PPO


class Model(Protocol):
    """A model that runs with the parallelism and precision of the run."""

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """Yield the module, with dropout and gradients disabled in the block."""


class TokenModel(Model, Protocol):
    """A language model that returns log-probabilities of given tokens instead of logits."""

    def __call__(
        self, ids_BS: Tensor, positions: TokenPositions, options: LogprobOptions, /
    ) -> TokenLogprobs:
        """Return log-probabilities (N,) of the tokens at ``positions``."""


class ValueModel(Model, Protocol):
    """A critic or a reward model, which returns a value for every token."""

    def __call__(self, ids_BS: Tensor, /) -> Tensor:
        """Return values (B, S) of right-padded sequences."""


TensorSlice = tuple[str, int, Tensor]  # name, index of the first element, elements


class State(Protocol):
    """The tensors that training changes, flat and by name; all ranks save and load together."""

    @property
    def total_bytes(self) -> int:
        """Return the total size of all tensors in bytes."""

    def stream(self) -> Iterator[TensorSlice]:
        """Yield the slices that this rank saves, without waiting for other ranks."""

    def load(self, read_part: Callable[[str, slice], Tensor], /) -> None:
        """Replace this rank's slice of each tensor by ``read_part(name, slice)``."""


class Stateful(Protocol):
    """An object whose state is a few JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the state from what ``state_dict`` returned."""


class StatefulWithTensors(Stateful, Protocol):
    """An object whose state is tensors and a few JSON values, such as an engine."""

    @property
    def training_state(self) -> State:
        """Return the tensors to store, such as an engine's master weights and Adam's moments."""


class WeightFollower(Protocol):
    """Tensors that follow the fp32 weights of an engine, such as their average."""

    kind: str  # name of these tensors in checkpoints

    @property
    def shards(self) -> Sequence[Tensor]:
        """Return this rank's shards, in the order of the shards of the weights."""

    def update(self) -> None:
        """Update the tensors after an optimizer step."""

    def swap_in(self) -> AbstractContextManager[None]:
        """Exchange the model's weights for these tensors in the block; all ranks must enter it."""


class Engine(Model, StatefulWithTensors, Protocol):
    """A model that can be trained, and whose weights can be read."""

    module: nn.Module
    is_sharded: bool
    lr_scale: float  # factor of the schedule's learning rate from the next step on
    follower: WeightFollower | None  # None: nothing follows the weights

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch's ``loss`` to the gradients of this step."""

    def has_overflow(self) -> bool:
        """Return True if half-precision gradients have overflowed on any rank."""

    def step(self, *, discard: bool = False) -> StepReport:
        """Update the weights with the accumulated gradients; if ``discard``, drop the gradients."""

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[None]:
        """Gather the parameters of ``module`` in the block, which all ranks must enter."""

    def stream_state(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and gathered tensors of ``state``; all ranks must iterate to the end.

        A tensor is gathered only until the next tensor is requested: clone it to keep it.
        """


class TokenEngine(Engine, TokenModel, Protocol):
    """A language model in training."""


class ValueEngine(Engine, ValueModel, Protocol):
    """A critic or a reward model in training."""


class RolloutBackend(Protocol):
    """A generator of responses with the actor's current weights."""

    def generate(self, actor: Engine, prompts: PromptBatch) -> Responses:
        """Return one response per prompt."""


Schedule = Callable[[int], float]  # share of the peak learning rate at an optimizer step


def keep_parameter(parameter: nn.Parameter) -> Tensor:
    """Keep a parameter whole and on the CPU, for an engine that copies it; return its weights."""
    return parameter.data


def copy_to_device(tensor: Tensor, to: device) -> Tensor:
    """Return a CPU tensor on device ``to``; the host does not wait for a GPU.

    A GPU can copy asynchronously only from pinned memory. For other memory the host would wait
    until the GPU has finished all earlier work.
    """
    return tensor.pin_memory().to(to, non_blocking=True) if to.type == "cuda" else tensor.to(to)


def pad_rows(
    rows: Sequence[Sequence[int]], *, pad_id: int, width: int | None = None, on_left: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the ids (B, S), padded to ``width`` or to the longest row, and the mask of tokens."""
    width = width or max(len(ids) for ids in rows)
    ids_BS = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attend_BS = torch.zeros((len(rows), width), dtype=torch.bool)
    for row, ids in enumerate(rows):
        columns = slice(width - len(ids), None) if on_left else slice(len(ids))
        ids_BS[row, columns] = torch.tensor(ids)
        attend_BS[row, columns] = True
    return ids_BS, attend_BS


class Shown(NamedTuple):
    """The texts of a prompt and of its response for samples.jsonl."""

    prompt: str
    response: str
    messages: list[dict[str, str]] | None = None
    """The messages of a response that is a conversation."""
