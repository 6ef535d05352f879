"""What is printed, on a terminal and elsewhere."""

import re
from io import StringIO

import pytest

from rlhf.run.console import Console, build_config_tree

PPO = {
    "ppo/score_mean": 1.234,
    "ppo/kl_to_reference": -3.21,
    "ppo/clipfrac": 0.031,
    "ppo/response_tokens": 47.6,
    "speed/tokens_per_second": 15234.2,
    "ppo/entropy": 9.99,
}
PPO_TEXT = "score 1.23 kl -3.21 clip 0.03 len 48 tok/s 15,234"


def console(file: StringIO, *, is_terminal: bool, log_every: int | None = 1) -> Console:
    return Console(log_every=log_every, file=file, force_terminal=is_terminal, width=80)


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def interrupted_after_13_steps(console: Console) -> None:
    with console.progress("sft", 100) as progress:
        progress.advance(13, {"sft/loss": 1.0})
        raise KeyboardInterrupt


def test_without_a_terminal_every_nth_step_and_the_last_get_a_line() -> None:
    file = StringIO()
    with console(file, is_terminal=False, log_every=10).progress("ppo", 25) as progress:
        for step in range(1, 26):
            progress.advance(step, PPO)
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["ppo 10/25", "ppo 20/25", "ppo 25/25"]
    assert lines[0] == "ppo 10/25  " + re.sub(r" (?=[a-z])", "  ", PPO_TEXT)


def test_without_a_terminal_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    file, seconds = StringIO(), iter(range(0, 10**6, 7))  # each look at the clock: 7 s later
    monkeypatch.setattr("time.monotonic", lambda: float(next(seconds)))
    with console(file, is_terminal=False, log_every=None).progress("ppo", 12) as progress:
        for step in range(1, 13):
            progress.advance(step, {})
    steps = [line.split()[1] for line in file.getvalue().splitlines()]
    assert steps == ["5/12", "10/12", "12/12"]


def test_the_last_step_is_told_once_and_also_when_the_loop_breaks() -> None:
    file = StringIO()
    with console(file, is_terminal=False, log_every=2).progress("sft", 2) as progress:
        progress.advance(2, {"sft/loss": 1.0})
    assert file.getvalue() == "sft 2/2  loss 1.000\n"

    file = StringIO()
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_13_steps(console(file, is_terminal=False, log_every=10))
    assert file.getvalue() == "sft 13/100  loss 1.000\n"


def test_a_metric_that_is_measured_now_and_then_stays() -> None:
    file = StringIO()
    with console(file, is_terminal=False).progress("sft", 2) as progress:
        progress.advance(1, {"sft/loss": 3.0, "sft/eval_perplexity": 20.0})
        progress.advance(2, {"sft/loss": float("nan")})
    assert file.getvalue().splitlines()[1] == "sft 2/2  loss nan  eval ppl 20.00"


def test_on_a_terminal_one_line_of_80_columns_holds_all() -> None:
    file = StringIO()
    with console(file, is_terminal=True).progress("ppo", 1000) as progress:
        progress.advance(512, PPO)
    last = re.split(r"[\r\n]+", without_escapes(file.getvalue()).rstrip())[-1]
    assert re.fullmatch(rf"ppo [━╸╺]+ +512/1000 {PPO_TEXT} +[-:]+", last), last
    assert len(last) <= 80


def test_lines_are_printed_as_they_are() -> None:
    text = "[bold]saved[/bold] " + "x" * 100 + " 1.5 'a' \x1b[31mred"
    file = StringIO()
    console(file, is_terminal=False).say(text)
    assert file.getvalue() == text.replace("\x1b", "\ufffd") + "\n"


def test_a_table_holds_titles_keys_and_cells() -> None:
    file = StringIO()
    rows: list[dict[str, object]] = [
        {"response": "a [/red] b", "score": 1.23456, "gold": None},
        {"response": "c", "score": -2.0, "gold": 1},
    ]
    console(file, is_terminal=False).print_table("Samples", rows)
    lines = [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]
    assert lines[0] == "Samples"
    assert lines[1].split() == ["response", "score", "gold"]
    assert lines[3:] == ["  a [/red] b   1.235", "  c               -2      1"]


def test_only_the_main_rank_prints(capfd: pytest.CaptureFixture[str]) -> None:
    null = Console(quiet=True)
    null.say("a")
    null.show("b")
    null.print_table("c", [{"d": 1}])
    with null.progress("ppo", 3) as progress:
        progress.advance(1, PPO)
    assert capfd.readouterr() == ("", "")
    Console().say("hello")
    assert capfd.readouterr() == ("hello\n", "")


def test_groups_are_branches_after_single_values() -> None:
    file = StringIO()
    tree = build_config_tree("run", {"ppo": {"kl_ctl": 0.1, "kl_target": None}, "name": "[red]a"})
    Console(file=file, width=60).show(tree)
    assert file.getvalue().splitlines() == [
        "run",
        "├── name: [red]a",
        "└── ppo",
        "    ├── kl_ctl: 0.1",
        "    └── kl_target: null",
    ]


def test_a_screen_is_filled_on_a_terminal_and_printed_elsewhere() -> None:
    terminal, log = StringIO(), StringIO()
    for file in (terminal, log):
        with console(file, is_terminal=file is terminal).full_screen() as show:
            show("step 1")
            show("step 2")
    assert log.getvalue() == "step 1\nstep 2\n"
    to_other_screen = "\x1b[?1049h"
    assert terminal.getvalue().startswith(to_other_screen)
    assert "step 2" in without_escapes(terminal.getvalue())
