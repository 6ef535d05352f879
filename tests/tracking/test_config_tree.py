"""The configuration on the terminal."""

from __future__ import annotations

import io

from rlhf.tracking.config_tree import config_tree
from rlhf.tracking.console import Console


def test_groups_are_branches_after_single_values() -> None:
    file = io.StringIO()
    tree = config_tree("run", {"ppo": {"kl_ctl": 0.1, "kl_target": None}, "name": "[red]a"})
    Console(log_every=1, file=file, width=60).show(tree)
    assert file.getvalue().splitlines() == [
        "run",
        "├── name: [red]a",
        "└── ppo",
        "    ├── kl_ctl: 0.1",
        "    └── kl_target: null",
    ]
