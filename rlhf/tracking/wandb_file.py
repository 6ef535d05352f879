"""Read the files of an offline W&B run: wandb 0.31 has no reader for Python.

The format is LevelDB's log (https://github.com/google/leveldb/blob/main/doc/log_format.md) after a
header of seven bytes; its records are protocol buffers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7
FULL, LAST = 1, 4  # kinds of chunks that complete a record


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, up to a torn last one."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = path.read_bytes(), FILE_HEADER, b""
    while position + HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEADER:
            position += left  # the rest of a block is padding
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER
        if position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if kind in {FULL, LAST}:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """Return what all attempts of a run have logged, in order: one dict per call of ``log``."""
    found = []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for record in read_records(path):
            if record.HasField("history"):
                items = record.history.item
                named = {item.key or "/".join(item.nested_key): item.value_json for item in items}
                found.append({name: json.loads(value) for name, value in named.items()})
    return found
