"""Store the answers of judges in the run directory, so that no answered request is sent again."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rlhf.base.hashing import sha256_of
from rlhf.base.stored_files import Form, GrowingFile, open_regular_file

LINE: Form = {"request": str, "answer": (str, type(None)), "failure": (str, type(None))}


class JudgeReply(NamedTuple):
    """The valid answer to a request, or the reason why there is none."""

    answer: str | None
    failure: str | None = None


class AnswerStore:
    """The replies to requests, in a file to which the judges of all ranks append.

    The first reply to a request is kept, so that all ranks, and a run that is resumed or
    replayed, see the same reply.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GrowingFile(path, LINE)
        self.replies: dict[str, JudgeReply] = {}
        self._read()

    def add(self, new: Mapping[str, JudgeReply]) -> None:
        """Store replies by the hash of their requests, and read the replies of other ranks."""
        with open(self._path, "ab", opener=open_regular_file) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            self._read()
            lines = [
                json.dumps({"request": request, **reply._asdict()})
                for request, reply in new.items()
                if request not in self.replies
            ]
            # The first line end closes a line that a killed process has left incomplete.
            file.write("\n".join(["", *lines, ""]).encode())
        self._read()

    def _read(self) -> None:
        for line in self._file.read().values:
            reply = JudgeReply(line["answer"], line["failure"])
            self.replies.setdefault(line["request"], reply)


def hash_request(body: object) -> str:
    """Return the hash of a request: of model, prompt, responses, rubric, seed and temperature."""
    return sha256_of(json.dumps(body, sort_keys=True).encode())
