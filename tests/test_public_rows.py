"""Rows of public bug reports, and random ones: used right, or refused by name.

All texts are invented and say if they are right, so that what a model would learn can be checked.
What a refusal proposes is read back as it is printed. P1 to P13 name findings of a list.
"""

import json
import random
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from rlhf.base.errors import DataError
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.reading import describe_dataset
from rlhf.data.records import RawDataset, Record
from rlhf.look.look_command import compose_config, split_words
from tests.data.row_tables import Rows, load, write

ROWS = 36


def make(**columns: Any) -> Rows:
    """Return rows of columns, each a constant or a function of the row's number."""
    return [{n: v(i) if callable(v) else v for n, v in columns.items()} for i in range(ROWS)]


def ask(i: int) -> str:
    return f"What is the number {i} good for?"


def good(i: int) -> str:
    return f"It counts {i} apples: the right answer."


def longer(i: int) -> str:
    return good(i) + " Yes." * (i % 3)


def bad(i: int) -> str:
    return f"No idea of {i}: a wrong answer."


def is_first(i: int) -> bool:
    return i * 7 % 12 < 7


def first(i: int) -> str:
    return good(i) if is_first(i) else bad(i)


def second(i: int) -> str:
    return bad(i) if is_first(i) else good(i)


def talk(i: int, answer: Callable[[int], str] = good, **more: Any) -> Rows:
    said = {"role": "assistant", "content": answer(i)} | more
    return [{"role": "user", "content": ask(i)}, said]


def either(yes: Any, no: Any) -> Callable[[int], Any]:
    return lambda i: yes if is_first(i) else no


def numpy_text(items: Rows) -> str:
    """Return a list as numpy prints it: without commas."""
    return "[" + "\n ".join(map(str, items)) + "]"


def is_right(record: Record) -> bool:
    """Return True if no phase would learn a wrong answer, or the text of a list."""
    if "{" in f"{record.prompt}{record.chosen}" or record.chosen is None:
        return record.chosen is None
    if record.rejected is not None:
        better, worse = (
            [word in text for word in ("right", "Perhaps", "wrong")].index(True)
            for text in (record.chosen, record.rejected)
        )
        return better < worse
    return "right" in record.chosen or record.grade is False or isinstance(record.grade, float)


def assert_right(found: RawDataset) -> None:
    wrong = [record for record in (*found.train, *(found.eval or [])) if not is_right(record)]
    assert not wrong, (wrong[0], describe_dataset(found))
    grades = {record.grade: record for record in found.train if isinstance(record.grade, float)}
    if grades:
        assert "right" in str(grades[max(grades)].chosen)


def proposed(refusal: str) -> list[str]:
    return shlex.split(refusal.partition("(docs/data.md): ")[2].splitlines()[0])


def read_back(refusal: str) -> RawDataset:
    """Read the rows by the words of a refusal."""
    parsed: Any = OverridesParser.create().parse_override(proposed(refusal)[-1]).value()
    return load(None, sets={"mine": DatasetConfig(**parsed)})


