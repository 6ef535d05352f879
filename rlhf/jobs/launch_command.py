"""Set up the process of launch.py; read its command line; read each of its jobs.

``--help`` prints conf/help.txt; ``--help WORD`` explains keys, options and metrics that match WORD.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from rlhf.base.command import set_cuda_allocator, survive_output_errors
from rlhf.base.cpu import cap_onednn_isa, require_linux
from rlhf.base.errors import ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.program import TOOLS, name_commands
from rlhf.base.safe_text import print_traceback
from rlhf.base.user_paths import read_user_text, relative_to_cwd
from rlhf.base.versions import installed_version
from rlhf.config.choices import PlanMode
from rlhf.config.effects import effect_of
from rlhf.config.hydra_errors import (
    describe_type,
    did_you_mean,
    explain_hydra_error,
    refuse_unknown_flags,
    refuse_unreadable_words,
    refuse_words_of_other_programs,
    schema_types,
    suggested_keys,
    to_hydra_override,
)
from rlhf.config.hydra_parts import (
    SEARCH_PATH,
    composing,
    extend_hydra,
    own_folders,
    parse_flags,
    set_job_config,
    use_config_dir,
)
from rlhf.config.schema.keys import format_value
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.config.validation import refuse_secrets_in_command
from rlhf.jobs.search_command import Search, parse_search
from rlhf.jobs.sweep_command import (
    add_sweep_folders,
    expand_sweep,
    jobs_at_a_time,
    sweep_folder_of,
    use_temporary_plan_folder,
)
from rlhf.jobs.sweep_jobs import end_with_parent
from rlhf.methods import conf_folders
from rlhf.run.metric_table import METRICS, OTHER_NAMES, MetricInfo
from rlhf.runtime.rendezvous import unset_pod_variables

# The DeepSpeed launcher appends this argument, which Hydra cannot read.
LOCAL_RANK = ("--local_rank=", "--local-rank=")
# Spins of an idle libgomp thread before it sleeps, unless the user has set the variable: less than
# a millisecond; libgomp's default is several. rlhf/engine/idle_threads.py explains why.
SPIN_COUNT, SPINS = "GOMP_SPINCOUNT", "30000"
MOST_WHOLE = 3  # largest number of help entries to print whole; of more, only first lines
NOTES = read_yaml_beside(__file__, "notes.yaml")
HIDDEN = ("base", "hydra")  # folders of conf/ that hold no options


class Command(NamedTuple):
    """A command line of launch.py."""

    words: list[str]
    """The arguments for Hydra."""
    folder: Path | None = None
    """Folder of a sweep or search, whose runs are compared at the end."""
    search: Search | None = None
    """The search that the command starts; None: Hydra starts the job or the jobs."""


@contextmanager
def parse_command(words: Sequence[str], definitions: Path, *, leads: bool) -> Iterator[Command]:
    """Parse the arguments ``words`` and yield the command; for ``--help``, answer and exit.

    ``definitions`` is the folder of sweep and search files. ``leads`` is True on rank 0 only:
    the other ranks join the run of rank 0, so Hydra composes nothing on them.

    Raises:
        ConfigError: if a word is a secret or an unknown option, or the sweep or search is wrong.
    """
    if "--version" in words:
        sys.stdout.write(f"rlhf {installed_version('rlhf')}\n")
        sys.exit(0)
    if leads and not words:
        sys.stderr.write(name_commands(f"{NOTES['no_overrides']}\n"))
    given = use_config_dir([word for word in words if not word.startswith(LOCAL_RANK)])
    typed = [to_hydra_override(word) for word in given]
    refuse_unreadable_words(typed)
    refuse_secrets_in_command(typed, os.environ)
    refuse_unknown_flags(typed)
    own = own_folders(typed)
    if leads:
        print_help(typed, definitions.with_name("conf"), own)
    refuse_words_of_other_programs(typed)
    _check_own_options(typed, definitions.with_name("conf"), own)
    if (search := parse_search(typed, definitions, own)) is not None:
        yield Command(typed, search.folder, search)
    elif not leads:
        yield Command(typed)
    else:
        expanded, growing = expand_sweep(typed, definitions, own)
        with use_temporary_plan_folder(expanded) as composed:
            words = add_sweep_folders(composed, typed, growing)
            yield Command(words, sweep_folder_of(words))


class Job(NamedTuple):
    """The only job of a command, or one job of a sweep, with values that are not checked yet."""

    cfg: DictConfig
    """The configuration that Hydra composed."""
    overrides: list[str]
    """The words that set keys."""
    is_plan: bool = False
    """True: only print the plan."""
    resume: str | None = None
    """The run to resume; None: a new run."""
    continues: bool = False
    """True: resume an unfinished run with this configuration, if there is one."""
    folder: Path | None = None
    """Folder of this job of a sweep; None: the command is no sweep."""
    at_a_time: int | None = None
    """Number of jobs of a sweep that run at a time, in processes; None: run in this process."""


def read_job(cfg: DictConfig) -> Job:
    """Return the job of the configuration ``cfg`` that Hydra composed."""
    job = HydraConfig.get()
    resume, continues = _read_resume(cfg)
    words = cast(list[str], OmegaConf.to_container(job.overrides.task, resolve=False))
    return Job(
        cfg,
        [*(word for word in job.overrides.hydra if word.startswith(SEARCH_PATH)), *words],
        is_plan=OmegaConf.select(cfg, "plan") == PlanMode.only.value,
        resume=resume,
        continues=continues,
        folder=Path(job.runtime.output_dir) if job.mode is RunMode.MULTIRUN else None,
        at_a_time=jobs_at_a_time(),
    )


def _read_resume(cfg: DictConfig) -> tuple[str | None, bool]:
    """Return the run to resume, and True for resume=auto, which is removed from ``cfg``."""
    resume = OmegaConf.select(cfg, "resume")
    if resume == "auto":
        cfg.resume = None
        return None, True
    return None if resume is None else str(resume), False


@contextmanager
def compose_job(words: Sequence[str], conf: Path) -> Iterator[Job]:
    """Compose ``conf`` with the override ``words`` for a command that starts no run.

    Raises:
        ConfigError: if a word is a secret, or Hydra cannot apply it.
    """
    typed = [to_hydra_override(word) for word in use_config_dir(words)]
    refuse_unreadable_words(typed)
    refuse_secrets_in_command(typed, os.environ)
    refuse_words_of_other_programs(typed)
    try:
        with composing(conf):
            cfg = compose("config", typed, return_hydra_config=True)
            set_job_config(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            yield Job(cfg, typed, is_plan=True, resume=_read_resume(cfg)[0])
    except Exception as error:
        if (explained := explain_hydra_error(error, typed)) is None:
            raise
        raise explained from error


def set_up_process() -> None:
    """Set up environment and tracebacks; let Linux kill this process when its sweep ends."""
    survive_output_errors()
    sys.excepthook = print_traceback
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra re-raises exceptions, and launch.py handles them
    end_with_parent()
    if (advice := unset_pod_variables()) is not None:
        sys.stderr.write(f"{advice}\n")
    set_up_environment()


def set_up_environment() -> None:
    """Set up what a run needs of its process, also in a program or notebook of the user."""
    os.environ["PYTHONSAFEPATH"] = "1"  # children must not import a json.py of the current folder
    os.environ.setdefault(SPIN_COUNT, SPINS)
    set_cuda_allocator()
    require_linux()
    cap_onednn_isa()
    extend_hydra()


def print_help(words: Sequence[str], conf: Path, own: Sequence[Path] = ()) -> None:
    """Print the entries that the words after ``--help`` name, or ``conf/help.txt``, and exit.

    Without ``--help``, return. The printed values are from the configuration that the other
    ``words`` compose from ``conf``. If all words are overrides, their keys and options are printed.
    ``own`` are the folders of the user's own options.

    Raises:
        ConfigError: if nothing has such a name, or the overrides cannot be composed.
    """
    flags, _ = parse_flags(words)
    if not flags.help:
        return
    adding = [word for word in flags.overrides if word.startswith(SEARCH_PATH)]
    if not (asked := [word for word in flags.overrides if word not in adding]):
        sys.stdout.write(name_commands(conf.joinpath("help.txt").read_text(encoding="utf-8")))
        places = {"installed methods": conf_folders()} | {
            str(relative_to_cwd(folder)): [folder] for folder in own
        }
        for place, folders in places.items():
            if listed := ", ".join(sorted(name for name, _ in _find_options(*folders))):
                sys.stdout.write(f"{textwrap.fill(f'Of {place}: {listed}', 100)}\n")
        sys.exit(0)
    named_words = [word for word in asked if not word.partition("=")[2]]
    given = [word for word in asked if word not in named_words]
    with composing(conf):
        chosen = [word for word in given if not word.startswith("sweep=")]
        cfg = compose("config", [*adding, *chosen])
        for key in OmegaConf.missing_keys(cfg):
            OmegaConf.update(cfg, key, "VALUE")
        config = to_run_config(cfg)
    entries = dict(
        [*_describe_keys(RunConfig, config, config), *_describe_group_options(conf, own)]
    )
    entries |= {name: _describe_metric(info) for name, info in METRICS.items()}
    wrong: ConfigError | None = None
    for word in named_words or [_name_of_override(word, entries) for word in given]:
        try:
            _print_entries(word, entries)
        except ConfigError as error:
            wrong = wrong or error
    if wrong is not None:
        raise wrong
    sys.exit(0)


def _print_entries(word: str, entries: Mapping[str, str]) -> None:
    """Print the entries that ``word`` names, also if it is a name of another program."""
    translated = [OTHER_NAMES[word]] if word in OTHER_NAMES else []
    is_known = translated or any(word in name for name in entries)
    if (tool := word.replace("-", "_")) in TOOLS:
        sys.stdout.write(f"{name_commands(f'python -m rlhf.{tool}')} --help explains a tool\n")
        if not is_known:
            return
    if not is_known:
        refuse_words_of_other_programs([word])
        ours = " ".join(suggested_keys(word, schema_types())).split()
        proposed = dict.fromkeys(name for each in ours for name in (each, each.partition("=")[0]))
        translated = [name for name in proposed if name in entries]
    if translated:
        sys.stdout.write(f"{word} of another program is called here:\n")
    for name in (names := translated or matching_names(word, entries)):
        first, _, rest = entries[name].partition("\n")
        text = textwrap.fill(rest, 100, initial_indent="  ", subsequent_indent="  ")
        sys.stdout.write(f"{name}{first}\n" + (f"{text}\n" if len(names) <= MOST_WHOLE else ""))


def _name_of_override(word: str, entries: Container[str]) -> str:
    """Return the name of the help entry for an override: GROUP=OPTION, or the key."""
    key, _, value = word.lstrip("+~").partition("=")
    option = f"{key.partition('@')[0]}={value}"
    return option if option in entries else key


def matching_names(word: str, names: Iterable[str]) -> list[str]:
    """Return ``word`` if it is a name, else names that begin with it, else names that contain it.

    Raises:
        ConfigError: if there is no such name.
    """
    known = list(names)
    begin = [name for name in known if name.startswith(word)]
    matches = [word] if word in known else begin or [name for name in known if word in name]
    if not matches:
        hint = did_you_mean(word, known)
        raise ConfigError(f"--help {word}: no key, option or metric has this name{hint}")
    return matches


def _describe_keys(
    schema: Any, values: Any, config: RunConfig, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield each dotted key in ``schema`` with its value, bound, effects and meaning."""
    types = get_type_hints(schema)
    for field in fields(schema):
        name, field_type = prefix + field.name, types[field.name]
        value = getattr(values, field.name, None)
        if is_dataclass(field_type):
            yield from _describe_keys(field_type, value, config, f"{name}.")
            continue
        affects, at_resume, *_ = effect_of(name)
        phases = ", ".join(sorted(affects(config))) or "no phase"
        bound = f", {field.metadata['bound'].rule}" if "bound" in field.metadata else ""
        shown = "" if values is None else f" = {format_value(value)}"
        rule = NOTES["at_resume"][at_resume]
        facts = f"({describe_type(field_type)}{bound}; affects {phases}; {rule})"
        yield name, f"{shown}  {facts}\n{field_docstrings(schema).get(field.name, '')}"
        if get_origin(field_type) is dict and is_dataclass(entry := get_args(field_type)[1]):
            yield from _describe_keys(entry, None, config, f"{name}.NAME.")


