"""The configuration of a run as a tree for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf.base.safe_text import for_terminal
from rlhf.config.typed import shown

if TYPE_CHECKING:
    from rich.tree import Tree


def config_tree(title: str, values: Mapping[str, Any]) -> Tree:
    """Return a tree of nested values; groups come after single values."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(title, style="bold"), guide_style="dim")
    groups = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    for key, value in values.items():
        if key not in groups:
            tree.add(Text(for_terminal(f"{key}: {shown(value)}")))
    for key, value in groups.items():
        tree.add(config_tree(key, value))
    return tree
