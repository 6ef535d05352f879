"""Look at data before training: what is read, learned, skipped, cut, repeated and leaked.

    python -m rlhf.data FILE_OR_FOLDER [KEY=VALUE ...]
    python -m rlhf.data data=NAME [KEY=VALUE ...]

FILE_OR_FOLDER may also be samples:NAME, or the id of a data set of the hub. KEY=VALUE are overrides
of launch.py: with the overrides of a run, the data is read as that run reads it. No model is
loaded or trained, only its tokenizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from rlhf.base.atomic import write_text_atomically
from rlhf.base.command import Result, build_command_parser, quieten_libraries, run_to_exit_code
from rlhf.base.errors import ConfigError
from rlhf.base.program import CONF, launch_command, name_commands
from rlhf.base.user_paths import expand_user_path
from rlhf.config.schema.run import RunConfig
from rlhf.data.files import find_reader
from rlhf.jobs.completion import build_new_config
from rlhf.jobs.launch_command import compose_job
from rlhf.look.inspection import Look, inspect_data
from rlhf.look.shown_examples import shorten_middle
from rlhf.report.page import Headline, render_template
from rlhf.run.console import Console, literal_text

LONGEST_SHOWN = 1500  # characters of a span on the terminal; longer spans lose their middle
HUB_ID = r"[\w.-]+/[\w.-]+"


def main(arguments: Sequence[str]) -> int:
    """Look at the data that the command names; return the exit code."""
    options = build_look_parser().parse_intermixed_args(arguments)
    return run_to_exit_code(lambda: _look(options), as_json=options.json)


def build_look_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = build_command_parser("rlhf.data", __doc__, has_json=True)
    parser.add_argument("words", nargs="+", metavar="FILE_OR_FOLDER|KEY=VALUE")
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page")
    return parser


def _look(options: argparse.Namespace) -> Result:
    quieten_libraries()
    with redirect_stdout(StringIO()) as notes:  # lines about the template must not mix with JSON
        overrides, data_path = split_words(options.words)
        config = compose_config(overrides, data_path)
    run_words = overrides if data_path is None else [*overrides, f"data.path={data_path}"]
    look = inspect_data(config, launch_command(run_words))
    if not options.json:
        console = Console()
        for line in notes.getvalue().splitlines():
            console.say(line)
        print_look(look, console)
    if options.html is not None:
        path = expand_user_path(options.html, key="--html")
        command = name_commands(f"python -m rlhf.data {shlex.join(options.words)}")
        page = render_look(look, command)
        write_text_atomically(path, page)
        sys.stderr.write(f"wrote {path}\n")
    return Result(asdict(look))


def compose_config(overrides: Sequence[str], data_path: str | None) -> RunConfig:
    """Return the configuration of a run with ``overrides``, and with ``data_path`` as its data.

    Raises:
        ConfigError: if a value is wrong.
    """
    with compose_job(overrides, CONF) as job:
        if data_path is not None:
            job.cfg.data.path = data_path
        return build_new_config(job)


def split_words(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the overrides for the launcher, and the file, folder or Hub id to look at, or None.

    The second is None if no word names data, or if a word sets data.path: error messages propose to
    add this override after the file, and it then takes precedence.

    Raises:
        ConfigError: if several words name a file, folder or Hub id.
    """
    named = [word for word in words if "=" not in word or os.path.exists(word)]
    if len(named) > 1:
        raise ConfigError(
            f"{' '.join(named)}: give one file or folder, or several as data.path=[ONE,OTHER]"
        )
    run_words = [word for word in words if word not in named]
    for word in named:
        run_words.insert(0, f"data={'hub' if _is_hub_id(word) else 'local'}")
    has_data_path = any(word.startswith("data.path=") for word in run_words)
    return run_words, None if has_data_path else next(iter(named), None)


def _is_hub_id(word: str) -> bool:
    exists = expand_user_path(word, key="FILE_OR_FOLDER").exists()
    is_file = exists or find_reader(Path(word)) is not None
    return not is_file and re.fullmatch(HUB_ID, word) is not None


def print_look(look: Look, console: Console) -> None:
    """Print a look; text that the model learns is green on a terminal, otherwise in [[ ]]."""
    marks = "green" if console.is_terminal else "in [[ ]]"
    for line in (
        *look.lines,
        f"\nTokens (tokenizer: {look.tokenizer}; data.template={look.template})",
        *(f"  {lengths}" for lengths in look.lengths),
        f"\nFindings: {len(look.findings) or 'none'}",
        *(f"  - {finding}" for finding in look.findings),
        f"\nExamples, as the model sees them; what is learned is {marks}",
    ):
        console.say(line)
    for example in look.examples:
        console.say(f"--- {example.title} ({example.tokens:,} tokens; {example.place})")
        texts = [
            (shorten_middle(span.text, LONGEST_SHOWN), span.is_learned) for span in example.spans
        ]
        if console.is_terminal:
            spans = (literal_text(text, style="green" * learned) for text, learned in texts)
            console.show(literal_text("").join(spans))
        else:
            console.say("".join(f"[[{text}]]" if learned else text for text, learned in texts))


def render_look(look: Look, command: str) -> str:
    """Return the HTML of a look, with the ``command`` that started it."""
    count = len(look.findings)
    text = f"{count} thing{'s' if count > 1 else ''} to look at" if count else "nothing was found"
    return render_template(
        "look.html",
        package=__package__ or "",
        title=f"Data: {', '.join(str(dataset['name']) for dataset in look.datasets)}",
        verdict=Headline(text, is_doubtful=bool(count)),
        subtitle=command,
        look=look,
    )
