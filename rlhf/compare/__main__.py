"""Compare the answers of two models by hand, in a local web page.

    python -m rlhf.compare RUN_DIR [--against OTHER_RUN]
    python -m rlhf.compare --answers FILE [--models FIRST SECOND]

The page shows a prompt and two anonymous answers. Choices become rows of preferences, on which
data=local data.path=FILE trains a reward model.

With --json, no page is served; the win rate of the choices so far is printed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.errors import ConfigError, RlhfError
from rlhf.base.user_paths import expand_user_path
from rlhf.compare.preference_file import (
    AnsweringModel,
    AnswerPair,
    PreferenceFile,
    Verdict,
    WinRate,
    make_pairs,
    read_models_of_file,
    read_models_of_runs,
)
from rlhf.config.run_dir import find_run_dir
from rlhf.report.page import LocalRequest, LocalServer, read_asset, render_template
from rlhf.run.console import Console

CONTENT_LENGTH = "[0-9]{1,3}"  # at most 999 bytes; a choice has about 30
BUTTONS = {  # text -> verdict; None: skip the pair
    "A is better": Verdict.a,
    "B is better": Verdict.b,
    "Tie": Verdict.tie,
    "Both bad": Verdict.both_bad,
    "Skip": None,
}
KEYS = "ABTNS"  # the keys of the buttons; N: neither
KEYS_SCRIPT = read_asset("keys.js", "rlhf.compare")
# Browsers run only a script with this hash, so never a script in the text of a model.
SCRIPT_HASH = base64.b64encode(hashlib.sha256(KEYS_SCRIPT.encode()).digest()).decode()


class Comparison:
    """The pairs to judge, one after the other, and the file that stores the choices."""

    def __init__(
        self, models: tuple[AnsweringModel, AnsweringModel], file: PreferenceFile, *, seed: int
    ) -> None:
        first, second = models
        pairs = make_pairs(first, second, seed=seed)
        judged = {pair.prompt_and_answers for pair, _ in file.read_choices()}
        self._pairs = [pair for pair in pairs if pair.prompt_and_answers not in judged]
        self._models = (first.name, second.name)
        self._file = file
        self.num_equal = len(first.answers.keys() & second.answers.keys()) - len(pairs)
        self.num_done = 0  # pairs judged or skipped since the start; the index of the current pair
        self._lock = Lock()

    @property
    def current_pair(self) -> AnswerPair | None:
        """Return the pair to judge; None after the last pair."""
        return self._pairs[self.num_done] if self.num_done < len(self._pairs) else None

    @property
    def progress_text(self) -> str:
        """Return the number of the shown pair as text, such as "3 of 20"."""
        return f"{self.num_done + 1} of {len(self._pairs)}"

    @property
    def win_rate(self) -> WinRate:
        """Return the first model's win rate over the second, from all choices in the file."""
        return WinRate.from_choices(self._models, self._file.read_choices())

    def judge(self, verdict: Verdict | None, *, index: int) -> None:
        """Store the verdict on the pair ``index`` if it is the current pair; None skips the pair.

        Raises:
            RlhfError: if the choice cannot be written.
        """
        with self._lock:
            if index == self.num_done and self.current_pair is not None:
                if verdict is not None:
                    self._file.add_choice(self.current_pair, verdict)
                self.num_done += 1


def render_comparison(comparison: Comparison) -> str:
    """Return the HTML of the next pair, or of the result after the last pair."""
    if comparison.current_pair is None:
        return _render_page(result=str(comparison.win_rate))
    buttons = zip(BUTTONS, KEYS, strict=True)
    return _render_page(comparison=comparison, buttons=buttons, keys=KEYS_SCRIPT)


class ComparisonServer(LocalServer):
    """A server of the page of one comparison."""

    def __init__(self, comparison: Comparison, port: int | None) -> None:
        self.comparison = comparison
        super().__init__(_Request, port)


class _Request(LocalRequest):
    """A request for the page, or a request that sends a choice."""

    server: ComparisonServer
    policy = (
        f"default-src 'none'; script-src 'sha256-{SCRIPT_HASH}'; style-src 'unsafe-inline'; "
        "img-src data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )

    def do_GET(self) -> None:
        if (refused := self.refusal_status(self.path)) is not None:
            self.send(*_refusal_response(refused))
        else:
            self.send(HTTPStatus.OK, render_comparison(self.server.comparison))

    def do_POST(self) -> None:
        refused = self.refusal_status(self.path)
        status, text = self._store_choice() if refused is None else _refusal_response(refused)
        location = {"Location": self.server.path} if status is HTTPStatus.SEE_OTHER else {}
        self.send(status, text, headers=location)

    def _store_choice(self) -> tuple[HTTPStatus, str]:
        """Store the choice that the form sent; return the status and text of the response."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(CONTENT_LENGTH, length):
            return _refusal_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        fields = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
        index, verdict = (fields.get(name, [""])[0] for name in ("index", "verdict"))
        if not index.isdecimal() or verdict not in BUTTONS:
            return _refusal_response(HTTPStatus.BAD_REQUEST)
        try:
            self.server.comparison.judge(BUTTONS[verdict], index=int(index))
        except RlhfError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, _render_page(message=str(error))
        return HTTPStatus.SEE_OTHER, ""  # redirect, so that a reload does not resend the choice


def _refusal_response(status: HTTPStatus) -> tuple[HTTPStatus, str]:
    return status, _render_page(message=f"{status.value} {status.phrase}")


def _render_page(**values: object) -> str:
    return render_template("comparison.html", package="rlhf.compare", **values)


def main(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C and print the win rate, or print JSON; return the exit code."""
    parser = build_command_parser("rlhf.compare", __doc__, has_json=True)
    parser.add_argument(
        "run_dir", nargs="?", help="a run that has finished PPO; default: runs/latest"
    )
    parser.add_argument("--against", type=Path, help="another run; default: the run's SFT model")
    parser.add_argument("--answers", type=Path, help="a file of rows with prompt, response, model")
    parser.add_argument("--models", nargs=2, default=(), help="two models of that file")
    parser.add_argument("--out", type=Path, help="file of the choices; default: preferences.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="decides which answer is on the left")
    parser.add_argument("--port", type=int, help="default: the first free port from 7860 up")
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _serve_comparison(options), as_json=options.json)


def _serve_comparison(options: argparse.Namespace) -> Result | None:
    if options.run_dir is not None and options.answers is not None:
        raise ConfigError("name either RUN_DIR or --answers FILE; python -m rlhf.compare --help")
    if options.answers is not None:
        answers = expand_user_path(options.answers, key="--answers")
        models = read_models_of_file(answers, options.models)
        default_file = answers.with_suffix(".preferences.jsonl")
    else:
        run_dir = find_run_dir(options.run_dir)
        against = options.against and expand_user_path(options.against, key="--against")
        models = read_models_of_runs(run_dir, against)
        default_file = run_dir / "preferences.jsonl"
    console = Console()
    path = expand_user_path(options.out or default_file, key="--out")
    with closing(PreferenceFile(path)) as file:
        comparison = Comparison(models, file, seed=options.seed)
        if options.json:
            return Result({"choices": str(file.path), **comparison.win_rate.as_json()})
        with ComparisonServer(comparison, options.port) as server, suppress(KeyboardInterrupt):
            console.say(f"open {server.address} in a browser; choices go to {path}; Ctrl-C ends")
            server.serve_forever()
        console.say(str(comparison.win_rate))
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
