"""The process in which one part of the score is computed; see isolated.py for the other side.

It is started as ``python -m rlhf.rewards.process DESCRIPTOR``. Both sides send lines of JSON
through the socket: first the part's configuration and the answer whether it can be used, then for
each batch its fields and ``{"scores": [...]}`` or ``{"error": "..."}``. What a function prints goes
to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardPart
from rlhf.errors import RlhfError
from rlhf.rewards.answers import Answers, Scorer
from rlhf.rewards.outside import function, http
from rlhf.rewards.rules import RULES

KINDS = {RewardKind.function: function, RewardKind.http: http, **RULES}
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main() -> None:
    """Answer the requests on the socket until its other end is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlives the run
    sys.path.insert(0, os.getcwd())
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rw") as lines:

        def send(answer: object) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        given = json.loads(next(lines))
        try:
            part = RewardPart(**given | {"kind": RewardKind(given["kind"])})
            scorer: Scorer = KINDS[part.kind](part)
        except RlhfError as error:
            send({"error": str(error)})
            return
        send({"ready": True})
        for line in lines:
            try:
                send({"scores": list(scorer(Answers(**json.loads(line))))})
            except Exception as error:  # a function may raise anything
                send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
