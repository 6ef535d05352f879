"""``python -m rlhf.data``: the lines, the marks of what is learned, JSON and the page."""

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from runpy import run_module
from typing import Any

import datasets
import pytest

from rlhf.look.inspection import Look as Figures
from rlhf.look.look_command import main, print_look
from rlhf.look.shown_examples import ShownExample, Span
from rlhf.run.console import Console
from tests.data.row_tables import write
from tests.documents import read_document

Look = Callable[..., str]


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Look:
    """Run the command in this process; return what it printed."""

    def run(*words: object, rc: int = 0) -> str:
        assert main([str(word) for word in words]) == rc
        said = capsys.readouterr()
        return said.out if rc == 0 else said.err

    return run


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    numbers = range(start, start + count)
    return [
        {"prompt": f"What is {n} + {n}?", "chosen": str(2 * n), "rejected": f"no idea of {n}"}
        for n in numbers
    ]


def test_the_look_names_what_is_wrong_with_a_folder(look: Look, tmp_path: Path) -> None:
    bad = [{"prompt": "a", "chosen": "", "rejected": "b"}]
    train = [each | {"note": "n"} for each in pairs(40) + bad]
    (tmp_path / "pets").mkdir()
    write(tmp_path / "pets" / "train.jsonl", train)
    write(tmp_path / "pets" / "val.jsonl", pairs(10, start=35))
    said = look(tmp_path / "pets")
    first, *_ = said.splitlines()
    assert first.endswith(
        "preference, 50 examples (10 held out), 1 skipped (1 chosen is empty "
        f"(first: {tmp_path / 'pets' / 'train.jsonl'}, row 41)); "
        "reads prompt, chosen, rejected; not read: note; "
        "trains on train.jsonl, holds out val.jsonl"
    )
    assert "data: 45 examples: sft 9 (2 held out)" in said
    assert "The chosen response is the shorter one in 40 of 40 pairs" in said
    assert "5 prompts are on both sides of the data's own split" in said
    assert "(train.jsonl, row 36 and val.jsonl, row 1; row 37 and val.jsonl, row 2;" in said


def test_learned_tokens_are_marked(look: Look, tmp_path: Path) -> None:
    said = look(write(tmp_path / "a.jsonl", pairs(30)), "seed=3")
    assert "What is 15 + 15?[[ 30<|end|>]]" in said
    titles = [line.split(" (")[0] for line in said.splitlines() if line.startswith("--- ")]
    assert {*titles} == {"--- sft learns", "--- reward rejects"}  # chosen ones are as in SFT


def test_limits_that_keep_99_percent_are_words_to_type(look: Look, tmp_path: Path) -> None:
    rows = pairs(96) + [row | {"chosen": "x " * 300} for row in pairs(4, start=200)]
    file = write(tmp_path / "a.jsonl", rows)

    def lengths_of_sft(word: str) -> dict[str, Any]:
        lengths = json.loads(look(file, word, "--json"))["lengths"]
        return next(each for each in lengths if each["key"] == "sft.max_tokens")

    sft = lengths_of_sft("sft.max_tokens=64")
    assert (sft["limit"], sft["over"], sft["measured"]) == (64, 4, 100)
    assert sft["keeps_99"] in look(file, "sft.max_tokens=64")
    again = lengths_of_sft(sft["keeps_99"])
    assert again["over"] <= 1
    assert again["keeps_99"] == ""
    assert sum(count for _, count in sft["bars"]) == 100
    assert sum(count for first, count in sft["bars"] if first > 64) == 4


def test_what_a_run_would_refuse_is_a_finding(look: Look, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs(30)]
    file = write(tmp_path / "a.jsonl", rows)
    said = look(file)
    command = f"`python launch.py data=local data.path={file}`"
    assert f"{command} would be refused: data: the reward phase finds no pairs" in said
    assert "?[[ " in said
    assert "refused" not in look(file, "phase=sft", "sft.batch_size=4")


def test_pairs_of_equal_lengths_teach_no_length(look: Look, tmp_path: Path) -> None:
    for more, part in (("!!", "the longer one in 30 of 30"), ("!", "")):
        rows = [
            row | {"chosen": row["chosen"] + more, "rejected": row["chosen"][::-1] + "0"}
            for row in pairs(30, start=50)
        ]
        said = look(write(tmp_path / "a.jsonl", rows), "phase=reward")
        assert part in said
        assert ("The chosen response" in said) == bool(part)


