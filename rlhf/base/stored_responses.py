"""Responses as plain tensors by name, for files; and responses of several ranks joined.

Shapes: B = sequences, T = response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.base.ranks import Ranks
from rlhf.base.types import NO_TURN, Batch, Responses, Turns, Utterance, take_rows

FACTS = "facts"  # the name of the tensor that holds, as JSON, everything that is no tensor


def pack_responses(responses: Responses) -> dict[str, Tensor]:
    """Return ``responses`` as tensors on the host, by name."""
    found = responses._asdict() | (responses.turns._asdict() if responses.turns else {})
    tensors = {name: each.cpu() for name, each in found.items() if isinstance(each, Tensor)}
    facts: dict[str, Any] = {"names": list(tensors)}
    if responses.turns is not None:
        facts |= {"messages": found["messages"], "failures": found["failures"]}
    text = json.dumps(facts).encode()
    return tensors | {FACTS: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def names_of_tensors(facts: Tensor) -> list[str]:
    """Return the names of the other tensors, from the tensor ``FACTS``."""
    names: list[str] = _read_facts(facts)["names"]
    return names


def unpack_responses(packed: Mapping[str, Tensor]) -> Responses:
    """Return the responses, on the host, that ``pack_responses`` packed."""
    facts = _read_facts(packed[FACTS])
    fields: dict[str, Any] = {n: packed[n] for n in facts["names"] if n in Responses._fields}
    if "messages" not in facts:
        return Responses(**fields)
    own: dict[str, Any] = {n: packed[n] for n in facts["names"] if n in Turns._fields}
    messages = [[Utterance(*each) for each in episode] for episode in facts["messages"]]
    turns = Turns(**own, messages=messages, failures=facts["failures"])
    return Responses(**fields, turns=turns)


def _read_facts(facts: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(facts.tolist()))
    return found


def join_rows(parts: Sequence[Batch], *, pad_id: int) -> Batch:
    """Return all rows of ``parts``, named tuples of the same kind, in their order.

    Their tensors (B, T) are padded on the right to one width, and (B, P) on the left. What is not
    stored per row comes from the first part.
    """
    joined: list[Any] = []
    for name, columns in zip(parts[0]._fields, zip(*parts, strict=True), strict=True):  # type: ignore[attr-defined]
        if isinstance(columns[0], tuple):
            joined.append(join_rows(columns, pad_id=pad_id))
        elif isinstance(columns[0], Tensor):
            width = max(each.shape[-1] for each in columns)
            joined.append(torch.cat([_resized(name, each, width, pad_id) for each in columns]))
        else:
            is_list = isinstance(columns[0], list)
            joined.append(list(chain(*columns)) if is_list else columns[0])
    return type(parts[0])(*joined)


def rows_of_rank(responses: Responses, ranks: Ranks) -> Responses:
    """Return this rank's share of the responses of all ranks, on its device.

    They are as wide as the longest of them, as if this rank had sampled them.
    """
    mine = take_rows(responses, ranks.share(range(len(responses.ids_BT))))
    width = int(mine.attend_BT.sum(dim=1).max())
    return _map_tensors(mine, lambda name, each: _resized(name, each, width, 0).to(ranks.device))


def _map_tensors(batch: Batch, change: Callable[[str, Tensor], Tensor]) -> Batch:
    """Return ``batch`` with each tensor, named by its field, changed."""
    changed: list[Any] = []
    for name, each in batch._asdict().items():  # type: ignore[attr-defined]
        if isinstance(each, tuple):
            changed.append(_map_tensors(each, change))
        else:
            changed.append(change(name, each) if isinstance(each, Tensor) else each)
    return type(batch)(*changed)


def _resized(name: str, tensor: Tensor, width: int, pad_id: int) -> Tensor:
    """Return a tensor (B, T) or (B, P) padded or cut to ``width`` columns, any other as it is."""
    if not name.endswith(("_BT", "_BP")):
        return tensor
    fill = {"ids_BT": pad_id, "ids_BP": pad_id, "turn_BT": NO_TURN}.get(name, 0)
    missing = width - tensor.shape[1]
    return pad(tensor, (missing, 0) if name.endswith("_BP") else (0, missing), value=fill)
