"""Read runs to compare, group them by setting, and count the settings that were tried.

Only numbers with the same meaning are compared. The meaning of a score is the reward that gave it.
A reward model is identified by the hash of its weights, so scores are compared only between runs
that share a reward model (through ``from_run`` or the store of phases).

If you pick the best of many settings and compare it with another, you make, in effect, all the
comparisons that led to this choice. So the settings of all runs that ask the same question count:
runs with the same last phase, model and data and, after PPO without a gold judge, with the same
rewards and base of the reward model.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.errors import CheckpointError
from rlhf.base.hashing import sha256_of
from rlhf.base.intervals import Estimate, mean_of, mean_with_interval
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.base.stored_files import (
    HELD_OUT,
    METRICS,
    PHASE_MANIFEST,
    RESULT,
    find_entries,
    find_folders_with,
    read_stored_text,
)
from rlhf.config.choices import ModelInit, Phase, RewardKind, Source
from rlhf.config.effects import effect_of
from rlhf.config.freeze import COMMAND, FROZEN, read_frozen_keys
from rlhf.config.run_dir import RUNS
from rlhf.config.schema.keys import NO_PHASE, format_value
from rlhf.config.schema.rewards import DEFAULTS_OF_PART
from rlhf.report.gain import values_around
from rlhf.report.summary import describe_objective

FEWEST_SEEDS = 3  # with two seeds, the interval would be ± 12.7 standard errors
# The last parts of keys whose values the planner chooses; such keys are not compared.
CHOSEN_BY_PLANNER = ("micro_batch_size", "max_rows", "gather_weights", "keep_graphs")
HASH_DIGITS = 8  # hexadecimal digits of a hash that are shown
# Patterns of the keys that have equal values in runs which ask the same question.
BASE = r"model\.(init|path|architecture)"
DATA = r"data\.(source|path|eval_path|subset|size|sets\.[^.]+\.(path|subset))"
JUDGE = rf"rewards|reward_{BASE}"  # only for PPO without the gold judge of generated data
ASKED = rf"(phase|{BASE}|{DATA})(\..+)?"
# A key and its value in YAML: the rest of the line and the lines indented below it, or a list.
BELOW = r"(?:\n(?:\1  .*)?)*"
KEY_AND_VALUE = re.compile(
    rf"^( *)([^\s:#-][^:\n]*):(?: (.+{BELOW})|((?:\n\1-.*{BELOW})+)|)$", re.MULTILINE
)
SEEDS = ("seed", "data.seed")  # keys in which runs of one setting may differ
MOST_KEYS = 4  # most keys that describe_unlikeness names
RESULTS = (RESULT, METRICS)  # a run without these files has shown nothing yet


class Measure(NamedTuple):
    """A number in result.json: an entry of measures.yaml."""

    title: str
    key: str
    of_prompts: str = ""
    phases: Sequence[str] = ("ppo", "dpo")


MEASURES = [
    Measure(title, **entry) for title, entry in read_yaml_beside(__file__, "measures.yaml").items()
]


class ComparedRun(NamedTuple):
    """A run to compare: its folder, its configuration and its measures."""

    folder: Path
    keys: Mapping[str, Any]
    """Values of the configuration by key, without keys that change no result."""
    measures: Mapping[str, float]
    """Value of each measure by title; empty if the run has not finished."""
    starts: Mapping[str, float | None] = {}
    """Value of each measure before training by title, if it is known."""
    meanings: Mapping[str, str] = {}
    """Meaning of a measure, by title; measures without an entry mean the same in every run."""
    by_prompt: Mapping[str, Mapping[str, Sequence[float | None]]] = {}
    """Values of the held-out prompts "before" and "after" PPO, by name; {} if none are stored."""
    origin: str | None = None
    """Folder of the run that trained the phases before the last; None if there are none."""

    @property
    def seeds(self) -> tuple[int, int]:
        """Return the seeds of the run and of its data."""
        seed, of_data = self.keys["seed"], self.keys.get("data.seed")
        return int(seed), int(seed if of_data is None else of_data)


class Setting(NamedTuple):
    """Runs that differ only in their seeds; ``values`` has the keys in which settings differ."""

    values: Mapping[str, Any]
    runs: list[ComparedRun]

    @property
    def label(self) -> str:
        """Return the values as overrides, or "all" if there is only one setting."""
        words = (f"{key}={command_line_text(value)}" for key, value in self.values.items())
        return " ".join(words) or "all"

    def finished_runs(self) -> list[ComparedRun]:
        """Return the runs that have a result."""
        return [run for run in self.runs if run.measures]

    def shared_origins(self) -> list[str]:
        """Return the runs whose early phases are shared by several finished runs of the setting."""
        origins = Counter(run.origin for run in self.finished_runs() if run.origin is not None)
        return [origin for origin, count in origins.items() if count > 1]

    def reached_text(self, title: str) -> str:
        """Return a measure's means before (if known) and after training as "0.5 → 0.6 ± 0.1"."""
        start, reached = self.start(title), estimate_text(self.estimates()[title])
        return reached if math.isnan(start) else f"{start:.3f} → {reached}"

    def start(self, title: str) -> float:
        """Return the mean of a measure before training; NaN if no run has measured it."""
        starts = (run.starts.get(title) for run in self.finished_runs())
        return mean_of([start for start in starts if start is not None])

    def estimates(self) -> dict[str, Estimate]:
        """Return the mean and interval over seeds of each measure that all finished runs have."""
        if not (runs := self.finished_runs()):
            return {}
        titles = [title for title in runs[0].measures if all(title in r.measures for r in runs[1:])]
        return {title: mean_over_seeds([run.measures[title] for run in runs]) for title in titles}


