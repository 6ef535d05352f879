"""Damage of any kind of file: other bytes, other JSON values, another kind of file."""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 10**7, 10**30, 1.5, -1e308, 1e-300, "", "text", "../..", "\0"),
    *("/etc/passwd", "🙂", [], {}, [1, 2], {"a": 1}, [[[[]]]], [None], {"": None}),
]


def mutate_bytes(draw: Random, path: Path) -> str:
    """Damage the bytes of a file, in place; return what was done."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content) or 1)
    match draw.choice(["cut", "flip", "insert", "empty", "noise", "double"]):
        case "cut":
            path.write_bytes(content[:place])
            return f"cut after {place} bytes"
        case "flip":
            for _ in range(draw.choice([1, 1, 10, 100])):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            return "flipped bits"
        case "insert":
            path.write_bytes(
                content[:place] + draw.randbytes(draw.choice([1, 8, 1000])) + content[place:]
            )
            return f"bytes inserted at {place}"
        case "empty":
            path.write_bytes(b"")
            return "emptied"
        case "noise":
            path.write_bytes(draw.randbytes(draw.choice([1, 100, 10_000])))
            return "replaced by noise"
        case _:
            path.write_bytes(content * 2)
            return "written twice"


def mutate_json(draw: Random, path: Path) -> str:
    """Remove, rename or replace a value at any depth of a JSON file; return what was done."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return mutate_bytes(draw, path)  # an earlier damage
    if draw.random() < 0.1 or not isinstance(content, dict | list):
        content, text = draw.choice(VALUES), "all replaced"
    else:
        text = _mutate_value(draw, content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return text


def _mutate_value(draw: Random, node: Any) -> str:
    """Damage a value inside of ``node``, an object or a list."""
    keys = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return "nothing to change"
    key = draw.choice(keys)
    below = node[key]
    if isinstance(below, dict | list) and below and draw.random() < 0.7:
        return f"{key}: {_mutate_value(draw, below)}"
    if isinstance(node, dict) and draw.random() < 0.3:
        value = node.pop(key)
        if draw.random() < 0.5:
            node[f"{key}_"] = value
            return f"{key} renamed"
        return f"{key} removed"
    node[key] = _deep(draw.choice([10, 200])) if draw.random() < 0.05 else draw.choice(VALUES)
    return f"{key} is now of type {type(node[key]).__name__}"


def _deep(depth: int) -> Any:
    node: Any = []
    for _ in range(depth):
        node = [node]
    return node


def mutate_kind(draw: Random, path: Path) -> str:
    """Put something else in the place of a file: a folder, a link, a FIFO or nothing."""
    path.unlink()
    match draw.choice(["nothing", "folder", "fifo", "loop", "dangling", "device"]):
        case "nothing":
            return "removed"
        case "folder":
            path.mkdir()
            return "a folder"
        case "fifo":
            os.mkfifo(path)
            return "a FIFO"
        case "loop":
            path.symlink_to(path.name)
            return "a link to itself"
        case "dangling":
            path.symlink_to("/nowhere")
            return "a link to nowhere"
        case _:
            path.symlink_to("/dev/zero")
            return "a link to an endless device"


def mutate(draw: Random, path: Path) -> str:
    """Damage a file in one of the ways above; return what was done, with its name."""
    ways = [mutate_bytes, mutate_kind] + [mutate_json] * 4 * (path.suffix == ".json")
    return f"{path.name}: {draw.choice(ways)(draw, path)}"
