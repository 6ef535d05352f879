"""Start runs from a program or a notebook, and read what they made: ``launch`` and ``Run``."""

from __future__ import annotations

import builtins
import dis
import html
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from rlhf.base.atomic import write_text_atomically
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.program import CONF, LAUNCHER
from rlhf.base.stored_files import METRICS, SAMPLES, read_stored_text
from rlhf.base.user_paths import expand_user_path
from rlhf.jobs.completion import complete_config
from rlhf.jobs.job import begin_run
from rlhf.jobs.launch_command import compose_job, set_up_environment
from rlhf.report.at_end import report_on_exit
from rlhf.run.results import read_run_result

if TYPE_CHECKING:
    from rlhf.config.schema.run import RunConfig

INPUTS = Path("runs", "inputs")  # rows and functions that ``launch`` got; runs name these files
Reward = Callable[..., Sequence[float]]


def compose(*words: str) -> RunConfig:
    """Return the checked configuration of ``rlhf WORDS``, for an ``RLHFEngine`` of one's own.

    Raises:
        RlhfError: if the command would be refused.
    """
    set_up_environment()
    with compose_job([*words, "plan=off"], CONF) as job:
        return complete_config(job._replace(is_plan=False)).config


def launch(
    *words: str,
    data: Iterable[Mapping[str, Any]] | None = None,
    rewards: Mapping[str, Reward] | None = None,
) -> Run:
    """Run what ``rlhf WORDS`` runs, in this process if it has one rank, and return the run.

    ``data`` are rows, as a file of data=local has them. ``rewards`` are functions by name, called
    as f(prompts, responses); the score is the sum of their scores. Of a function of the program
    that runs, or of a notebook, only the text is stored: it must import what it uses.

    Raises:
        RlhfError: if the command would be refused, or a rank fails.
    """
    set_up_environment()
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise ConfigError(
            f"launch({wrong[0]!r}): an override must be a text, such as launch('phase=sft', "
            "'seed=2'); put * before a list of overrides: launch(*overrides)"
        )
    if data is not None and (given := [w for w in words if re.match(r"\+*data(\.path)?=", w)]):
        raise ConfigError(f"{given[0]}: the rows are given as data=; remove this override")
    added = [] if data is None else _store_rows(data)
    for name, function in (rewards or {}).items():
        part = f"kind: function, function: '{_name_function(name, function)}', run_code: true"
        added.append(f"rewards.{name}={{{part}}}")
    with compose_job([*words, *added], CONF) as job:
        completed = complete_config(job._replace(is_plan=False))
        if completed.config.plan == "only" or completed.config.launcher.dry_run:
            raise ConfigError("plan=only and launcher.dry_run print text: use the command rlhf")
        config, run_dir = begin_run(completed, job)
    from rlhf.runtime import launcher

    launcher.start_ranks(config, run_dir, str(LAUNCHER), report_on_exit)
    return Run(run_dir)


def _store_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Write rows to a file; return the words that read it."""
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    if not text:
        raise ConfigError("data has no rows")
    return ["data=local", f"data.path={_store_text('rows', text, '.jsonl')}"]


def _store_text(name: str, text: str, suffix: str) -> Path:
    """Write ``text`` to a file of ``INPUTS``, named by its content; return the path."""
    file = INPUTS / f"{name}_{sha256(text.encode()).hexdigest()[:12]}{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, text)
    return file


def _name_function(name: str, function: Reward) -> str:
    """Return MODULE:FUNCTION for a reward; the text of a notebook's function becomes a module.

    Raises:
        ConfigError: if the function has no text of its own, or uses variables around it.
    """
    module, own = function.__module__, getattr(function, "__qualname__", "")
    if not re.fullmatch(r"\w+", own) or getattr(function, "__closure__", None):
        raise ConfigError(
            f"rewards[{name!r}]: {own or function} must be a top-level function defined with def"
        )
    if module != "__main__" and find_spec(module) is not None:
        return f"{module}:{own}"
    if outside := set(_global_names(function.__code__)) - vars(builtins).keys():
        raise ConfigError(
            f"rewards[{name!r}]: {own} uses {', '.join(sorted(outside))} from outside, but only "
            "its own source is stored. Define or import them inside the function, or import the "
            "function from a module"
        )
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except OSError as error:
        raise ConfigError(
            f"rewards[{name!r}]: the source code of {own} is not available ({error}); write it to "
            "a file, and import it"
        ) from error
    return f"{'.'.join(_store_text(own, text, '.py').with_suffix('').parts)}:{own}"


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the names outside of a function that it, or a function or loop in it, reads."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


class Run:
    """The folder of a run, and what it holds."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = expand_user_path(str(run_dir), key="run_dir").resolve()

    def __repr__(self) -> str:
        return f"Run({str(self.run_dir)!r})"

    @property
    def result(self) -> dict[str, Any]:
        """Return the content of result.json: the objective, and the results of each phase.

        Raises:
            CheckpointError: if the run has not finished.
        """
        if (result := read_run_result(self.run_dir)) is None:
            raise CheckpointError(f"{self.run_dir}: the run has not finished")
        return result

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """Return columns with a value for each line of metrics.jsonl; None where it has none."""
        lines = list(METRICS.read_lines(self.run_dir))
        names = dict.fromkeys(name for line in lines for name in line)
        return {name: [line.get(name) for line in lines] for name in names}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Return the prompts and responses of samples.jsonl, with their scores."""
        return list(SAMPLES.read_lines(self.run_dir))

    def policy(self, choice: str | None = None) -> LoadedPolicy:
        """Load the newest policy, or ``choice``: a name or folder as of ``rlhf chat --model``."""
        return LoadedPolicy(self.run_dir, choice)

    def report(self) -> Report:
        """Return the report of the run, which a notebook shows; it is written again."""
        from rlhf.report.run_page import write_report

        return Report(write_report(self.run_dir))


class LoadedPolicy:
    """A policy of a run, which answers: ``policy("Name a fruit.")``."""

    def __init__(self, run_dir: Path, choice: str | None) -> None:
        from rlhf.chat.run_policy import RunPolicy

        policy = RunPolicy(run_dir, choice)
        self.talker, self.sampling = policy.talker, policy.sampling_settings
        self._folder = policy.folder

    def __repr__(self) -> str:
        return f"LoadedPolicy({str(self._folder)!r})"

    def __call__(self, question: str, **sampling: Any) -> str:
        """Return an answer to a user's question, or to a prompt if the data had plain prompts.

        ``sampling`` replaces fields of the run's ``SamplingSettings``, such as temperature=0.
        """
        prompt_ids = self.talker.encode_prompt([{"role": "user", "content": question}])
        settings = replace(self.sampling, **sampling)
        return self.talker.answer(prompt_ids, settings, lambda _: None).text


class Report:
    """The report of a run: a page at ``path``, which a notebook shows in a frame."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Report({str(self.path)!r})"

    def _repr_html_(self) -> str:
        page = html.escape(read_stored_text(self.path) or "")
        style = "width: 100%; height: 80vh; border: 0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'
