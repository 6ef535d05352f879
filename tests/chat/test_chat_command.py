"""python -m rlhf.chat: by pipe, in a terminal, and what it refuses."""

import io
import os
import pty
import re
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.chat.__main__ import main
from rlhf.chat.talker import SampledAnswer, Talker
from tests.chat.small_run import POSITIONS, save_run
from tests.conftest import Compose
from tests.runs import ROOT


@pytest.fixture
def run_dir(compose: Compose, tmp_path: Path) -> Path:
    return save_run(tmp_path / "run", compose)


def test_hostile_answers_do_not_reach_the_terminal(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(
        _: Talker, ids: list[int], __: object, write: Callable[[str], None]
    ) -> SampledAnswer:
        write("\x1b[2Jred\x07\r")
        return SampledAnswer("red", ids, "ended")

    monkeypatch.setattr(Talker, "answer", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out == "\ufffd[2Jred\ufffd\ufffd\n"


MISTAKES = [
    (["{run}/ppo"], "{run}/ppo is not the directory of a run: it has no config.yaml"),
    (["{run}", "--model=actor_ema"], "{run} has no ppo/actor_ema to chat with; it has sft/model"),
    (["{run}", "--model=x"], "--model=x: must be sft, actor, actor_ema or a Hugging Face fol"),
    (["{run}", "--model={run}/reward/model"], "gives scores, not answers"),
    (["{run}", "--max-tokens=0"], "--max-tokens=0: must be at least 1"),
    (["{run}", f"--max-tokens={POSITIONS}"], f"use less than {POSITIONS}"),
    (["{run}", "--temperature=-1"], "--temperature -1: must be a finite number of at least 0"),
]


def test_mistakes_end_with_one_message(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in MISTAKES:
        assert main([word.format(run=run_dir) for word in words]) == 2
        shown = capsys.readouterr()
        assert message.format(run=run_dir) in shown.err
        assert (shown.out, shown.err.count("error:"), shown.err.count("\n")) == ("", 1, 1)


def test_a_run_that_has_trained_nothing_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("sft", "ppo"):
        (run_dir / place).rename(run_dir / f"no {place}")
    assert main([str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert "has no ppo/actor or dpo/actor or sft/model to chat with; it has no policy" in error


def test_a_pipe_gets_the_answer_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "hello\n/temperature 0\n/sing\n\nand more"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    assert main([str(run_dir), "--max-tokens=8", "--seed=1"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.strip()) > 0
    assert "temperature" not in shown.out
    assert "The temperature is 0." in shown.err


class Terminal:
    """A chat in a terminal of its own, where Ctrl-C is a key."""

    def __init__(self, *words: object) -> None:
        self.shown = ""
        self.pid, self.keys = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvp(sys.executable, [sys.executable, "-m", "rlhf.chat", *map(str, words)])

    def type(self, text: str) -> None:
        os.write(self.keys, text.encode())

    def expect(self, pattern: str, *, seconds: float = 120) -> str:
        """Wait until the terminal shows ``pattern``; returns what it showed up to there."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            left = end - time.monotonic()
            assert left > 0, self.shown
            if select.select([self.keys], [], [], left)[0]:
                self.shown += os.read(self.keys, 10_000).decode(errors="replace")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def close(self) -> int:
        try:
            while os.read(self.keys, 10_000):
                pass
        except OSError:  # the other end is closed
            pass
        os.close(self.keys)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_a_chat_in_a_terminal(run_dir: Path) -> None:
    # With so many positions the answer to the second message cannot end before Ctrl-C.
    config = run_dir / "ppo/actor/config.json"
    config.write_text(config.read_text().replace(f": {POSITIONS}", ": 1000000"))
    frozen = run_dir / "config.yaml"
    frozen.write_text(
        frozen.read_text().replace("min_response_tokens: 0", "min_response_tokens: 500000")
    )
    terminal = Terminal(run_dir, "--max-tokens=500000", "--seed=1")
    terminal.expect(r"ppo/actor\s+temperature 1;.*\r\n.*\r\n> ")
    terminal.type("hello\n")
    terminal.expect(r"hello\r\n[^>]{20}")
    terminal.type("\x03")
    terminal.expect(r"\(stopped\)\r\n> ")
    terminal.type("/temperature 2\n")
    terminal.expect(r"The temperature is 2\.\r\n> ")
    terminal.type("/regenerate\n")
    terminal.expect(r"regenerate\r\n[^>]{20}")
    terminal.type("\x03")
    terminal.expect(r"\(stopped\)\r\n> ")
    terminal.type("\x04")
    assert terminal.close() == 0
