"""The commands that start this program: ``python launch.py`` in a clone, elsewhere ``rlhf``."""

from __future__ import annotations

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


def is_in_clone() -> bool:
    """Return True if the current folder is a clone of the repository, and this its program."""
    here = Path("launch.py")
    return here.is_file() and here.samefile(LAUNCHER)


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


def own_conf() -> list[Path]:
    """Return the folder conf/ of the current folder, if a user has made one beside the data."""
    folder = Path("conf").absolute()
    return [folder] if folder.is_dir() and not is_in_clone() else []
