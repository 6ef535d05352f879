"""Data files that no phase can use, or of which it must say what it skips."""

import gzip
import json
import pickle

GOOD = {"prompt": "\n\nHuman: hi\n\nAssistant:", "chosen": " yes", "rejected": " no"}
LINE = json.dumps(GOOD).encode() + b"\n"


def lines(*rows: object) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def messages(*talk: object) -> tuple[str, bytes]:
    """A file with three rows of a conversation."""
    return "a.jsonl", lines({"messages": [*talk]}) * 3


# Enough rows for every phase.
MANY = lines(*(GOOD | {"prompt": f"\n\nHuman: {n}\n\nAssistant:"} for n in range(60)))
FILES: dict[str, tuple[str, bytes]] = {
    "an empty file": ("a.jsonl", b""),
    "only blank lines": ("a.jsonl", b"\n\n\n"),
    "a line cut off in the middle": ("a.jsonl", LINE + LINE[:40]),
    "a line that is not JSON": ("a.jsonl", LINE + b"hello\n"),
    "single quotes": ("a.jsonl", b"{'prompt': 'a', 'chosen': 'b'}\n"),
    "a list in each line": ("a.jsonl", b"[1, 2]\n" * 3),
    "a number in each line": ("a.jsonl", b"42\n" * 3),
    "text in each line": ("a.jsonl", b'"hello"\n' * 3),
    "null in each line": ("a.jsonl", b"null\n" * 3),
    "UTF-16": ("a.jsonl", LINE.decode().encode("utf-16")),
    "Latin-1 letters": ("a.jsonl", '{"prompt": "é", "chosen": "ü"}\n'.encode("latin-1")),
    "null bytes": ("a.jsonl", LINE + b"\0" * 64),
    "a gzip file called .jsonl": ("a.jsonl", gzip.compress(LINE)),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(LINE * 9)[:40]),
    "a pickle called .jsonl": ("a.jsonl", pickle.dumps([GOOD])),
    "a picture": ("a.png", b"\x89PNG\r\n\x1a\n"),
    "plain text": ("a.txt", b"hello\n"),
    "an unknown ending": ("a.xyz", LINE),
    "no ending": ("data", LINE),
    "unknown columns": ("a.jsonl", lines({"question": "a", "reply": "b"})),
    "a prompt without answers": ("a.jsonl", lines({"prompt": "a"}) * 20),
    "chosen is a number": ("a.jsonl", lines(GOOD | {"chosen": 7}) * 3),
    "chosen is true": ("a.jsonl", lines(GOOD | {"chosen": True}) * 3),
    "chosen is an object": ("a.jsonl", lines(GOOD | {"chosen": {"a": 1}}) * 3),
    "chosen is a list of numbers": ("a.jsonl", lines(GOOD | {"chosen": [1, 2]}) * 3),
    "rejected is a list of texts": ("a.jsonl", lines(GOOD | {"rejected": ["a", "b"]}) * 3),
    "every prompt is null": ("a.jsonl", lines(GOOD | {"prompt": None}) * 3),
    "every prompt is empty": ("a.jsonl", lines(GOOD | {"prompt": "  "}) * 3),
    "one prompt is null": ("a.jsonl", MANY + lines(GOOD | {"prompt": None})),
    "one answer is empty": ("a.jsonl", MANY + lines(GOOD | {"chosen": ""})),
    "chosen equals rejected": ("a.jsonl", MANY + lines(GOOD | {"rejected": " yes"})),
    "one row has other columns": ("a.jsonl", MANY + lines({"text": "a"})),
    "a column changes its type": ("a.jsonl", LINE + lines(GOOD | {"chosen": ["a"]})),
    "messages without a role": messages({"content": "a"}),
    "messages with an unknown role": messages({"role": "alien", "content": "a"}),
    "messages with a null content": messages({"role": "user", "content": None}),
    "messages without an answer": messages({"role": "user", "content": "a"}),
    "empty lists of messages": messages(),
    "too few rows": ("a.jsonl", LINE),
    "a truncated JSON array": ("a.json", b'[{"prompt": "a"},'),
    "a JSON object": ("a.json", b'{"prompt": "a"}'),
    "an empty JSON array": ("a.json", b"[]"),
    "an array of numbers": ("a.json", b"[1, 2, 3]"),
    "a number that JSON does not have": ("a.jsonl", b'{"prompt": NaN, "chosen": "b"}\n'),
    "a very deep list": ("a.jsonl", b"[" * 100_000 + b"\n"),
    "an empty csv": ("a.csv", b""),
    "a csv with a header only": ("a.csv", b"prompt,chosen,rejected\n"),
    "a csv with ragged rows": ("a.csv", b"prompt,chosen\na,b\nc,d,e,f\n"),
    "a csv with an open quote": ("a.csv", b'prompt,chosen\n"a,b\n'),
    "a csv with unknown columns": ("a.csv", b"x,y\n1,2\n"),
    "an empty parquet file": ("a.parquet", b""),
    "a damaged parquet file": ("a.parquet", b"PAR1" + b"\0" * 50 + b"PAR1"),
    "a lone surrogate": ("a.jsonl", b'{"prompt": "\\ud800", "chosen": "b", "rejected": "c"}\n'),
}