@pytest.mark.parametrize(
    "names", [("chosen_score", "rejected_score"), ("rating of chosen", "rating of rejected")]
)
def test_pairs_whose_scores_say_the_reverse_are_counted(
    names: tuple[str, str], look: Look, tmp_path: Path
) -> None:
    better, worse = names
    rows = [row | {better: str(n % 3), worse: 1.5} for n, row in enumerate(pairs(30))]
    file = write(tmp_path / "a.jsonl", rows)
    lines = look(file).splitlines()
    fault = f"20 pairs whose {better} is below {worse}"
    assert lines[0].endswith(f"; to check: {fault} (first: {file}, row 1)")
    places = "a.jsonl, row 1; row 2; row 4; row 5; row 7; and 15 more"
    assert f"  - Of {file}, {fault} ({places})" in lines
    rows = [row | {better: 2, worse: 2} for row in rows]
    assert "to check" not in look(write(tmp_path / "b.jsonl", rows))


def test_prompts_beside_other_conversations_are_counted(look: Look, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "prompt": [f"Hi{n}", said(f"uHi{n}"), f"\n\nHuman: Hi{n}\n\nAssistant:"][n % 3],
            "chosen": said(f"uHi{n} aYes uMore aOk{n}"),
            "rejected": said(f"uHi{n} aYes uMore aNo{n}"),
        }
        for n in range(30)
    ]
    assert "to check" not in look(write(tmp_path / "a.json", rows))
    rows[3] |= {"prompt": "Bye"}
    rows[4] |= {"prompt": said("uBye")}
    file = write(tmp_path / "b.json", rows)
    lines = look(file).splitlines()
    fault = "2 rows whose prompt is not in the conversation of chosen, which is used instead"
    assert lines[0].endswith(f"; to check: {fault} (first: {file}, row 4)")
    assert f"  - Of {file}, {fault} (b.json, row 4; row 5)" in lines


def said(turns: str) -> list[dict[str, str]]:
    """Return messages: u or a, then the content, which is empty after _."""
    roles = {"u": "user", "a": "assistant"}
    texts = turns.split()
    return [{"role": roles[t[0]], "content": t[1:].removeprefix("_")} for t in texts]


def test_conversations_that_end_with_the_user_are_counted_with_rows(
    look: Look, tmp_path: Path
) -> None:
    talks = [f"uHi{n} aYes uMore aOk{n}" for n in range(20)]
    talks[3] = talks[5] = "uHi aYes uMore"
    talks[8] = "uHello{n}"
    talks[9] = "uHi9 a_ uMore aOk9"
    file = write(tmp_path / "a.jsonl", [{"messages": said(each)} for each in talks])
    lines = look(file, "phase=sft", "data.deduplicate=false").splitlines()
    unanswered = "conversations whose turns after the last answer are not used"
    assert f"2 skipped (2 {unanswered} (first: {file}, row 4))" in lines[0]
    assert f"  - Not used of {file}, 2 times: {unanswered} (a.jsonl, row 4; row 6)" in lines
    assert (
        "  - 1 examples have no response, or end with the user: only PPO uses them, as prompts "
        "(a.jsonl, row 9)"
    ) in lines
    assert "  - 1 examples have an empty turn, which is skipped (a.jsonl, row 10)" in lines


