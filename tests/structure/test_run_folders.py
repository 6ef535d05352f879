"""One door to run folders: no room but ``rlhf/base/stored_files.py`` opens, lists or parses them.

A run folder may come from a stranger. The door refuses links, pipes, sizes and depths, so that no
command has to.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf.base.stored_files import FORMS
from tests.structure.parsed import nodes_of

ROOT = Path(__file__).parents[2]
DOOR = "rlhf/base/stored_files.py"
ROOMS = ["rlhf/replay.py", "rlhf/export.py", "lab"]
ROOMS += [f"rlhf/{room}" for room in ("runs", "evaluate", "report", "watch", "chat", "compare")]
ROOMS += [f"rlhf/{room}" for room in ("run", "runtime", "jobs", "config")]
ROOMS += [f"rlhf/options/{name}" for name in ("branches", "judges", "phase_store", "replay")]
ROOMS += ["rlhf/options/rollout_log"]

# How Python opens a file, lists a folder or parses what a file holds; methods begin with a dot.
NAMES = {"open", "os.open", "os.walk", "os.scandir", "os.listdir", "json.load", "json.loads"}
NAMES |= {"yaml.load", "yaml.safe_load", "yaml.parse", "OmegaConf.load", "safe_open", "load_file"}
NAMES |= {"shutil.copy", "shutil.copy2", "shutil.copytree", "shutil.copyfile"}
NAMES |= {".open", ".read_text", ".read_bytes", ".glob", ".rglob", ".iterdir"}
OPENER = "open_regular_file"  # open(..., opener=open_regular_file) is the door's way to write

# What reads something else than a run folder.
MESSAGES = "messages of this run's own processes"
OF_LINUX = "files of Linux in /proc"
OF_USER = "files that the command or its configuration names"
PARSED = "parses the text that the door has read"
EXCEPTIONS = {
    ("lab/rlhf_lab/bundle.py", "shutil.copy"): "the bundle that this command has written",
    ("lab/rlhf_lab/ensembles/members.py", "load_file"): "weights of a model folder, as it is built",
    ("rlhf/chat/__main__.py", "os.open"): "the device that swallows output",
    ("rlhf/config/freeze.py", "OmegaConf.load"): PARSED,
    ("rlhf/config/freeze.py", "yaml.parse"): PARSED,
    ("rlhf/config/machine_rates.py", ".read_text"): "rates of this machine, in the user's cache",
    ("rlhf/config/machine_rates.py", "json.loads"): "rates of this machine, in the user's cache",
    ("rlhf/jobs/completion.py", ".read_text"): OF_USER,
    ("rlhf/jobs/completion.py", "json.loads"): OF_USER,
    ("rlhf/jobs/launch_command.py", ".glob"): "the presets in conf/",
    ("rlhf/jobs/launch_command.py", ".read_text"): "the presets in conf/",
    ("rlhf/jobs/launch_command.py", "yaml.safe_load"): OF_USER,
    ("rlhf/jobs/search_command.py", "yaml.safe_load"): "values that the search has drawn",
    ("rlhf/jobs/sweep_command.py", ".glob"): OF_USER,
    ("rlhf/jobs/sweep_command.py", "OmegaConf.load"): OF_USER,
    ("rlhf/options/judges/rubric.py", "yaml.safe_load"): OF_USER,
    ("rlhf/report/page.py", ".read_text"): "files of this package",
    (
        "rlhf/run/finished_phase.py",
        "shutil.copy2",
    ): "called by the door, which has checked the file",
    ("rlhf/run/phase_state.py", "os.open"): "flushes a folder to the drive",
    ("rlhf/run/phase_state.py", "safe_open"): "tensors of files that the manifest lists",
    ("rlhf/run/wandb_run.py", "json.loads"): "values of a record that wandb has parsed",
    ("lab/rlhf_lab/bundle.py", ".open"): "writes the new run, and opens members of a .zip file",
    ("rlhf/runtime/peer_monitor.py", "json.loads"): MESSAGES,
    ("rlhf/runtime/phase_runs.py", ".read_text"): OF_LINUX,
    ("rlhf/runtime/rendezvous.py", "json.loads"): MESSAGES,
    ("rlhf/runtime/watchdog.py", ".read_text"): OF_LINUX,
}


def sources() -> Iterator[tuple[str, tuple[ast.AST, ...]]]:
    """Yield the path of each file of the rooms, and its nodes."""
    files = [path for room in ROOMS for path in sorted(ROOT.glob(f"{room}/**/*.py"))]
    for path in [*files, *(ROOT / room for room in ROOMS if room.endswith(".py"))]:
        yield path.relative_to(ROOT).as_posix(), nodes_of(path.read_text())


def find_calls(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names of forbidden calls."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_guarded = any(
                word.arg == "opener" and ast.unparse(word.value) == OPENER for word in node.keywords
            )
            method = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else ""
            if not is_guarded:
                yield from [each for each in (name, method) if each in NAMES][:1]


def test_only_the_door_reads_run_folders() -> None:
    found = {(path, name) for path, nodes in sources() for name in find_calls(nodes)}
    walks_around = "\n".join(f"{path}: {name}" for path, name in sorted(found - EXCEPTIONS.keys()))
    assert not walks_around, f"read with {DOOR}, or give a reason in EXCEPTIONS:\n{walks_around}"
    assert found == EXCEPTIONS.keys(), "an exception that nothing uses"


def test_names_of_files_are_in_the_table() -> None:
    """A file that runs write is named by its row of ``stored_files.yaml``."""
    named = [
        f"{path}: {node.value}"
        for path, nodes in sources()
        for node in nodes
        if isinstance(node, ast.Constant) and node.value in FORMS["files"]
    ]
    assert not named, f"use the constants of {DOOR}:\n" + "\n".join(named)
