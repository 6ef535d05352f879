"""Build ensembles of reward models that share lower blocks, and so cost less than M models.

The first member is an ordinary ``Scorer``, which is trained whole. Every further member has its own
copy of the top blocks and of the norm after them, and its own head. Its input is recorded in
the forward pass of the first member (hidden states), which it does not change.

Shapes: B = sequences, S = tokens, H = hidden size, M = members.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.models.branch import BlockCall, Branch, find_block_and_tail_paths, record_calls
from rlhf.models.build import Completion
from rlhf.models.language_model import Scorer
from rlhf.models.sources import ModelSource
from rlhf.models.weight_files import dtypes_in_file, require_finite_weights, require_float_dtypes
from rlhf.phases.shared.scoring import ResponseScores, WholeSequences
from rlhf_lab.ensembles import CombineName, EnsembleKeys
from rlhf_lab.ensembles.combined_scores import combine_scores, disagreement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEMBERS_FILE = "members.safetensors"  # in the model folder of the first member
OFFSETS = "offsets"  # tensor in MEMBERS_FILE that is subtracted from the members' values


class Combination(NamedTuple):
    """Settings for combining the members' scores to one score."""

    members: int = 1
    name: CombineName = CombineName.mean
    coef: float = 0.0

    @property
    def num_stored_models(self) -> int:
        """Return the number of models that a run stores; averaged weights are one model."""
        return 1 if self.name is CombineName.warm else self.members

    def __call__(self, scores_M: Tensor) -> Tensor:
        """Return the combined scores (...) of scores (..., M)."""
        return combine_scores(scores_M, combine=self.name, coef=self.coef)


class Member(nn.Module):
    """A further member of an ensemble: its own top blocks, the norm after them, and its head."""

    def __init__(self, blocks: Sequence[nn.Module], tail: Sequence[nn.Module], head: nn.Module):
        super().__init__()
        self.branch = Branch(blocks, tail)
        self.head = deepcopy(head)

    def forward(self, calls: Sequence[BlockCall]) -> Tensor:
        """Return fp32 values (B, S), from recorded ``calls`` of the first member's top blocks."""
        values_BS1: Tensor = self.head(self.branch(calls))
        return values_BS1.squeeze(-1).float()


class Ensemble(nn.Module):
    """A frozen ensemble that, like a ``Scorer``, returns one (combined) value for every token.

    ``offsets_M`` are subtracted from the members' values, because the Bradley-Terry loss leaves the
    zero of each member's scale undetermined.
    """

    def __init__(
        self, first: Scorer, members: Sequence[Member], offsets_M: Tensor, combine: Combination
    ) -> None:
        super().__init__()
        self.first = first
        self.others = nn.ModuleList(members)
        self.offsets_M: Tensor
        self.register_buffer("offsets_M", offsets_M)
        self.combine = combine

    @property
    def pretrained(self) -> PreTrainedModel:
        """Return the first member as a transformers model."""
        return self.first.pretrained

    def member_values(self, ids_BS: Tensor) -> Tensor:
        """Return fp32 values (B, S, M) of right-padded sequences."""
        with record_top_block_calls(self.first, list(self.others)) as calls:
            first_BS = self.first(ids_BS)
        values = [first_BS, *(member(calls) for member in self.others)]
        return torch.stack(values, dim=-1) - self.offsets_M

    def response_scores(self, sequences: WholeSequences) -> ResponseScores:
        """Return the combined scores of responses, and the disagreement of the members."""
        values_MBS = self.member_values(sequences.ids_BS).unbind(-1)
        scores_BM = torch.stack([sequences.last_token_values(x_BS) for x_BS in values_MBS], dim=1)
        return ResponseScores(self.combine(scores_BM), {"disagreement": disagreement(scores_BM)})

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return the combined fp32 values (B, S)."""
        return self.combine(self.member_values(ids_BS))


def record_top_block_calls(
    scorer: Scorer, members: Sequence[nn.Module]
) -> AbstractContextManager[list[BlockCall]]:
    """Record the calls of the scorer's top blocks within a context, as input of ``members``."""
    return record_calls(_find_top_modules(scorer, _count_layers_per_member(members))[0])


def build_members(scorer: Scorer, config: EnsembleKeys, *, seeds: Sequence[int]) -> list[Member]:
    """Return one further member for each of ``seeds``, with copies of the scorer's top blocks.

    The weights of the heads are drawn at random with the seeds. If members will be averaged, the
    heads are copies too, since the mean of unrelated heads is close to 0.

    Raises:
        CapabilityError: if the names of the blocks of the model's family are unknown.
        ConfigError: if the model has too few layers.
    """
    total = len(_find_top_modules(scorer, 0)[0])
    num_layers = config.num_own_layers(total)
    if num_layers >= total:
        raise ConfigError(
            f"reward.member_layers={num_layers}: the reward model has {total} layers, and members "
            f"share at least one; use at most {total - 1}"
        )
    blocks, tail = _find_top_modules(scorer, num_layers)
    head = getattr(scorer.pretrained, scorer.head_name)
    members = [Member(blocks, tail, head) for _ in seeds]
    if config.combine is not CombineName.warm:
        for member, seed in zip(members, seeds, strict=True):
            _redraw_head(member.head, seed=seed)
    return members


def copy_weights_of_first_member(scorer: Scorer, member: nn.Module) -> None:
    """Overwrite the weights of ``member`` with the first member's weights of the same layers."""
    with torch.no_grad():
        own = _collect_own_weights(scorer, _count_layers_per_member([member]))
        for name, weight in own.items():
            member.get_parameter(name).copy_(weight)


