"""Pack responses into named tensors, to store them in files; join responses of several ranks.

Shapes: B = sequences, T = response tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.base.ranks import Ranks
from rlhf.base.types import NO_NUMBER, Batch, Responses, take_rows

FACTS = "facts"  # the name of the tensor that holds, as JSON, everything that is no tensor


def pack_responses(responses: Responses) -> dict[str, Tensor]:
    """Return ``responses`` as tensors on the host, by name."""
    fields = responses._asdict() | dict(responses.extras)
    tensors = {name: value.cpu() for name, value in fields.items() if isinstance(value, Tensor)}
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    text = json.dumps({"names": list(tensors)} | lists).encode()
    return tensors | {FACTS: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def packed_tensor_names(facts: Tensor) -> list[str]:
    """Return the names of the packed tensors that the JSON text in the tensor ``facts`` lists."""
    names: list[str] = _read_facts(facts)["names"]
    return names


def unpack_responses(packed: Mapping[str, Tensor]) -> Responses:
    """Return the responses, on the host, that ``pack_responses`` packed.

    Tuples in lists of ``extras`` come back as lists, because JSON has no tuples.
    """
    lists = _read_facts(packed[FACTS])
    tensors: dict[str, Any] = {name: packed[name] for name in lists.pop("names")}
    fields = {name: tensors.pop(name) for name in Responses._fields if name in tensors}
    return Responses(**fields, extras=tensors | lists)


def _read_facts(facts: Tensor) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(bytes(facts.tolist()))
    return content


def join_rows(parts: Sequence[Batch], *, pad_id: int) -> Batch:
    """Return all rows of ``parts``, named tuples of the same kind, in their order.

    Tensors (B, T) are padded on the right to one width, tensors (B, P) on the left. Values without
    rows, such as numbers, are taken from the first part.
    """

    def join(name: str, columns: Sequence[Any]) -> Any:
        first_value = columns[0]
        if isinstance(first_value, tuple):
            return join_rows(columns, pad_id=pad_id)
        if isinstance(first_value, Mapping):
            return {key: join(key, [value[key] for value in columns]) for key in first_value}
        if isinstance(first_value, Tensor):
            width = max(value.shape[-1] for value in columns)
            return torch.cat([_fit_to_width(name, value, width, pad_id) for value in columns])
        return list(chain(*columns)) if isinstance(first_value, list) else first_value

    names = parts[0]._fields  # type: ignore[attr-defined]
    return type(parts[0])(*map(join, names, zip(*parts, strict=True)))


def own_responses(responses: Responses, ranks: Ranks) -> Responses:
    """Return this rank's share of the responses of all ranks, on its device."""
    rows = ranks.own_rows(range(len(responses.ids_BT)))
    return take_responses(responses, rows, ranks.device)


def take_responses(responses: Responses, rows: list[int], device: torch.device) -> Responses:
    """Return the responses in ``rows`` on ``device``, as if no others had been sampled with them.

    Their tensors are as wide as the longest of these responses.
    """
    taken = take_rows(responses, rows)
    width = int(taken.attend_BT.sum(dim=1).max())

    def resize(name: str, value: Any) -> Any:
        is_tensor = isinstance(value, Tensor)
        return _fit_to_width(name, value, width, 0).to(device) if is_tensor else value

    changed = {name: resize(name, value) for name, value in taken._asdict().items()}
    extras = {name: resize(name, value) for name, value in taken.extras.items()}
    return Responses(**changed | {"extras": extras})


def _fit_to_width(name: str, tensor: Tensor, width: int, pad_id: int) -> Tensor:
    """Return ``tensor``, padded or cut to ``width`` columns if its ``name`` ends in _BT or _BP."""
    if not name.endswith(("_BT", "_BP")):
        return tensor
    fill = NO_NUMBER if tensor.dtype is torch.long else 0
    fill = pad_id if name in {"ids_BT", "ids_BP"} else fill
    missing = width - tensor.shape[1]
    return pad(tensor, (missing, 0) if name.endswith("_BP") else (0, missing), value=fill)