def _find_options(*folders: Path) -> Iterator[tuple[str, Path]]:
    """Yield GROUP=OPTION and the file of each option in folders that are like conf/."""
    for folder in folders:
        for path in sorted(folder.glob("*/**/*.yaml")):
            group, _, option = path.relative_to(folder).with_suffix("").as_posix().partition("/")
            if group not in HIDDEN and path.is_file():
                yield f"{'sweep' if group == 'sweeps' else group}={option}", path


def _find_all_options(conf: Path) -> Iterator[tuple[str, Path]]:
    """Yield the options of ``conf``, of sweeps/ beside it, and of installed methods."""
    yield from _find_options(conf, *conf_folders())
    for path in sorted(conf.with_name("sweeps").glob("*.yaml")):
        yield f"sweep={path.stem}", path


def _check_own_options(words: Iterable[str], conf: Path, own: Sequence[Path]) -> None:
    """Check the own options that ``words`` choose: their names are free, and their files YAML."""
    chosen = {re.sub(r"^\+*([^=@]+)(@[^=]*)?=", r"\1=", word) for word in words} if own else set()
    taken = dict(_find_all_options(conf)) if own else {}
    for name, path in ((n, p) for n, p in _find_options(*own) if n in chosen):
        if name in taken:
            raise ConfigError(f"{name}: {path} has the name of an option of rlhf; rename the file")
        with translate_errors(partial(_unreadable_option_error, name, path)):
            yaml.safe_load(text := read_user_text(path))
        if name.startswith("experiment=") and "# @package _global_" not in text:
            raise ConfigError(f"{name}: {path} must begin with the line `# @package _global_`")


def _unreadable_option_error(name: str, path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{name}: {path} cannot be read ({reason})")


def _describe_group_options(conf: Path, own: Sequence[Path] = ()) -> Iterator[tuple[str, str]]:
    """Yield each option of a group, and each sweep, with the comment that begins its file."""
    for name, path in [*_find_options(*own), *_find_all_options(conf)]:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        comments = [line[2:] for line in takewhile(lambda line: line.startswith("#"), lines)]
        description = [line for line in comments if not line.startswith(("@", "python "))]
        yield name, f"  {' '.join(description[:1])}\n{' '.join(description[1:])}"


def _describe_metric(info: MetricInfo) -> str:
    """Return a metric's unit, better direction, meaning and healthy values, as text."""
    direction = f"; {info.better} is better" if info.better else ""
    texts = f"{info.meaning}. Healthy: {info.healthy}. Otherwise: {info.otherwise}."
    return f"  ({info.unit}{direction})\n{texts}"


@cache
def field_docstrings(schema: type) -> dict[str, str]:
    """Return the docstring below every field of a dataclass, including its base classes' fields."""
    docstrings: dict[str, str] = {}
    for each in reversed(schema.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    docstrings[name] = " ".join(words.split())
    return docstrings