AB, ONE = {"response_a": first, "response_b": second}, {"prompt": ask, "response": first}
LIST = {"prompt": ask, "responses": lambda i: [f"Perhaps {i} or so.", good(i), bad(i)]}
MARKS = (
    "accepted is_correct correct upvoted passed thumbs_up vote toxic winner stars judge_score a7"
)
# Columns that say nothing of a response, some of them on a short scale.
HARMLESS: dict[str, Any] = {
    "id": lambda i: i,
    "row_number": lambda i: i + 1,
    "length": lambda i: len(good(i)),
    "num_tokens": lambda i: 3 * len(good(i).split()) + i % 7,
    "timestamp": lambda i: 1.7e9 + i,
    "created_at": lambda i: f"2026-11-{i % 28 + 1:02} 10:00",
    "language": lambda i: ["en", "de", "no"][i % 3],
    "url": lambda i: f"https://example.org/good/{i}",
    "hash": lambda i: f"{i * 7919 + 9973:08x}",
    "version": 1,
}
# Rows that are read.
USED: dict[str, dict[str, Any]] = {
    **{f"P2 {n}": LIST | {n: [2, 1, 3]} for n in "ranks ranking rank human_rank".split()},
    **{f"P2 {n}": LIST | {n: [3, 9.5, 1]} for n in "ratings score rewards judge_scores".split()},
    "P4 JSON": {"messages": lambda i: json.dumps(talk(i))},
    "P4 Python": {"messages": lambda i: str(talk(i))},
    "P4 numpy": {"messages": lambda i: numpy_text(talk(i))},
    "P4 pairs": {"chosen": lambda i: str(talk(i)), "rejected": lambda i: json.dumps(talk(i, bad))},
    "P4 beside a prompt": {
        "prompt": ask,
        "chosen": lambda i: json.dumps(talk(i)),
        "rejected": lambda i: json.dumps(talk(i, bad)),
    },
    "P4 one message": {"prompt": ask, "completion": lambda i: str(talk(i)[1])},
    "harmless num_words": {
        "prompt": ask,
        "response": longer,
        "n": lambda i: len(longer(i).split()),
    },
    **{
        f"harmless {name}": {"prompt": ask, "response": good, name: values}
        for name, values in HARMLESS.items()
    },
    "P13 integers": {"prompt": ask, "completion": first, "label": either(1, 0)},
    "P13 signs": {"prompt": ask, "completion": first, "label": either(1, -1)},
}
# Rows that are refused, a part of the refusal, and if the proposal is a whole one.
REFUSED: dict[str, tuple[dict[str, Any], str, bool]] = {
    **{f"P2 {n}": (LIST | {n: [2, 1, 3]}, n, False) for n in "labels order ranking_score".split()},
    "P2 objects": (LIST | {"notes": [{"stars": 1}, {"stars": 2}, {"stars": 3}]}, "notes", False),
    "P2 the best": (LIST | {"best": lambda i: i % 3}, "'best' (0, 1, 2)", False),
    **{f"P3 {n}": (ONE | {n: either(True, False)}, f"'{n}'", True) for n in MARKS.split()},
    "P3 message": (
        {"messages": lambda i: talk(i, first, rating=1 if is_first(i) else -1)}, "rating", True
    ),
    "P3 Alpaca": ({"instruction": ask, "output": first, "ok": either("yes", "no")}, "'ok'", True),
    "P3 text": ({"text": first, "accepted": either(True, False)}, "'accepted'", False),
    "P5 LMSYS": (
        {"id": lambda i: f"{i * 7919:x}", "prompt": ask, **AB,
         "winner_model_a": either(1, 0), "winner_model_b": either(0, 1), "winner_tie": 0},
        "'response_a'", True,
    ),
    "P5 WSDM": ({"id": lambda i: i, "prompt": ask, **AB, "winner": either("model_a", "model_b")},
                "'response_a'", True),
    "P5 Argilla": ({"id": str, "status": "x", "instruction": ask, "response1": first,
                    "response2": second, "preference.responses": "x"}, "response1", False),
    "P5 SQuAD": ({"context": good, "question": ask, "answers": {"text": ["x"]}}, "context", False),
    "P5 capitals": ({"Prompt": ask, "Chosen": good, "Rejected": bad}, "Prompt", True),
    "P5 scores": ({"question": ask, "answer_0": first, "answer_1": second,
                   "score_0": either(0.5, -1), "score_1": either(0, 0.5)}, "answer_0", True),
    "P5 batch": ({"id": lambda i: f"batch_{i}", "custom_id": lambda i: f"request-{i}",
                  "response": {"body": "x"}}, "custom_id", False),
    "A1 preference": ({"prompt": ask, **AB, "preference": either("a", "b")}, "response_a", True),
    "A1 ties": (
        {"prompt": ask, **AB, "vote": lambda i: either("A", "B")(i) if i % 5 else "tie"},
        "response_a", True,
    ),
    "A1 good": ({"question": ask, "good": good, "bad": bad}, "question, good, bad", True),
    "A1 better": ({"input": ask, "better": good, "worse": bad}, "better", True),
    "P8 Label Studio": ({"prompt": ask, "answer1": first, "answer2": second,
                         "pw": either("left", "right")}, "'answer1'", True),
    "P8 ranker": ({"prompt": ask, "items": lambda i: [{"body": first(i)}, {"body": second(i)}],
                   "ranker": {"rank": ["y", "x"]}}, "'items'", False),
    "P8 winning": ({"prompt": ask, "winning_response": good, "losing_response": bad},
                   "'losing_response'", True),
    "P8 blanks": ({"prompt": ask, " chosen": good, " rejected": bad}, "' rejected'", True),
    "P6 unlike": (ONE | {"split": lambda i: ["train", "test", "mine"][i % 3]}, "'split'", False),
}  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_rows_are_used_right(name: str, tmp_path: Path) -> None:
    found = load(write(tmp_path / "rows.jsonl", make(**USED[name])))
    assert len(found.train) >= ROWS
    assert_right(found)