def find_run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories: each path that is a run, and all runs below other paths."""
    folders = []
    for path in paths:
        if not (runs := list(find_folders_with(FROZEN, path))):
            in_folder = f"no {FROZEN} is in it or in its folders"
            reason = in_folder if path.is_dir() else "no such folder"
            hint = "python -m rlhf.runs lists the runs of this folder"
            raise CheckpointError(f"{path} holds no run: {reason}; {hint}")
        folders += runs
    return folders


def start_time(run: Path) -> float:
    """Return when a run began, in seconds since 1970: the time of a file that is written once."""
    path = run / COMMAND
    return (path if path.exists() else run / FROZEN).lstat().st_mtime


def read_compared_run(folder: Path) -> ComparedRun:
    """Read the configuration and the measures of a run; it has no measures before it finishes."""
    frozen = read_frozen_keys(folder)
    keys = {key: value for key, value in frozen.items() if not is_ignored_key(key)}
    keys["phase"] = (frozen.get("phase.order") or [None])[-1]  # earlier phases may be reused
    result = RESULT.read(folder)
    # The objective is null if it was not a finite number; the run then counts as unfinished.
    if result is None or result["objective"] is None:
        return ComparedRun(folder, keys, {})
    measures: dict[str, float | None] = {"objective": result["objective"]}
    starts: dict[str, float | None] = {}
    for measure in MEASURES:
        for phase in measure.phases:
            values = result["phases"].get(phase, {})
            if measure.key in values:
                measures.setdefault(measure.title, values[measure.key])
                before = f"{measure.key.removesuffix('_after')}_before"
                starts.setdefault(measure.title, values.get(before))
    ppo = result["phases"].get("ppo", {})
    for judge in ppo.get("judge_gains", {}):
        title = f"judge {judge}"
        starts[title], measures[title] = values_around(ppo, judge)
    measures["minutes"] = 60 * result["measured"]["hours"]
    starts["objective"] = starts.get("gold", starts.get("score"))
    known = {title: value for title, value in measures.items() if value is not None}
    meanings = measure_meanings(folder, frozen, result["phases"])
    by_prompt = HELD_OUT.read(folder) or {}
    phases = [*result["phases"].values()]
    origin = phases[0].get("reused_from", str(folder.resolve())) if phases[1:] else None
    return ComparedRun(folder, keys, known, starts, meanings, by_prompt, origin)


def group_runs_by_setting(runs: Sequence[ComparedRun]) -> list[Setting]:
    """Group runs whose keys are equal except for SEEDS; keep the order of the runs.

    If only some runs have a part of ``rewards``, its default values are not shown. If two runs have
    the same seeds too, for example before and after an edit of the code, the second run gets its
    own setting, with repeat=2.
    """
    all_keys = dict.fromkeys(key for run in runs for key in run.keys)
    varied = [key for key in all_keys if len({json.dumps(r.keys.get(key)) for r in runs}) > 1]
    settings: dict[str, Setting] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        values = {key: run.keys[key] for key in varied if key in run.keys and key not in SEEDS}
        for key in [key for key in values if key.startswith("rewards.")]:
            is_default = values[key] == DEFAULTS_OF_PART.get(key.rpartition(".")[2], key)
            if is_default and any(key not in other.keys for other in runs):
                del values[key]
        keys_text = json.dumps(run.keys)
        seen[keys_text] += 1
        if seen[keys_text] > 1:
            values["repeat"] = seen[keys_text]
        settings.setdefault(json.dumps(values), Setting(values, [])).runs.append(run)
    return list(settings.values())


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean with its interval; the half-width is NaN for too few values (seeds)."""
    estimate = mean_with_interval(values)
    return estimate if len(values) >= FEWEST_SEEDS else estimate._replace(half=math.nan)


