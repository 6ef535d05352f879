"""Build wheels and source archives of rlhf and rlhf-lab into dist/, and check them.

``make release`` builds what is committed. The wheels and what they need are installed into a fresh
environment; runs and tools then start in a folder that has no clone. Each check is a line.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SDIST = "from setuptools import build_meta; build_meta.build_sdist({!r})"
PAIRS = '{{"prompt": "Is it {0} now?", "chosen": "It is {0}.", "rejected": "No idea {0}."}}\n'
MINE = "# @package _global_\ndefaults: [smoke, _self_]\nexperiment: mine\nseed: 5\n"
# Started in this order in a folder with conf/experiment/mine.yaml and pairs.jsonl.
COMMANDS = {
    "smoke": "rlhf experiment=smoke",
    "sweep": "rlhf -m experiment=mine phase=sft seed=1,2",
    "shipped sweep": "rlhf -m sweep=kl_frontier experiment=smoke plan=only",
    "data": "rlhf data pairs.jsonl",
    "chat": "rlhf chat --max-tokens 8",
    "report": "rlhf report",
    "evaluate": "rlhf evaluate",
    "replay": "rlhf replay",
    "resume": "rlhf resume=runs/latest",
    "two ranks": "rlhf experiment=smoke phase=sft hardware.ranks_per_node=2",
    "rlhf-lab": "rlhf experiment=smoke ppo=dapo plan=only",
}


def run(*words: str | Path, cwd: Path) -> str:
    """Run a command, which must succeed and print no traceback; return what it printed."""
    text = [str(word) for word in words]
    ended = subprocess.run(text, cwd=cwd, input="Hi\n", capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}{ended.stderr}"
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.stdout


def check_versions() -> str:
    """Check that the packages and the newest part of the changelog have one version."""
    files = (ROOT / "pyproject.toml", ROOT / "lab/pyproject.toml")
    ours, lab = (tomllib.loads(file.read_text())["project"] for file in files)
    newest = str(re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0])
    assert ours["version"] == lab["version"] == newest, (ours["version"], lab["version"], newest)
    assert f"rlhf=={newest}" in lab["dependencies"]
    return newest


def build(source: Path, scratch: Path) -> str:
    """Build wheels and source archives of the folder ``source`` into dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    wheel = [*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    for package in (source, source / "lab"):
        run(sys.executable, "-c", SDIST.format(str(DIST)), cwd=package)
    run(*wheel, DIST, source, source / "lab", cwd=scratch)
    run(*wheel, scratch / "again", *DIST.glob("*.tar.gz"), cwd=scratch)
    for built in DIST.glob("*.whl"):
        names = set(ZipFile(built).namelist())
        assert names == set(ZipFile(scratch / "again" / built.name).namelist()), built.name
    (rlhf,) = DIST.glob("rlhf-*.whl")
    names = {name.removeprefix("rlhf/program/") for name in ZipFile(rlhf).namelist()}
    listed = run("git", "ls-files", "conf", "sweeps", "launch.py", cwd=ROOT).split()
    assert names.issuperset(listed), set(listed) - names
    return ", ".join(sorted(path.name for path in DIST.iterdir()))


def install(folder: Path) -> str:
    """Install the wheels, and nothing of this clone, into a fresh environment in ``folder``."""
    venv.EnvBuilder().create(folder / "venv")
    python, pins = folder / "venv/bin/python", ROOT / "constraints.txt"
    into = [*PIP, "--python", str(python)]
    run(*into, "install", "-q", "--no-compile", "-c", pins, *DIST.glob("*.whl"), cwd=folder)
    run(*into, "check", cwd=folder)
    where = "import rlhf, rlhf_lab; print(rlhf.__file__, rlhf_lab.__file__)"
    places = run(python, "-c", where, cwd=folder).split()
    assert all(Path(place).is_relative_to(folder) for place in places), places
    return run(folder / "venv/bin/rlhf", "--version", cwd=folder).strip()


def start(command: str, folder: Path) -> str:
    """Start a command of the installed wheels in ``folder``; return the last line it printed."""
    program, *words = command.split()
    lines = run(folder / "venv/bin" / program, *words, cwd=folder).splitlines()
    return f"{command}: {next((line.strip() for line in reversed(lines) if line.strip()), '')}"


def main() -> int:
    """Run all checks, each of which needs those before it; print a line for each."""
    with TemporaryDirectory(prefix="rlhf-release-") as name:
        folder, source = Path(name) / "away", Path(name) / "source"
        (folder / "conf/experiment").mkdir(parents=True)
        (folder / "conf/experiment/mine.yaml").write_text(MINE)
        (folder / "pairs.jsonl").write_text("".join(map(PAIRS.format, range(60))))
        run("git", "archive", "-o", f"{source}.tar", "HEAD", cwd=ROOT)
        shutil.unpack_archive(f"{source}.tar", source, filter="data")
        checks: dict[str, Callable[[], str]] = {
            "versions": check_versions,
            "build": lambda: build(source, Path(name)),
            "install": lambda: install(folder),
        }
        for check, command in COMMANDS.items():
            checks[check] = lambda command=command: start(command, folder)  # type: ignore[misc]
        for check, work in checks.items():
            try:
                print(f"{check:14} ok      {work()[:150]}", flush=True)
            except AssertionError as error:
                print(f"{check:14} failed  {error}", flush=True)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