@pytest.mark.parametrize("name", ["id", "row_number"])
def test_numbers_of_few_rows_are_no_scale(name: str, tmp_path: Path) -> None:
    rows = make(**ONE, **{name: HARMLESS[name]})[:9]
    assert len(load(write(tmp_path / "rows.jsonl", rows)).train) == len(rows)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_refused_and_the_proposal_is_right(name: str, tmp_path: Path) -> None:
    columns, part, is_whole = REFUSED[name]
    with pytest.raises(DataError) as refused:
        load(write(tmp_path / "rows.jsonl", make(**columns)))
    text = str(refused.value)
    assert part in text
    if is_whole:
        found = read_back(text)
        assert_right(found)
        assert len(found.train) >= ROWS - 8  # but for ties
    elif "data.md" in text:
        open_words = ("CHOOSE", "QUESTION", "scores_or_ranks", "responses: responses", "text: text")
        assert any(word in text for word in open_words), text


def test_the_proposal_is_typed_as_it_is_printed(tmp_path: Path) -> None:
    file = write(tmp_path / "my rows.jsonl", make(**REFUSED["A1 ties"][0]))
    with pytest.raises(DataError) as refused:
        load(file)
    for place in ([str(file)], ["data=local", f"data.path='{file}'"]):
        config = compose_config(*split_words([*place, *proposed(str(refused.value))]))
        assert config.data.path is None
        assert (
            "pick(vote == 'A', response_a, " in (config.data.sets["mine"].columns or {})["chosen"]
        )


@pytest.mark.parametrize(
    "words", [["train", "test"], ["train", "valid1", "valid2"], ["TRAIN", "dev"]]
)
def test_rows_are_held_out_by_a_column(words: Sequence[str], tmp_path: Path) -> None:
    columns = {"prompt": ask, "response": good, "part": lambda i: words[i % len(words)]}
    found = load(write(tmp_path / "rows.csv", make(**columns)))
    assert len(found.train) == ROWS // len(words)
    assert len(found.eval or []) == ROWS - len(found.train)
    assert f"holds out rows with part={' or '.join(words[1:])}" in describe_dataset(found)


