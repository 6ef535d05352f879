"""Marks and scores that other responses contradict: found with their evidence, and no others."""

from rlhf.data.records import Record
from rlhf.look.odd_responses import find_doubtful_marks, sample_grades
from tests.look.invented import polite, record, rude


def test_bad_responses_that_are_marked_good_are_named_with_the_evidence() -> None:
    marked = [record(n, polite(n), grade=True) for n in range(20)]
    marked += [record(n, rude(n), grade=False) for n in range(20, 40)]
    assert list(find_doubtful_marks(marked)) == []
    marked[23] = record(23, rude(23), grade=True)
    (found,) = find_doubtful_marks(marked)
    assert found.places == ["a.csv, row 23"]
    assert found.text.startswith("1 responses marked good have the words of those marked bad ('")
    assert "1 good, 19 bad" in found.text
    marked[3] = record(3, polite(3), grade=False)
    assert [each.places for each in find_doubtful_marks(marked)][1] == ["a.csv, row 3"]


def test_swapped_pairs_are_named() -> None:
    pairs = [record(n, polite(n), rude(n)) for n in range(20)]
    assert list(find_doubtful_marks(pairs)) == []
    pairs[6] = record(6, rude(6), polite(6))
    (found,) = find_doubtful_marks(pairs)
    assert (found.count, found.places) == (1, ["a.csv, row 6"])
    assert "may be swapped" in found.text


def test_words_that_do_not_tell_the_marks_are_no_evidence() -> None:
    marked = [record(n, (polite, rude)[n % 2](n), grade=n % 3 == 0) for n in range(60)]
    assert list(find_doubtful_marks(marked)) == []


def test_nearly_equal_responses_with_other_marks_are_named() -> None:
    one = Record("Q", " Look in the second street behind the old station.", grade=True)
    same = one._replace(chosen=one.chosen.replace("old ", "") if one.chosen else "", grade=False)
    found = list(find_doubtful_marks([one, same, same._replace(prompt="R")]))
    assert [(each.kind, each.count) for each in found] == [("near_contradictory", 1)]
    assert not list(find_doubtful_marks([one, same._replace(prompt="R")]))


def test_scores_far_from_the_others_are_named() -> None:
    scored = [record(n, polite(n))._replace(grade=float(n % 4)) for n in range(40)]
    assert list(find_doubtful_marks(scored)) == []
    scored[8] = scored[8]._replace(grade=95.0)
    (found,) = find_doubtful_marks(scored)
    assert (found.count, found.places) == (1, ["a.csv, row 8"])
    assert [each.grade for each in sample_grades(scored)][-2:] == ["3", "95"]
