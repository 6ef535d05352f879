"""A program that has only AGENTS.md goes from a file of data to a compared result to pass on."""

import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.documents import read_document
from tests.runs import ROOT, python
from tests.structure.test_docs import commands_of

pytestmark = pytest.mark.slow

PAGE = ROOT / "AGENTS.md"
SMALL = ["experiment=smoke", "phase=sft", "hardware.dtype=fp32", "model.vocab_size=400"]
SMALL += ["data.split=[1,0,0]", "sft.batch_size=16"]
LINES = 80  # of the page: a program reads all of it before it begins


class Agent:
    """A program that knows the commands of the page by their numbers, and reads their JSON."""

    def __init__(self, folder: Path) -> None:
        self.commands = commands_of(PAGE.read_text())
        self.folder = folder
        self.used: set[int] = set()

    def run(self, number: int, *words: str, **values: Iterable[str]) -> tuple[int, dict[str, Any]]:
        """Run a command of the page; return its exit code and its document, or its last line.

        ``words`` replace the command's words for the same keys; ``values`` are the placeholders'.
        """
        self.used.add(number)
        keys = {word.partition("=")[0] for word in words}
        command = [
            word
            for word in shlex.split(self.commands[number - 1])[1:]
            if "=" not in word or word.partition("=")[0] not in keys
        ]
        for name, given in values.items():
            left = iter(given)
            command = [w.replace(name, next(left)) if name in w else w for w in command]
        if command[0] == "launch.py":
            command[0] = str(ROOT / "launch.py")
        ended = python(*command, *words, cwd=self.folder)
        assert "Traceback" not in ended.stderr
        if "--json" not in command:
            return ended.returncode, {"said": (ended.stderr or ended.stdout).splitlines()[-1]}
        schema = "plan" if "plan=only" in command else command[1].partition(".")[2]
        return ended.returncode, read_document(schema, ended.stdout)


def words_of(remedy: str) -> list[str]:
    """Return the words KEY=VALUE of a remedy, as the page says."""
    return [word for word in shlex.split(remedy) if re.match(r"[a-z_.]+=", word)]


def test_a_program_goes_from_data_to_a_compared_result(tmp_path: Path) -> None:
    rows = [{"what": f"Name pet number {n}.", "reply": f"Cat {n}."} for n in range(60)]
    data = tmp_path / "pets.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = Agent(tmp_path)

    code, look = agent.run(1, *SMALL, FILE=[data.name])
    assert code == look["error"]["exit_code"] == 2
    repaired = [*SMALL, *words_of(look["error"]["remedy"])]
    code, look = agent.run(1, *repaired)
    assert code == 0
    assert look["datasets"][0]["train"] == len(rows)
    code, plan = agent.run(2, *repaired)
    assert (code, plan["fits"]) == (0, True)

    code, _ = agent.run(3, *repaired, "checkpoint.stop_after=sft/1", NAME=["pets"])
    assert code == 130
    _, found = agent.run(7, NAME=["pets"])
    (first,) = found["runs"]
    _, now = agent.run(6, RUN_DIR=[first["folder"]])
    assert (first["state"], now["state"], now["phases"][0]["step"]) == ("ended", "ended", 1)
    assert agent.run(5, RUN_DIR=[first["folder"]])[0] == 0
    assert agent.run(4, *repaired, "sft.lr=1e-2", "seed=1", NAME=["pets"])[0] == 0

    _, found = agent.run(7, NAME=["pets"])
    objectives = [run["objective"] for run in found["runs"]]
    assert {run["state"] for run in found["runs"]} == {"finished"}
    assert objectives == sorted(objectives)
    code, compared = agent.run(8, RUN_DIR=[run["folder"] for run in found["runs"]])
    assert (code, len(compared["settings"])) == (0, 2)
    decided = [each for each in compared["differences"] if each["verdict"] in {"higher", "lower"}]
    assert compared["differences"]
    assert not decided, "one seed decides nothing"

    code, verified = agent.run(9, "--replay", "none", RUN_DIR=[first["folder"]])
    assert code == 0
    assert not [each for each in verified["checks"] if each["state"] == "differs"]
    assert agent.run(10, RUN_DIR=[first["folder"]], FILE=["best"])[0] == 0
    assert (tmp_path / "best.zip").is_file()
    assert agent.used == {*range(1, len(agent.commands) + 1)}, "every command of the page"


def test_the_page_is_short_and_has_ten_commands() -> None:
    lines = PAGE.read_text().splitlines()
    assert len(lines) <= LINES
    numbers = re.findall(r"^python .* # (\d+)\. ", PAGE.read_text(), re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 11)]
