"""The commands that start this program: ``python launch.py`` in a clone, elsewhere ``rlhf``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# The folder of launch.py, conf/ and sweeps/. A wheel has copies of them in rlhf/program (setup.py).
IN_WHEEL = PACKAGE / "program"
PROGRAM = IN_WHEEL if IN_WHEEL.is_dir() else PACKAGE.parent
LAUNCHER = PROGRAM / "launch.py"
CONF = PROGRAM / "conf"
TOOLS = "chat compare data evaluate export gpu_check replay report runs watch".split()
UNCHOSEN = ("hydra", "local", "methods.yaml")  # of conf/, what is read without being chosen


def is_in_clone() -> bool:
    """Return True if the current folder is a clone of the repository, and this its program."""
    return os.path.isfile("launch.py") and os.path.samefile("launch.py", LAUNCHER)


def name_commands(text: str) -> str:
    """Return ``text``, which names commands as a clone has them, with commands that work here."""
    if is_in_clone():
        return text
    text = text.replace("python launch.py", "rlhf")
    return re.sub(r"python -m rlhf\.([a-z_]+)(?![.\w])", _name_tool, text)


def launch_command(words: Iterable[str]) -> str:
    """Return the command that starts a run with ``words`` from the current folder."""
    return " ".join([name_commands("python launch.py"), shlex.join(words)]).rstrip()


def _name_tool(found: re.Match[str]) -> str:
    return f"rlhf {found[1].replace('_', '-')}"


def holds_own_options(folder: Path) -> bool:
    """Return True if ``folder`` is one that is like conf/, and only has files to be chosen.

    Hydra would read the others without a word of the command, also from a folder with downloads.
    """
    return os.path.isdir(folder) and not any(os.path.exists(folder / name) for name in UNCHOSEN)


def own_conf() -> list[Path]:
    """Return the folder conf/ of the current folder, if a user has made one beside the data."""
    is_own = holds_own_options(Path("conf")) and not is_in_clone()
    return [Path("conf").absolute()] if is_own else []