def test_json_has_one_schema(
    look: Look, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read_document("data", look("samples:english", "--json"))
    texts = write(tmp_path / "a.jsonl", [{"text": "a b c"}] * 9)
    assert read_document("data", look(texts, "--json"))["findings"]
    assert main([str(tmp_path / "none.jsonl"), "--json"]) == 2
    refused = read_document("data", capsys.readouterr().out)["error"]
    assert refused["key"] == str(tmp_path / "none.jsonl")
    assert refused["rule"].startswith("no such file or folder. ")
    with pytest.raises(SystemExit, match="2"):
        main(["samples:english", "--json", "--colour"])
    assert read_document("data", capsys.readouterr().out)["error"]["rule"].endswith("--colour")


def test_page_is_one_file_that_loads_nothing_and_escapes_texts(look: Look, tmp_path: Path) -> None:
    rows = [row | {"chosen": f"<script>alert({n})</script>"} for n, row in enumerate(pairs(30))]
    page = tmp_path / "look.html"
    look(write(tmp_path / "<b>.jsonl", rows), "--html", page)
    text = page.read_text()
    assert "&lt;script&gt;alert(" in text
    assert "<script" not in text
    assert "<b>.jsonl" not in text
    assert "src=" not in text
    assert "<mark>" in text
    assert text.count('class="histogram"') == 4


def test_every_answer_of_a_conversation_is_marked_and_measured(look: Look, tmp_path: Path) -> None:
    turns = [("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2 " * 60)]
    rows = [
        {"messages": [{"role": role, "content": f"{text} {n}"} for role, text in turns]}
        for n in range(20)
    ]
    file = write(tmp_path / "a.jsonl", rows)
    said = look(file, "phase.order=[sft,ppo]", "rewards.a={kind: length, most: 9}")
    assert "Assistant:[[ 1 " in said
    assert "learns 40 answers in 20 conversations" in said
    assert "20 of 40 the data's own answers are longer than rollout.max_response_tokens=32" in said
    assert "(a.jsonl, row 1; row 2; row 3; row 4; row 5; and 15 more)" in said


def test_what_is_learned_is_green_on_a_terminal() -> None:
    shown = ShownExample("sft learns", "a.jsonl, row 1", 9, [Span("Q:", False), Span(" a", True)])
    out = StringIO()
    console = Console(file=out, force_terminal=True)
    print_look(Figures([], [], "t", "plain", [], [], [shown]), console)
    assert "Q:\x1b[32m a\x1b[0m" in out.getvalue()
    assert "[[" not in out.getvalue()


def test_the_middle_of_a_long_text_is_cut_on_the_terminal(look: Look, tmp_path: Path) -> None:
    rows = [row | {"prompt": f"begin{'xy ' * 900}end {n}?"} for n, row in enumerate(pairs(20))]
    said = look(write(tmp_path / "a.jsonl", rows), "phase=sft", "sft.max_tokens=1024")
    assert re.search(r"begin(xy ){1,600}x?y? ?\.\.\. \([\d,]+ characters\) \.\.\. ", said)


def test_ids_of_the_hub_and_words_of_the_launcher_name_data(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets = datasets.DatasetDict(train=datasets.Dataset.from_list(pairs(30)))
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **_: {"org/pets": pets}[path])
    assert look("org/pets").startswith("org/pets: preference, 30 examples")
    said = look("data=synthetic", "data.size=60", "phase=sft")
    assert said.startswith("synthetic: preference, 60 examples")
    assert "?\n\nAssistant:[[" in said or ".\n\nAssistant:[[" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file"),
        (["a.jsonl", "b.jsonl"], "give one file or folder, or several as data.path=[ONE,OTHER]"),
        (["samples:latin"], "samples:latin: no such sample"),
        (["samples:english", "sft.max_tokes=3"], "did you mean sft.max_tokens"),
        (["samples:english", "sft.max_tokens=-3"], "sft.max_tokens=-3: must be"),
        (["samples:english", "phase=nothing"], "unknown option phase=nothing"),
        (["samples:english", "model=pretrained", "model.path=nowhere"], "model.path=nowhere"),
        (["data=environment", "phase=pipeline_rule"], "environment"),
    ],
)
def test_bad_input_is_one_sentence(look: Look, words: list[str], message: str) -> None:
    said = look(*words, rc=2)
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said


def test_the_command_is_a_module_of_the_data_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rlhf.data", "samples:chinese"])
    with pytest.raises(SystemExit, match=r"^0$"):
        run_module("rlhf.data", run_name="__main__")
    assert "samples:chinese: preference, 24 examples, 0 skipped" in capsys.readouterr().out


def test_examples_that_no_phase_can_use_are_refused_as_by_a_run(look: Look, tmp_path: Path) -> None:
    words = ("phase=sft", "data.split=[1,0,0]")
    rows = [{"prompt": f"Q {n}?", "completion": "Yes", "label": n % 5} for n in range(60)]
    said = look(write(tmp_path / "scores.jsonl", rows), *words)
    assert "would be refused: data: the sft phase has 0 examples to train on" in said
    few = [{"prompt": f"Q {n}?", "completion": f"Yes {n}"} for n in range(20)]
    said_of_few = look(write(tmp_path / "few.jsonl", few), *words)
    assert "needs at least 32, and 1 held out. Use sft.batch_size=2 sft.epochs=" in said_of_few
    assert "Turn scores into good/bad labels in data.sets.NAME.columns" in said
    marked = [row | {"label": n % 2, "note": "ab"[n % 2]} for n, row in enumerate(rows)]
    said = look(write(tmp_path / "marks.jsonl", marked), *words)
    assert "refused" not in said
    assert "not read: note (a, b)" in said
