"""Watch a run or a sweep while it runs, or look at a finished one.

python -m rlhf.watch RUN_DIR                serve a page on this machine, and print its address
python -m rlhf.watch SWEEP_DIR              the same, with a row for each job
python -m rlhf.watch RUN_DIR --terminal     fill the terminal instead; Ctrl-C ends

Only files are read, so the run may be on another machine that shares the folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from rlhf.base.command import command_parser, run_to_exit_code
from rlhf.base.user_paths import expand_user_path
from rlhf.tracking.console import build_console
from rlhf.watch.live_server import WatchServer
from rlhf.watch.terminal import show_in_terminal


def main(arguments: Sequence[str]) -> int:
    """Serve the page, or fill the terminal, until Ctrl-C; return the exit code."""
    parser = command_parser("rlhf.watch", __doc__)
    parser.add_argument("folder", metavar="RUN_DIR|SWEEP_DIR")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--terminal", action="store_true", help="no page: one screen of the terminal")
    way.add_argument("--port", type=int, help="of the page; default: a free port from 7860 on")
    options = parser.parse_args(arguments)
    with suppress(KeyboardInterrupt):
        return run_to_exit_code(lambda: _watch(options))
    return 0


def _watch(options: argparse.Namespace) -> None:
    folder = expand_user_path(options.folder, key="RUN_DIR").resolve()  # runs/latest may move on
    if options.terminal:
        show_in_terminal(folder)
        return
    with WatchServer(folder, options.port) as server:
        build_console(is_main=True, log_every=1).say(
            f"open {server.address} in a browser; Ctrl-C ends. Without a browser: add --terminal"
        )
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
