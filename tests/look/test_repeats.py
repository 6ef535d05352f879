"""What data has more than once: near repeats, reversed pairs, prompts on both sides of a split."""

import random
from pathlib import Path

from rlhf.data.records import Dropped, RawDataset, Record
from rlhf.data.splits import PhaseData
from rlhf.data.stored import Store, drop_repeated_examples, pack_records, select_all
from rlhf.look.repeats import DataFinding, find_near_repeats, find_repeats


def words(seed: int, count: int) -> str:
    """Return ``count`` invented words of five letters."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(count))


def jaccard_by_hand(one: str, other: str) -> float:
    a, b = ({text[i : i + 5] for i in range(len(text) - 4)} for text in (one, other))
    return len(a & b) / len(a | b)


def findings(
    train: list[Record], held_out: list[Record] | None = None, parts: list[PhaseData] | None = None
) -> dict[str, DataFinding]:
    dataset = RawDataset("pets", train, held_out, "preference", Dropped())
    return {each.kind: each for each in find_repeats([dataset], parts or [])}


def test_near_repeats_are_the_pairs_over_the_threshold_and_no_others() -> None:
    texts = [words(seed, 40) for seed in range(300)]
    expected = []
    for place in range(0, 300, 10):  # replace 1 to 15 of the 40 words, in a row
        changed = texts[place].split()
        count = place // 20 + 1
        changed[:count] = words(1000 + place, count).split()
        texts.append(" ".join(changed))
        if jaccard_by_hand(texts[place], texts[-1]) >= 0.8:
            expected.append((len(texts) - 1, place))
    assert 5 < len(expected) < 25
    assert find_near_repeats(texts) == expected


def test_near_repeats_ignore_case_and_space_and_handle_short_texts() -> None:
    long = words(1, 30)
    assert find_near_repeats([long, "a", "b", f"  {long.upper()}\n", "", "A "]) == [(3, 0), (5, 1)]
    assert find_near_repeats([]) == []
    assert find_near_repeats(["\ud800 lone", "好" * 30, "好" * 31]) == [(2, 1)]


def test_pairs_with_their_reverse_are_named_with_file_and_row() -> None:
    pair = Record("Q:", " a", " b", place=("x/pairs.jsonl", 3))
    reverse = Record("q:  ", " B", " a", place=("x/pairs.jsonl", 9))
    other = Record("Q:", " a", " c", place=("x/pairs.jsonl", 4))
    found = findings([pair, other, reverse, Record("Q:", " b")])["reversed"]
    assert (found.count, found.places) == (1, ["pairs.jsonl, row 3 and row 9"])
    assert "reversed" not in findings([pair, other])


def test_prompts_on_both_sides_of_the_datas_own_split_are_named_once() -> None:
    train = [Record("Which?", " a", place=("train.csv", n)) for n in (1, 2)]
    held_out = [Record("which? ", " b", place=("val.csv", 5)), Record("Why?", " b")]
    found = findings(train, held_out)["both_sides"]
    assert (found.count, found.places) == (1, ["train.csv, row 1 and val.csv, row 5"])
    assert "both_sides" not in findings(train)
    assert "both_sides" not in findings(train, held_out[1:])


def test_held_out_prompts_that_begin_a_longer_conversation_are_counted() -> None:
    first = "\n\nHuman: Hi\n\nAssistant:"
    longer = f"{first} Yes?\n\nHuman: Which?\n\nAssistant:"
    last_only = "\n\nHuman: Which?\n\nAssistant:"
    train, held_out = [Record(longer, " a")], [Record(first, " b"), Record(last_only, " c")]
    assert findings(train, held_out)["begun"].count == 1
    assert "begun" not in findings(held_out, train)  # only the longer one is held out


def test_near_repeats_across_the_sides_of_the_divided_data_are_counted() -> None:
    one, two, three = (Record(f"{words(1, 30)} {end}", " a") for end in "abc")
    found = findings([one, two, three], parts=[PhaseData([one, two], [three])])
    assert found["near"].count == 2
    assert found["near_across"].count == 1
    assert "near_across" not in findings([one, two, three])


def test_responses_with_two_grades_are_no_repeats_and_are_named() -> None:
    good = Record("Q:", " a", grade=True, place=("kto.jsonl", 2))
    bad = Record("q:", " A", grade=False, place=("kto.jsonl", 7))
    other = Record("Q:", " b", grade=False, place=("kto.jsonl", 8))
    dataset = RawDataset("pets", [good, bad, other, good], None, "marks", Dropped())
    (kept,) = drop_repeated_examples([dataset])
    assert kept.train == [good, bad, other]
    found = findings(kept.train)["contradictory"]
    assert (found.count, found.places) == (1, ["kto.jsonl, row 2 and row 7"])
    assert "contradictory" not in findings([good, other])


def test_a_finding_says_how_many_places_it_does_not_name() -> None:
    records = [Record(f"Q{n}", " a", place=("a.csv", n)) for n in (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)]
    records += [Record(f"q{n} ", "A", place=("a.csv", n)) for n in (6, 6, 7, 7)]
    assert str(findings(records)["repeated"]).endswith("row 5; and 2 more)")
    assert "more" not in str(findings(records[:10])["repeated"])


def test_large_files_are_compared_without_lists_of_all_records(tmp_path: Path) -> None:
    records = [Record("Which?", f" {n}", " no", place=("a.csv", n)) for n in range(9)]
    records.append(Record("which? ", " no", " 4", place=("a.csv", 9)))
    held_out = [Record("Which?", " b", place=("val.csv", 5))]
    with (tmp_path / "records").open("w+b") as file:
        stored = select_all(Store([pack_records(records)], file))
    for train in (records, stored):
        dataset = RawDataset("pets", train, held_out, "preference", Dropped())
        found = {each.kind: str(each) for each in find_repeats([dataset], [])}
        assert found["both_sides"].endswith("(a.csv, row 0 and val.csv, row 5)")
        assert found["reversed"].endswith("(a.csv, row 4 and row 9)")
