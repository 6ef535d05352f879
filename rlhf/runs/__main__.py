"""List runs, compare two, show which came from which, or remove what they left.

python -m rlhf.runs [FOLDER ...] [KEY=VALUE ...]    list the runs in runs/, or in other folders
python -m rlhf.runs diff RUN_DIR RUN_DIR            print the settings and results that differ
python -m rlhf.runs tree [FOLDER ...]               print each run below the run that it came from
python -m rlhf.runs clean [FOLDER ...]              list removable folders; --remove removes them

In a filter, KEY is a field of the list (state=failed) or a key of the configuration, and VALUE is
a value or a pattern ('name=smoke*'). Everything is read from the files of the runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.errors import USER_ERROR, ConfigError
from rlhf.base.program import name_commands
from rlhf.base.user_paths import expand_user_path
from rlhf.config.run_dir import RUNS
from rlhf.report.comparison import command_line_text, read_compared_run
from rlhf.run.console import Console
from rlhf.runs.registry import FoundRun, filter_runs, find_runs, sort_runs
from rlhf.watch.progress import age_text

GIB = 2**30
Output = tuple[Mapping[str, Any], Iterable[str]]  # what --json prints, and the lines for a terminal


def main(arguments: Sequence[str]) -> int:
    """List, compare or clean runs, or print their tree; return the exit code."""
    if arguments[:1] in (["verify"], ["import"]):
        moved = {"verify": "rlhf_lab.verify", "import": "rlhf_lab.bundle import"}[arguments[0]]
        sys.stderr.write(f"error: rlhf.runs {arguments[0]}: use python -m {moved} of rlhf-lab\n")
        return USER_ERROR
    subcommands = {"list": _list, "diff": _diff, "tree": _tree, "clean": _clean}
    chosen = arguments[0] if arguments and arguments[0] in subcommands else "list"
    parser = build_command_parser("rlhf.runs", __doc__, has_json=True)
    parser.add_argument("words", nargs="*", metavar="FOLDER|KEY=VALUE")
    parser.add_argument("--sort", metavar="KEY", help="sort by this field or key, smallest first")
    parser.add_argument("--remove", action="store_true", help="with clean: remove what it lists")
    options = parser.parse_args(arguments[1:] if arguments[:1] == [chosen] else arguments)
    if options.remove and chosen != "clean":
        parser.error("--remove is an option of clean only")
    return run_to_exit_code(lambda: _print(subcommands[chosen], options), as_json=options.json)


def _print(command: Callable[[argparse.Namespace], Output], options: argparse.Namespace) -> Result:
    content, lines = command(options)
    if not options.json:
        Console().say("\n".join(lines))
    return Result(content)


def _find_named_runs(words: Sequence[str]) -> list[FoundRun]:
    """Return the runs in the folders of ``words`` (default: runs/) that fit its filters."""
    filters = [word for word in words if "=" in word]
    folders = [expand_user_path(word, key="FOLDER") for word in words if "=" not in word]
    return filter_runs(find_runs(folders or [RUNS]), filters)


def _list(options: argparse.Namespace) -> Output:
    runs = _find_named_runs(options.words)
    if options.sort is not None:
        runs = sort_runs(runs, options.sort)
    lines = (
        f"{' '.join([str(run.folder), *run.changes])}\n    {', '.join(_describe_run(run))}"
        for run in runs
    )
    compare = name_commands("python -m rlhf.report RUN_DIR RUN_DIR")
    footer = f"{len(runs)} runs; {compare} compares some of them"
    return {"runs": [run.as_json() for run in runs]}, chain(lines, [footer])


def _describe_run(run: FoundRun) -> Iterator[str]:
    yield f"{run.state} ({run.reason})" if run.reason else run.state
    if run.imported_from is not None:
        yield f"imported, was {run.imported_from}"
    yield f"began {age_text(max(0.0, time.time() - run.started))} ago"
    if {"phase", "step"} <= run.last_line.keys():
        yield f"{run.last_line['phase']} {run.last_line['step']}"
    if run.objective is not None:
        yield f"objective {run.objective:.3f}"
        if run.gain is not None and run.gain.interval_text:
            yield f"{run.gain.judge} {run.gain.interval_text}"
    if run.alarms:
        yield f"alarms: {', '.join(run.alarms)}"
    yield _size_text(run.size)


def _size_text(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def _diff(options: argparse.Namespace) -> Output:
    if len(options.words) != 2:  # noqa: PLR2004
        raise ConfigError(f"diff compares two runs, and got {len(options.words)}; name two folders")
    first, second = (
        read_compared_run(expand_user_path(word, key="RUN_DIR")) for word in options.words
    )
    differing = {
        section: {
            name: [mapping.get(name) for mapping in pair]
            for name in dict.fromkeys([*pair[0], *pair[1]])
            if pair[0].get(name) != pair[1].get(name)
        }
        for section, pair in {
            "settings": (first.keys, second.keys),
            "results": (first.measures, second.measures),
        }.items()
    }
    runs = [str(first.folder), str(second.folder)]
    return {"runs": runs, **differing}, _difference_lines(differing)


def _difference_lines(differing: Mapping[str, Mapping[str, list[Any]]]) -> Iterator[str]:
    for section, differences in differing.items():
        yield f"{section}: {len(differences) or 'none'} differ"
        for name, values in differences.items():
            first, second = map(command_line_text, values)
            yield f"  {name}: {first} -> {second}"


def _tree(options: argparse.Namespace) -> Output:
    runs = _find_named_runs(options.words)
    by_path = {os.path.realpath(run.folder): run for run in runs}
    present_paths = {run.imported_from: path for path, run in by_path.items() if run.imported_from}
    children: defaultdict[str, list[FoundRun]] = defaultdict(list)
    for run in runs:
        children[_parent_path(run, present_paths)].append(run)
    lines = []
    for parent in sorted(children.keys() - by_path.keys()):
        lines += [f"{parent} (not among the listed runs)"] if parent else []
        lines += _branch_lines(parent, children, depth=int(bool(parent)))
    return {"runs": [{"folder": str(r.folder), "parents": r.parents} for r in runs]}, lines


def _parent_path(run: FoundRun, present_paths: Mapping[str, str]) -> str:
    """Return the absolute path of the run from which ``run`` took phases; "" if it took none.

    ``present_paths`` are those of imported runs, by the paths that the runs had where they ran.
    """
    parent = next((path for name, path in run.parents.items() if name != "sweep"), "")
    if run.imported_from is not None or "\0" in parent:
        return present_paths.get(parent, parent)  # a path of another machine, or no path
    return os.path.realpath(parent) if parent else ""


def _branch_lines(
    parent: str, children: dict[str, list[FoundRun]], *, depth: int, above: tuple[str, ...] = ()
) -> Iterator[str]:
    for run in children.get(parent, ()):
        path = os.path.realpath(run.folder)
        yield f"{'  ' * depth}{run.folder}  {run.state}  {' '.join(run.changes)}".rstrip()
        if path not in above:  # folders that were edited by hand could name each other
            yield from _branch_lines(path, children, depth=depth + 1, above=(*above, path))


def _clean(options: argparse.Namespace) -> Output:
    from rlhf.runs.removable import find_removable  # imports torch

    removable = list(find_removable(_find_named_runs(options.words)))
    for item in removable if options.remove else ():
        if item.folder.is_dir() and not item.folder.is_symlink():  # others may have removed it
            shutil.rmtree(item.folder)
    lines = [f"{_size_text(r.size):>10}  {r.description}: {r.folder}" for r in removable]
    total = _size_text(sum(item.size for item in removable))
    outcome = "removed" if options.remove else "can be removed: repeat the command with --remove"
    rows = [{"folder": str(r.folder), "what": r.description, "bytes": r.size} for r in removable]
    lines.append(f"{len(removable)} folders, {total}, {outcome}")
    return {"removed": options.remove, "found": rows}, lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
