"""Files with good and bad responses to a prompt: what is refused, and what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.base.errors import DataError
from rlhf.evaluate.best_of import read_responses

GOOD = '{"prompt": "p", "chosen": ["a", "b"], "rejected": ["c"], "num_correct": 2}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row 1: is missing; each row is an object with prompt, chosen"),
        (f"{GOOD}\n[1]", "row 2: Input should be an object"),
        (f"{GOOD}\n\n{{", "row 3: Invalid JSON"),
        ('{"prompt": "p", "chosen": "a", "rejected": ["c"]}', "row 1: chosen='a': Input should be"),
        ('{"prompt": "p", "chosen": ["a", 1], "rejected": ["c"]}', "row 1: chosen[1]=1: Input"),
        ('{"prompt": "p", "chosen": ["a"]}', "row 1: rejected: Field required"),
        ('{"prompt": "p", "chosen": ["a"], "rejected": []}', "row 1: rejected=[]: List should"),
        ('{"prompt": "", "chosen": ["a"], "rejected": ["b"]}', "row 1: prompt='': String should"),
    ],
)
def test_a_faulty_row_is_refused_with_row_column_and_rule(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        read_responses(file)
    assert str(caught.value).startswith(f"--best-of {file}: {message}")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--best-of .*nowhere: row 1: .*No such file"):
        read_responses(tmp_path / "nowhere")


def test_rows_are_read_with_or_without_subset_and_id(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    file.write_text(f'{GOOD}\n{GOOD[:-1]}, "subset": "Ties", "id": "tied:1"}}\n')
    first, second = read_responses(file)
    assert (first.chosen, first.rejected, first.subset) == (["a", "b"], ["c"], "all")
    assert (second.subset, second.id) == ("Ties", "tied:1")
