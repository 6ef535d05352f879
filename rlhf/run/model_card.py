"""Write the sections of a model card on a model's use, origin and metrics, from a run directory."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.program import launch_command
from rlhf.base.safe_text import redact
from rlhf.base.stored_files import INPUTS
from rlhf.config.choices import Source
from rlhf.config.freeze import FROZEN, METHODS, read_command, read_frozen_keys
from rlhf.methods import installed_methods
from rlhf.run.results import finished_phases, read_phase_result

FOLDER_KEYS = ("run_dir", "resume")  # config keys that name folders, not settings of the model
# Entries of results about time, memory or the run that trained a phase, not about the model.
NOT_MEASURES = ("seconds", "planned", "measured", "reused_from")
MOST_FILES = 20  # files of data that a card lists
TEXTS = read_yaml_beside(__file__, "model_card.yaml")
LONGEST_TEXT = 100  # maximum number of characters of an example's question or prompt
# Matches a prompt of one turn: alone, the last question of a longer conversation is unclear.
QUESTION = re.compile(r"\s*Human:\s*((?:(?!Human:).)+?)\s*Assistant:\s*", re.DOTALL)


def origin_sections(run_dir: Path, *, rows: Mapping[str, tuple[int, int]]) -> str:
    """Return the sections on run, command, settings, data and limits; "" without a config.

    ``rows`` has the numbers of training and held-out examples of each phase, if they are known.
    """
    if not (run_dir / FROZEN).is_file():
        return ""
    keys = read_frozen_keys(run_dir)
    words = read_command(run_dir)
    sections = {
        "Run": markdown_table(("what", "value"), _run_table_rows(run_dir, keys)),
        "Command": f"```bash\n{launch_command(words)}\n```" if words else "",
        "Settings that differ from the presets": markdown_table(
            ("key", "value"), _settings_of_command(words, keys)
        ),
        "Data": markdown_table(
            ("what", "value"), chain(_data_table_rows(keys, rows), _data_file_rows(run_dir))
        ),
        "Limits": _limits(keys),
    }
    text = "".join(f"\n\n## {title}\n\n{body}" for title, body in sections.items() if body)
    return redact(text, os.environ)


def results_section(run_dir: Path) -> str:
    """Return the section with the final metrics of each finished phase."""
    rows = [
        (f"{phase}: {name.replace('_', ' ')}", _format_value(value))
        for phase in finished_phases(run_dir)
        for name, value in (read_phase_result(run_dir, phase) or {}).items()
        if name not in NOT_MEASURES
    ]
    return f"\n\n## Results\n\n{markdown_table(('measure', 'value'), rows)}" if rows else ""


def markdown_table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table; an empty text if there are no rows."""
    lines = ["| " + " | ".join(map(_escape_cell, row)) + " |" for row in rows]
    head = [_escape_cell(title) for title in titles]
    return "\n".join(
        [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines] if lines else ""
    )


def _limits(keys: Mapping[str, Any]) -> str:
    """Return the limits of a model, as a list, from the config keys of its run."""
    is_generated = keys["data.source"] == Source.synthetic
    texts = TEXTS["limits_of_use"]
    limits: str = texts["any_data"] + texts["generated_data"] * is_generated
    for method in installed_methods():
        if f"{METHODS}.{method.name}" in keys:
            (summary, *_) = str(inspect.getdoc(type(method))).splitlines()
            limits += f"\n- It was trained with {method.name} ({method.package}). {summary}"
    return limits


def _settings_of_command(
    words: Iterable[str], keys: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield each key that the words of a command set, and the value that the run used."""
    for word in words:
        key, sign, typed = word.lstrip("+~").partition("=")
        if sign and not word.startswith("-") and key not in FOLDER_KEYS:
            yield key, _format_value(keys.get(key, typed))


def _run_table_rows(run_dir: Path, keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the last two parts of the directories of the run, and of runs that it has phases of."""
    source_run = keys.get("from_run")
    directories = {"run": str(run_dir.resolve()), "started from": source_run}
    for phase in finished_phases(run_dir):
        origin = (read_phase_result(run_dir, phase) or {}).get("reused_from")
        directories[f"{phase} of"] = None if origin == source_run else origin
    for what, directory in directories.items():
        if directory is not None:
            yield what, _format_value(str(directory))


def _data_file_rows(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield up to ``MOST_FILES`` data files, as the run began with them; count the other files."""
    data = (files for key, files in (INPUTS.read(run_dir) or {}).items() if key.startswith("data."))
    files = [pair for files_of_key in data for pair in files_of_key.items()]
    for path, (size, sha256) in files[:MOST_FILES]:
        yield f"file {Path(path).name}", f"{size} bytes, SHA-256 {sha256}"
    if len(files) > MOST_FILES:
        yield "more files", f"{len(files) - MOST_FILES}, in inputs.json of the run"


def _data_table_rows(
    keys: Mapping[str, Any], rows: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, str]]:
    yield "source", _format_value(keys["data.source"])
    sets = [str(v) for k, v in keys.items() if k.startswith("data.sets.") and k.endswith(".path")]
    source = keys["data.path"] or sets or f"{keys['data.size']} generated examples"
    yield "from", _format_value(source)
    yield "proportions of SFT, reward and PPO", _format_value(keys["data.split"])
    has_files = keys["data.eval_path"]
    yield "held out", "separate files" if has_files else _format_value(keys["data.eval_share"])
    for phase, (train, held_out) in rows.items():
        yield f"{phase}: examples", f"{train} to train on, {held_out} held out"


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {_format_value(each)}" for name, each in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    if isinstance(value, str) and value.startswith("/"):  # a folder that readers may not have
        return "/".join(Path(value).parts[-2:])
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escape_cell(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def python_example(folder: str, prompts: Iterable[str], *, has_chat_template: bool) -> str:
    """Return Python code that prints the model's answer to the shortest prompt.

    With a chat template the example passes a message, otherwise the prompt itself.
    """
    kind, texts, otherwise = "plain_model", prompts, "Your prompt"
    if has_chat_template:
        questions = (match[1] for prompt in prompts if (match := QUESTION.fullmatch(prompt)))
        kind, texts, otherwise = "chat_model", questions, "Your question"
    short = (text for text in texts if len(text) <= LONGEST_TEXT)
    return _fill_example(kind, folder, min(short, key=len, default=otherwise))


def scorer_example(folder: str, text: str) -> str:
    """Return Python code that prints the reward model's score of ``text``."""
    return _fill_example("scorer", folder, text)


def _fill_example(kind: str, folder: str, text: str) -> str:
    code = Template(TEXTS["examples"][kind])
    return code.substitute(folder=json.dumps(folder), text=json.dumps(text, ensure_ascii=False))