@contextmanager
def swap_in_mean_weights(scorer: Scorer, members: Sequence[nn.Module]) -> Iterator[None]:
    """Within the context, replace the first member's own weights by the mean of all members."""
    own = _collect_own_weights(scorer, _count_layers_per_member(members))
    before = {name: weight.clone() for name, weight in own.items()}
    with torch.no_grad():
        for name, weight in own.items():
            further = [member.get_parameter(name) for member in members]
            weight.copy_(torch.stack([weight.float(), *(w.float() for w in further)]).mean(dim=0))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(before[name])


def save_members(folder: Path, members: Sequence[nn.Module], offsets_M: Tensor) -> None:
    """Write the weights of the members after the first, and all offsets, to a model folder."""
    from safetensors.torch import save_file

    weights = {
        f"{number}.{name}": weight.detach().to("cpu", copy=True).contiguous()
        for number, member in enumerate(members, start=1)
        for name, weight in member.named_parameters()
    }
    save_file(weights | {OFFSETS: offsets_M.cpu()}, folder / MEMBERS_FILE)


def load_ensemble(scorer: Scorer, source: ModelSource, combine: Combination) -> Scorer | Ensemble:
    """Return the ensemble stored in ``source``, whose first member is ``scorer``.

    Return ``scorer`` if the folder holds one model: a single model, or the mean of the members.

    Raises:
        CheckpointError: if the number of members does not fit ``combine``, or the file is damaged.
    """
    from safetensors.torch import load_file

    file = Path(source.path or "") / MEMBERS_FILE
    weights: Mapping[str, Tensor] = {}
    if source.path is not None and file.is_file():
        with translate_errors(source.build_error):
            require_float_dtypes(dtypes_in_file(str(file)), source)
            weights = load_file(file)
        for name, weight in weights.items():
            require_finite_weights(f"{name} in {MEMBERS_FILE}", weight, source)
        if OFFSETS not in weights or weights[OFFSETS].dim() != 1:
            raise source.build_error(f"{MEMBERS_FILE} must have one row of {OFFSETS}")
    count = len(weights[OFFSETS]) if OFFSETS in weights else 1
    if count != combine.num_stored_models:
        rule, fix = f"reward.members asks for {combine.members}", f"reward.members={count}"
        if count == 1:
            fix += f", or reward.combine=warm if it is the average of {combine.members}"
        elif combine.name is CombineName.warm:
            rule = "reward.combine=warm reads one"
            fix += " and reward.combine=mean, worst or uncertainty"
        found = f"holds {count} reward model{'s' * (count != 1)}"
        raise CheckpointError(f"{source.key}={source.path}: {found}, and {rule}; set {fix}")
    if count == 1:
        return scorer
    numbers = [re.match(r"1\.branch\.blocks\.(\d{1,9})\.", name) for name in weights]
    num_layers = 1 + max((int(number[1]) for number in numbers if number), default=-1)
    owners = {name.partition(".")[0] for name in weights} - {OFFSETS}
    if not num_layers or owners != {str(number) for number in range(1, count)}:
        raise source.build_error(
            f"{MEMBERS_FILE} must hold the layers of {count - 1} further members"
        )
    blocks, tail = _find_top_modules(scorer, num_layers)
    head = getattr(scorer.pretrained, scorer.head_name)
    members = [Member(blocks, tail, head) for _ in range(1, count)]
    with translate_errors(source.build_error):
        for number, member in enumerate(members, start=1):
            prefix = f"{number}."
            own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
            member.load_state_dict(own)
    return Ensemble(scorer, members, weights[OFFSETS], combine)


class EnsembleCompletion(Completion):
    """The completion of a trained reward model by the further members in its folder."""

    file = MEMBERS_FILE

    def complete(
        self, scorer: nn.Module, source: ModelSource, keys: Mapping[str, Any]
    ) -> nn.Module:
        """Return the reward model of a run with these ``keys``: ``scorer``, or an ensemble.

        Without the key reward.members (an older run), a folder with further members is refused.
        """
        members = keys.get("reward.members", 1)
        if members == 1 and not (Path(source.path or "") / MEMBERS_FILE).is_file():
            return scorer
        combination = Combination()
        if "reward.members" in keys:
            name = CombineName(keys["reward.combine"])
            combination = Combination(members, name, keys["reward.uncertainty_coef"])
        assert isinstance(scorer, Scorer)
        return load_ensemble(scorer, source, combination)


def _count_layers_per_member(members: Sequence[nn.Module]) -> int:
    return len(list(members[0].get_submodule("branch.blocks").children()))


def _find_top_modules(scorer: Scorer, num_layers: int) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return a scorer's top ``num_layers`` blocks (0: all blocks), and the modules after them."""
    path, tail = find_block_and_tail_paths(scorer.pretrained, needed_by="reward.members", off="1")
    base = scorer.pretrained.base_model
    blocks = list(base.get_submodule(path))
    return blocks[-num_layers:], [base.get_submodule(name) for name in tail]


def _collect_own_weights(scorer: Scorer, num_layers: int) -> dict[str, nn.Parameter]:
    """Return the first member's weights that are not shared, by their names in a ``Member``."""
    blocks, tail = _find_top_modules(scorer, num_layers)
    modules = {f"branch.blocks.{i}": block for i, block in enumerate(blocks)}
    modules |= {f"branch.tail.{i}": module for i, module in enumerate(tail)}
    modules["head"] = getattr(scorer.pretrained, scorer.head_name)
    return {
        f"{prefix}.{name}": weight
        for prefix, module in modules.items()
        for name, weight in module.named_parameters()
    }


def _redraw_head(head: nn.Module, *, seed: int) -> None:
    """Draw a head's weights again with ``seed``; keep their standard deviation."""
    weight = head.get_parameter("weight")
    fresh = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        weight.copy_(fresh * weight.std())
