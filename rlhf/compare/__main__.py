"""Compare the answers of two models by hand, in a local web page.

    python -m rlhf.compare RUN_DIR [--against OTHER_RUN]
    python -m rlhf.compare --answers FILE [--models FIRST SECOND]

The page shows a prompt and two anonymous answers. Choices become rows of preferences, which
data=local data.path=FILE trains a reward model on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from rlhf.base.command import command_parser, run_to_exit_code
from rlhf.base.errors import ConfigError
from rlhf.base.user_paths import expand_user_path
from rlhf.compare.answer_pairs import make_pairs, read_models_of_file, read_models_of_runs
from rlhf.compare.comparison_page import Comparison, ComparisonServer
from rlhf.compare.preference_file import PreferenceFile
from rlhf.tracking.console import build_console


def main(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, then print the win rate; return the exit code."""
    parser = command_parser("rlhf.compare", __doc__)
    parser.add_argument("run_dir", type=Path, nargs="?", help="a run that has finished PPO")
    parser.add_argument("--against", type=Path, help="another run; default: the run's SFT model")
    parser.add_argument("--answers", type=Path, help="a file with prompt, response and model")
    parser.add_argument("--models", nargs=2, default=(), help="two models of the file of answers")
    parser.add_argument("--out", type=Path, help="where choices go; default: preferences.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="decides which answer is on the left")
    parser.add_argument("--port", type=int, help="default: a free port from 7860 on")
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _compare(options))


def _compare(options: argparse.Namespace) -> None:
    if (options.run_dir is None) == (options.answers is None):
        raise ConfigError("name either RUN_DIR or --answers FILE; python -m rlhf.compare --help")
    if options.answers is not None:
        answers = expand_user_path(options.answers, key="--answers")
        models = read_models_of_file(answers, options.models)
        beside = answers.with_suffix(".preferences.jsonl")
    else:
        run_dir = expand_user_path(options.run_dir, key="RUN_DIR")
        against = options.against and expand_user_path(options.against, key="--against")
        models = read_models_of_runs(run_dir, against)
        beside = run_dir / "preferences.jsonl"
    pairs = make_pairs(*models, seed=options.seed)
    console = build_console(is_main=True, log_every=1)
    with closing(PreferenceFile(expand_user_path(options.out or beside, key="--out"))) as file:
        comparison = Comparison(pairs, (models[0].name, models[1].name), file)
        with ComparisonServer(comparison, options.port) as server, suppress(KeyboardInterrupt):
            console.say(
                f"open {server.address} in a browser; choices go to {file.path}; Ctrl-C ends"
            )
            server.serve_forever()
        console.say(str(comparison.result))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