def test_rows_that_are_all_held_out_are_trained_on(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.jsonl", make(prompt=ask, response=good, split="test")))
    assert (len(found.train), found.eval) == (ROWS, None)


# --------------------------------------------------------------------------------- random columns

NAMES = """accepted id index lang model vote ok source topic flag turn mood meta stage z7 annotator
liked outcome level group kind extra note is_human verdict checked worth part""".split()
Kind = Callable[[random.Random], Callable[[int], Any]]
GRADES: dict[str, Kind] = {
    "marks": lambda r: either(True, False),
    "words": lambda r: either(
        *r.choice(["good bad", "pass fail", "Yes No", "👍 👎", "up down"]).split()
    ),
    "signs": lambda r: either(1, -1),
    "digits": lambda r: either(1, 0),
    "stars": lambda r: lambda i: (4 if is_first(i) else 1) + i % 2,
    "shares": lambda r: lambda i: (0.6 if is_first(i) else 0.1) + i / 100,
    "percent": lambda r: lambda i: (60 if is_first(i) else 10) + i % 5 * 5,
}
OTHERS: dict[str, Kind] = {
    "number": lambda r: lambda i: i,
    "shuffled number": lambda r: lambda i: i * 7 % ROWS,
    "hash": lambda r: lambda i: f"{i * 7919 + 9973:08x}",
    "time": lambda r: lambda i: 1.7e9 + 61.5 * i,
    "date": lambda r: lambda i: f"2026-11-{i % 28 + 1:02} 10:00:00",
    "language": lambda r: lambda i: ["en", "de", "no"][i % 3],
    "place": lambda r: lambda i: ["reddit", "quora"][i % 2],
    "characters": lambda r: lambda i: len(first(i)),
    "words in it": lambda r: lambda i: len(first(i).split()),
    "tokens": lambda r: lambda i: 13 + i * 7 % 90,
    "constant": lambda r: either(*[r.choice([True, 1, "x"])] * 2),
    "tags": lambda r: lambda i: ["x", "y"],
    "object": lambda r: lambda i: {"a": i},
}
Row = Callable[[int], dict[str, Any]]
ANSWER: Row = lambda i: {"prompt": ask(i), "response": good(i)}  # noqa: E731
SHAPES: dict[str, Row] = {
    "prompt-response": lambda i: {"prompt": ask(i), "response": first(i)},
    "messages": lambda i: {"messages": talk(i, first)},
    "Alpaca": lambda i: {"instruction": ask(i), "input": "", "output": first(i)},
    "question": lambda i: {"question": ask(i), "answer": first(i)},
}


Draw = tuple[Row, dict[str, Callable[[int], Any]]]


def draw_columns(kind: str, name: str, r: random.Random) -> Draw:
    """Return the read part of a row, and a column of a kind that nothing reads."""
    if kind == "grade":
        return SHAPES[r.choice(list(SHAPES))], {name: GRADES[r.choice(list(GRADES))](r)}
    if kind == "sides":
        words = r.choice(["train test", "training validation", "hh_train hh_dev"]).split()
        return ANSWER, {name: lambda i: words[i % 2]}
    if kind == "texts":
        written = r.choice([json.dumps, str, numpy_text])
        return lambda i: {"messages": written(talk(i))}, {}
    if kind == "orders":
        name = r.choice(["rank", "my_ranks", "scores_of_all", "rating", name, name])
        best = r.choice([[2, 1], [1, 2]])
        is_second = best[0] > best[1] if "rank" in name else best[0] < best[1]
        answers = (bad, good) if is_second else (good, bad)
        return lambda i: {"prompt": ask(i), "responses": [a(i) for a in answers]}, {
            name: lambda i: best
        }
    if kind == "choice":
        stem = r.choice(["response", "answer", "my_text"])
        sides = r.choice(["_a _b", "1 2", "_left _right", "A B"]).split()
        values = [f"{r.choice(['', 'model_'])}{side.strip('_')}" for side in sides]
        return lambda i: {
            "prompt": ask(i),
            stem + sides[0]: first(i),
            stem + sides[1]: second(i),
        }, {name: either(*values)}
    return ANSWER, {}


def check_random_file(seed: int, folder: Path) -> str:
    """Check one file whose right reading is known; return what happened."""
    r = random.Random(seed)
    name, *names = r.sample(NAMES, 3)
    kind = r.choice(["grade", "grade", "none", "sides", "texts", "orders", "choice"])
    read, columns = draw_columns(kind, name, r)
    columns |= {each: OTHERS[r.choice(list(OTHERS))](r) for each in names}
    rows = [read(i) | {each: value(i) for each, value in columns.items()} for i in range(ROWS)]
    is_nested = any(isinstance(value, list | dict) for value in rows[0].values())
    form = r.choice(["jsonl", "json", "parquet"] if is_nested else ["csv", "jsonl", "parquet"])
    (folder / str(seed)).mkdir()
    try:
        found = load(write(folder / str(seed) / f"rows.{form}", rows))
    except DataError as refused:
        text = str(refused)
        assert kind in ("grade", "orders", "choice"), text
        assert f"'{name}'" in text or kind != "grade", text
        if kind != "orders":
            assert_right(read_back(text))
        return f"{kind} refused"
    assert_right(found)
    if kind == "sides":
        assert len(found.train) == len(found.eval or []) == ROWS // 2
    return f"{kind} used"


def test_random_files_are_never_read_silently_wrong(tmp_path: Path) -> None:
    outcomes = {check_random_file(seed, tmp_path) for seed in range(60)}
    assert outcomes >= {
        "grade refused",
        "choice refused",
        "none used",
        "sides used",
        "texts used",
        "orders used",
    }


@pytest.mark.soak
def test_more_random_files_are_never_read_silently_wrong(tmp_path: Path) -> None:
    for seed in range(60, 300):
        check_random_file(seed, tmp_path)
