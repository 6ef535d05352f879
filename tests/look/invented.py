"""Invented requests, and polite and rude answers to them."""

from rlhf.data.records import Record

TOWNS = "Oslo Lima Cairo Quito Hanoi Accra Perth Turin".split()


def polite(n: int) -> str:
    return f" Gladly! Please look in {TOWNS[n % 8]} for number {n} first."


def rude(n: int) -> str:
    return f" Whatever. Nobody in {TOWNS[n % 8]} cares about {n}, go away now."


def record(n: int, chosen: str, rejected: str | None = None, grade: bool | None = None) -> Record:
    return Record(f"Where is shop {n}?", chosen, rejected, grade=grade, place=("a.csv", n))