def command_line_text(value: object) -> str:
    """Return a value of the configuration as the text that a user would type."""
    return f"{value:g}" if isinstance(value, float) else format_value(value)


def estimate_text(estimate: Estimate, sign: str = "") -> str:
    """Return an estimate as "0.123 ± 0.045", or without an interval as "0.123"."""
    interval = "" if math.isnan(estimate.half) else f" ± {estimate.half:.3f}"
    return f"{estimate.mean:{sign}.3f}{interval}"


@cache
def is_ignored_key(key: str) -> bool:
    """Return True if the key changes no result, or its value is chosen by the planner."""
    try:
        return effect_of(key).affects is NO_PHASE or key.endswith(CHOSEN_BY_PLANNER)
    except KeyError:  # another version of this project wrote the run
        return False


def measure_meanings(
    folder: Path, keys: Mapping[str, Any], phases: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Return a description of each measure whose meaning can differ between runs, by title.

    ``keys`` is the configuration of the run in ``folder``, ``phases`` the results of its phases.
    """
    accuracy_of = "DPO" if "dpo" in phases else "the reward model"
    meanings = {
        "score": f"by {_scorer_name(folder, keys)}",
        "accuracy": f"of {accuracy_of} on {_data_and_tokenizer_name(keys)}",
        "perplexity": f"of {_data_and_tokenizer_name(keys)}",
    }
    objective = describe_objective(phases)
    for judge in phases.get("ppo", {}).get("judge_gains", {}):
        of_judge = {k: v for k, v in keys.items() if k.startswith(f"rewards.{judge}.")}
        meanings[f"judge {judge}"] = f"by rewards.{judge} {_short_hash(of_judge)}"
    words = objective.replace("gold score", "")
    measure = next((title for title in meanings if title in words), None)
    return meanings | {"objective": f"{objective}, {meanings[measure]}" if measure else objective}


def _scorer_name(folder: Path, keys: Mapping[str, Any]) -> str:
    """Return a name of what scored the answers: reward model, gold judge, or parts of rewards."""
    parts = {key: value for key, value in keys.items() if key.startswith("rewards.")}
    kinds = {value for key, value in parts.items() if re.fullmatch(r"rewards\.[^.]+\.kind", key)}
    if not parts and keys.get("reward_model.init") == ModelInit.gold:
        return "the judge"
    parts_text = ", ".join(dict.fromkeys(key.split(".")[1] for key in parts))
    names = [f"rewards {parts_text} ({_short_hash(parts)})"] if parts else []
    if not parts or RewardKind.model in kinds:
        names.append(f"reward model {_reward_model_hash(folder, keys)}")
    return " with ".join(names)


def _reward_model_hash(folder: Path, keys: Mapping[str, Any]) -> str:
    """Return a hash of the reward model's saved weights or, without weights, of its config keys."""
    if (manifest := PHASE_MANIFEST.read(folder / "reward")) is not None:
        files = manifest["files"]
        return _short_hash({name: files[name] for name in files if name.endswith(".safetensors")})
    return _short_hash({key: keys[key] for key in keys if key.startswith("reward_model.")})


def _data_and_tokenizer_name(keys: Mapping[str, Any]) -> str:
    """Return a name of the run's data and tokenizer, on which accuracy and perplexity depend."""
    data = [keys.get(f"data.{name}") for name in ("source", "path", "eval_path", "subset")]
    tokenizer = [keys.get(f"model.{name}") for name in ("tokenizer", "path", "vocab_size")]
    named = [str(value) for value in (*data, *tokenizer) if value is not None]
    return " ".join(named)


def _short_hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return sha256_of(text.encode())[:HASH_DIGITS]


class Tried(NamedTuple):
    """The number of settings that were tried on a comparison's question, and where they are."""

    num_settings: int
    places: Sequence[Path] = ()  # folders whose runs were counted
    is_baseline_chosen: bool = False
    """True if the user may have chosen the baseline by its results."""

    @property
    def num_differences(self) -> int:
        """Return how many differences of one measure the user could have chosen to show."""
        others = self.num_settings - 1
        return self.num_settings * others // 2 if self.is_baseline_chosen else others


def find_tried(
    settings: Sequence[Setting], *, registry: Path | None, is_whole_folder: bool
) -> Tried:
    """Count the settings that were tried on the questions that ``settings`` ask.

    These are ``settings``, and the settings of other runs in ``registry`` or, by default, in the
    folder ``runs`` that holds the compared runs (without such a folder, in their parent folders).
    The baseline cannot have been chosen for its results if it is the first setting of a whole
    folder, or was tried before all others.
    """
    compared = [run.folder.resolve() for setting in settings for run in setting.runs]
    near = {next((f for f in run.parents if f.name == RUNS.name), run.parent) for run in compared}
    places = sorted({registry.resolve()} if registry else near)
    keys_of_run = {folder: _read_keys(folder) for folder in compared}
    for place in places:
        # Other folders are searched one level deep only: one of them may be a whole home folder.
        is_searched = registry or place.name == RUNS.name
        children = (file.parent for file in find_entries(place, f"*/{FROZEN}"))
        for run in find_folders_with(FROZEN, place) if is_searched else children:
            if any((run / name).is_file() for name in RESULTS):
                with suppress(CheckpointError):  # a damaged run is not counted
                    keys_of_run[run] = _read_keys(run)
    questions = {question_of(keys_of_run[run]) for run in compared}
    counted = [run for run, keys in keys_of_run.items() if question_of(keys) in questions]
    tried = group_runs_by_setting([ComparedRun(run, keys_of_run[run], {}) for run in counted])
    first = min(counted, key=start_time)
    baseline = next((s.runs[0].folder for s in settings if s.finished_runs()), first)
    runs = (first, baseline.resolve())
    first_keys, baseline_keys = (keys_of_run[run] | dict.fromkeys(SEEDS, "") for run in runs)
    count = max(len(tried), len(settings))  # a run that is named twice is two settings
    return Tried(count, places, not is_whole_folder and first_keys != baseline_keys)


def question_of(keys: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return those ``keys`` (with values as texts) that are equal in runs that ask one question."""
    needs_no_judge = keys.get("data.source") == Source.synthetic or keys["phase"] != Phase.ppo
    pattern = ASKED if needs_no_judge else rf"{ASKED}|({JUDGE})(\..+)?"
    return frozenset(item for item in keys.items() if re.fullmatch(pattern, item[0]))


def describe_unlikeness(settings: Sequence[Setting]) -> str:
    """Return a sentence that names differing keys, if they are many and the questions differ.

    Otherwise return "". Keys that belong to the question are named first.
    """
    keys = list(dict.fromkeys(key for setting in settings for key in setting.values))
    keys.sort(key=lambda key: re.fullmatch(ASKED, key) is None)
    if len(keys) < max(2, len(settings)) or not re.fullmatch(ASKED, keys[0]):
        return ""
    named = ", ".join(keys[:MOST_KEYS]) + ", ..." * (len(keys) > MOST_KEYS)
    return f"Not a fair comparison: {len(keys)} keys differ ({named}), data or model among them"


def _read_keys(folder: Path) -> dict[str, str]:
    """Return the last phase and the keys that change results, with unparsed values."""
    texts = scan_keys(read_stored_text(folder / FROZEN) or "")
    keys = {key: text for key, text in texts.items() if not is_ignored_key(key)}
    return keys | {"phase": texts.get("phase.order", "").rpartition(" ")[2]}


def scan_keys(text: str) -> dict[str, str]:
    """Return the values in a YAML ``text`` that OmegaConf wrote, by dotted key, as unparsed text.

    To parse the YAML would take forty times as long.
    """
    path: list[str] = []
    values = {}
    for indent, name, value, items in KEY_AND_VALUE.findall(text):
        path[len(indent) // 2 :] = [name]
        if value or items:  # otherwise ``name`` is a group of keys
            values[".".join(path)] = value or items
    return values
