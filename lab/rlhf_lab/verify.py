"""Check a finished run against its records, and compute parts of it again.

python -m rlhf_lab.verify RUN_DIR                   check its files, and replay steps
python -m rlhf_lab.verify RUN_DIR --replay none     only check its files

Each check prints a line: ok, differs, or cannot be checked. The exit code is 1 if a check differs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.errors import CheckpointError, RlhfError
from rlhf.base.intervals import mean_of
from rlhf.base.program import CONF, holds_own_options
from rlhf.base.stored_files import (
    ATTEMPTS,
    HELD_OUT,
    INPUTS,
    MANIFEST,
    METRICS,
    PHASE_MANIFEST,
    RESULT,
    SAMPLES,
    DamagedFileError,
    file_identity,
    iterate_files,
    read_json_object,
)
from rlhf.config.choices import Phase, Source
from rlhf.config.consent import require_consent
from rlhf.config.effects import effect_of
from rlhf.config.freeze import load_run, read_changes, read_command
from rlhf.config.run_dir import find_run_dir
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import values_by_key
from rlhf.data.records import Record, describe_row
from rlhf.run.console import Console
from rlhf.run.finished_phase import mark_lines, phase_lines
from rlhf.run.jsonl import LOGS
from rlhf.run.results import read_attempts
from rlhf.runs.registry import FoundRun
from rlhf_lab.distillation import DistillationKeys
from rlhf_lab.moving_reference import MovingReferenceKeys

DIFFERS = 1  # exit code if something differs
ROUNDING = 1e-2  # largest relative difference that another machine's rounding may explain
EXACT = 1e-4  # largest difference between a policy in memory and the same policy from its files
OLDER = "an older version ran this, and recorded less"
# Name in result.json -> the measure in held_out.json of which the value is the mean.
MEANS = {"score": "score", "kl": "kl", "gold": "gold/gold", "exact": "gold/exact"}
WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[^\w\s.,;:!?'\"]")  # skips punctuation of sentences


class CheckState(StrEnum):
    """The outcome of a check."""

    differs = "differs"
    unknown = "cannot be checked"
    ok = "ok"


class Doubt(NamedTuple):
    """A difference or an impossible check; ``place`` is "", or a file with a line, row or key."""

    place: str
    text: str
    state: CheckState = CheckState.differs


class CheckedRun(NamedTuple):
    """A finished run to check."""

    folder: Path
    config: RunConfig
    result: Mapping[str, Any]
    other: str
    """Differences of machine and code from the run's, which may change rounding; "" if none."""
    seed: int
    replays: int
    trusts_run: bool


Doubts = Iterable[Doubt]


def check_hashes(run: CheckedRun) -> Doubts:
    """Compare files with the hashes from the last start, in result.json and in the manifests."""
    attempts, records = read_attempts(run.folder), run.result.get("records")
    if not attempts or records is None:
        yield Doubt(ATTEMPTS.name, OLDER, CheckState.unknown)
    recorded = {**(attempts[-1]["files"] if attempts else {}), **(records or {})}
    present = set(iterate_files(run.folder))
    yield from _compare_hashes(run.folder, recorded, present, "a file of the run")
    for phase in run.config.phase.order:
        files = _read_manifest(run, phase)["files"].items()
        hashes = {f"{phase}/{name}": identity[-1] for name, identity in files}
        yield from _compare_hashes(run.folder, hashes, present, f"a file of {phase}")


def check_inputs(run: CheckedRun) -> Doubts:
    """Compare the data and the user's code with their hashes at the start of the run."""
    require_consent(run.folder, is_given=run.trusts_run, others_only=True)
    for key, files in (INPUTS.read(run.folder) or {}).items():
        hashes = {path: identity[-1] for path, identity in files.items()}
        present = {path for path in files if Path(path).is_file()}
        yield from _compare_hashes(Path("/"), hashes, present, f"a file of {key}")


def _compare_hashes(
    folder: Path, hashes: Mapping[str, Any], present: Container[str], what: str
) -> Doubts:
    """Compare the ``present`` files of ``folder`` with ``hashes``, whose names may be forged."""
    for name, sha256 in hashes.items():
        if name not in present and sha256 is not None:
            yield Doubt(str(folder / name), f"{what} is missing", CheckState.unknown)
        elif name in present and file_identity(folder / name)[1] != sha256:
            yield Doubt(str(folder / name), f"{what} differs from its recorded hash")


def _read_manifest(run: CheckedRun, phase: Phase) -> dict[str, Any]:
    if (manifest := PHASE_MANIFEST.read(run.folder / phase)) is None:
        raise CheckpointError(f"{run.folder / phase / MANIFEST} is missing")
    return dict(manifest)


def check_logs(run: CheckedRun) -> Doubts:
    """Compare each line of the logs with its hash in the manifest of the line's phase."""
    for phase in run.config.phase.order:
        manifest = _read_manifest(run, phase)
        if "lines" not in manifest:
            yield Doubt(f"{phase}/{MANIFEST}", OLDER, CheckState.unknown)
        lines = manifest.get("lines", {})
        for name in (log for log in LOGS if log in lines):
            recorded, present = lines[name].split(), mark_lines(run.folder / name, phase)
            if present != recorded:
                pairs = enumerate(zip([*present, ""], [*recorded, ""], strict=False))
                row = next(row for row, (mark, original) in pairs if mark != original)
                line = [*phase_lines(run.folder / name, phase), b"the end"][row].decode()[:80]
                yield Doubt(f"{name}, line {row + 1} of {phase}", f"the run did not write: {line}")


def check_command(run: CheckedRun) -> Doubts:
    """Compose the command again, and compare the keys that a resumed run may not change."""
    from rlhf.config.hydra_parts import search_path_override
    from rlhf.jobs.completion import build_new_config
    from rlhf.jobs.launch_command import compose_job

    require_consent(run.folder, is_given=run.trusts_run, others_only=True)
    words = read_command(run.folder)
    if holds_own_options(saved := run.folder / "conf"):  # the own options that the command chose
        words = [search_path_override(saved), *words]
    typed = [f"{word.lstrip('+').partition('=')[0]}." for word in words]
    with compose_job(words, CONF) as job:
        composed = values_by_key(build_new_config(job._replace(resume=None)))
    for key, value in values_by_key(run.config).items():
        is_same = value == composed.get(key) or _is_whole_path_of(value, composed.get(key))
        if key != "run_dir" and not effect_of(key).resume_may_change and not is_same:
            is_typed = any(f"{key}.".startswith(prefix) for prefix in typed)
            text = f"{value}, but the command and conf/ give {composed.get(key)}"
            is_older = key in read_changes(run.folder).filled  # its version did not have the key
            state = CheckState.differs if is_typed and not is_older else CheckState.unknown
            yield Doubt(f"config.yaml, {key}", text, state)


def _is_whole_path_of(value: Any, asked: Any) -> bool:
    """Return True if ``asked`` is a relative path, and ``value`` the path it means in a folder."""
    if isinstance(value, list) and isinstance(asked, list) and len(value) == len(asked):
        return all(a == b or _is_whole_path_of(a, b) for a, b in zip(value, asked, strict=True))
    if not isinstance(value, str) or not isinstance(asked, str) or not value.startswith("/"):
        return False
    return value.endswith("/" + re.sub(r"^(\.\./)+", "", os.path.normpath(asked)))


def check_leaks(run: CheckedRun) -> Doubts:
    """Find held-out prompts that differ from a training prompt only in case or punctuation."""
    from rlhf.runtime.run_data import load_phase_data

    require_consent(run.folder, is_given=run.trusts_run, others_only=True)
    parts = load_phase_data(run.config, lambda _: None).values()
    trained = {_words_of(record): record for part in parts for record in part.train}
    for record in (record for part in parts for record in part.eval):
        twin = trained.get(words := _words_of(record))
        if words and twin and (twin.prompt, twin.text) != (record.prompt, record.text):
            text = f"held out, and trained on in {describe_row(twin)}: {words[:60]}"
            yield Doubt(describe_row(record), text)


def _words_of(record: Record) -> str:
    return " ".join(WORD.findall((record.prompt or record.text or "").casefold()))


def check_results(run: CheckedRun) -> Doubts:
    """Compare result.json with the phases' results, the metrics and the held-out prompts."""
    from rlhf.runtime.phase_runs import find_objective

    logged: dict[str, list[Any]] = defaultdict(list)
    for line in METRICS.read_lines(run.folder):
        for name, value in line.items():
            logged[name].append(value)
    for phase, measures in run.result["phases"].items():
        if measures != read_json_object(run.folder / phase / RESULT):
            yield Doubt(RESULT.name, f"phases.{phase} differs from {phase}/{RESULT}")
        for name, value in measures.items():
            values = logged[f"{phase}/eval_{re.sub('_(before|after)$', '', name)}"]
            if values and value not in values:
                yield Doubt(RESULT.name, f"{phase}.{name}={value}, and the metric is {values[-1]}")
    for when, by_prompt in (HELD_OUT.read(run.folder) or {}).items():
        for title, name in MEANS.items():
            value, values = run.result["phases"]["ppo"].get(f"{title}_{when}"), by_prompt.get(name)
            if values and None not in values and value != (mean := mean_of(values)):
                yield Doubt(HELD_OUT.name, f"{title}_{when} is {mean}, not {value}")
    name, value = find_objective(run.result["phases"], run.folder)
    if run.result["objective"] != value:
        yield Doubt(RESULT.name, f"objective={run.result['objective']}, and {name} is {value}")
    seals = {name: part.sealed for name, part in run.config.rewards.items() if part.sealed}
    if run.result.get("judges", {}) != seals:
        yield Doubt(RESULT.name, f"judges={run.result.get('judges')}, and config.yaml has {seals}")


def check_samples(run: CheckedRun) -> Doubts:
    """Rate the responses in samples.jsonl again with the judge of the generated task."""
    from rlhf.data.synthetic_pairs import GoldJudge

    if run.config.data.source is not Source.synthetic:
        yield Doubt(SAMPLES.name, "only generated data has a judge by rule", CheckState.unknown)
        return
    lines = SAMPLES.read_lines(run.folder)
    for number, line in enumerate(lines, start=1):
        place, ended = f"samples.jsonl, line {number}", bool(line.get("ended"))
        try:
            gold = GoldJudge().rate(line["prompt"], line["response"], ended=ended)["gold"]
        except ValueError as error:
            yield Doubt(place, str(error))
        else:
            if line.get("gold") != gold:
                yield Doubt(place, f"gold={line.get('gold')}, and the judge gives {gold}")


def check_answers(run: CheckedRun) -> Doubts:
    """Let the trained policy answer the prompts of the last samples again; compare the answers."""
    from rlhf.evaluate.answer_rows import Evaluator, last_trained_policy

    lines = list(SAMPLES.read_lines(run.folder))
    if not lines:
        yield Doubt(SAMPLES.name, "the run has no answers", CheckState.unknown)
        return
    last = [line for line in lines if line["step"] == lines[-1]["step"]]
    last = [line for line in last if line.get("model") == "actor"]
    compared, config = ["prompt", "response", "score", "kl"], run.config
    moves = MovingReferenceKeys.of(config).reference_every > 0
    if moves or DistillationKeys.of(config).teacher_path is not None:
        compared.remove("kl")  # an Evaluator measures KL to the model from which training started
        text = "kl needs a reference that the run did not store"
        yield Doubt(SAMPLES.name, text, CheckState.unknown)
    evaluator = Evaluator(run.folder, trusts_run=run.trusts_run)
    try:
        policy = evaluator.load_policy(last_trained_policy(run.folder)[1])
        sampled = evaluator.default_decodings[0]
        rows = list(evaluator.generate_answers("", policy, sampled, num_prompts=len(last)))
    finally:
        evaluator.close()
    for number, (line, row) in enumerate(zip(last, rows, strict=False), start=1):
        for name in compared:
            if not _is_close(line.get(name), row[name], EXACT):
                text = f"{name} {line.get(name)!r}, and now {row[name]!r}"
                yield Doubt(f"samples.jsonl, last answer {number}", text, _difference_state(run))


def check_replay(run: CheckedRun) -> Doubts:
    """Replay random steps of each phase; their logs must be equal on the same machine."""
    from rlhf.replay import create_replay_folder, plan_replay, take_steps_again

    require_consent(run.folder, is_given=run.trusts_run)
    draw = random.Random(run.seed)
    trained = [p for p, result in run.result["phases"].items() if "reused_from" not in result]
    lasts = {phase: plan_replay(run.folder, Phase(phase), None).end for phase in trained}
    for phase in (phase for phase in trained for _ in range(run.replays)):
        replay = plan_replay(run.folder, Phase(phase), draw.randint(1, lasts[phase]))
        with create_replay_folder(None, beside=run.folder) as target:
            comparison = take_steps_again(run.folder, replay, target)
        place, differing = f"metrics.jsonl, {phase} step {comparison.step}", comparison.differing
        numbers = [pair for pair in differing.values() if not isinstance(pair[0], str)]
        if run.other and all(_is_close(*pair, ROUNDING) for pair in numbers):
            continue
        for name, (original, replayed) in differing.items():
            text = f"{name}={original}, and the replay has {replayed}"
            yield Doubt(place, text, _difference_state(run))


def _difference_state(run: CheckedRun) -> CheckState:
    """Return ``unknown`` if another machine may have rounded differently, else ``differs``."""
    return CheckState.unknown if run.other else CheckState.differs


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return bool(one == other)


Check = Callable[[CheckedRun], Doubts]
CHECKS: Mapping[str, Check] = {
    "files": check_hashes,
    "inputs": check_inputs,
    "logs": check_logs,
    "command": check_command,
    "leaks": check_leaks,
    "results": check_results,
    "samples": check_samples,
}
COMPUTED_CHECKS: Mapping[str, Check] = {"answers": check_answers, "replay": check_replay}


def read_checked_run(
    folder: Path, *, seed: int, replays: int, trusts_run: bool = False
) -> CheckedRun:
    """Read the configuration and the result of a run to check.

    Raises:
        CheckpointError: if the run has not finished, or its configuration or result is damaged.
    """
    from rlhf.replay import describe_other_machine

    config, result = load_run(folder), RESULT.read(folder)
    if result is None:
        raise CheckpointError(f"{folder} has no {RESULT}: finish the run first (resume=)")
    if missing := [phase for phase in config.phase.order if phase not in result["phases"]]:
        raise DamagedFileError(folder / RESULT, f"phases.{missing[0]} is missing")
    other = "; ".join(describe_other_machine(folder))
    return CheckedRun(folder, config, result, other, seed, replays, trusts_run)


def verify_run(run: CheckedRun) -> Iterator[tuple[str, CheckState, list[Doubt]]]:
    """Yield the name, the outcome and the doubts of each check.

    Nothing is computed again if ``run.replays`` is 0, or if a file differs or is missing.
    """
    is_intact = True
    for name, check in {**CHECKS, **(COMPUTED_CHECKS if run.replays else {})}.items():
        doubts = [Doubt("", "not computed, since files differ or are missing", CheckState.unknown)]
        if name in CHECKS or is_intact:
            doubts = find_doubts(check, run)
        states = {doubt.state for doubt in doubts}
        state = next((s for s in CheckState if s in states), CheckState.ok)
        lacks_files = name == "files" and any(doubt.text != OLDER for doubt in doubts)
        is_intact &= state is not CheckState.differs and not lacks_files
        yield name, state, sorted(doubts, key=lambda doubt: doubt.state is not state)


def find_doubts(check: Check, run: CheckedRun) -> list[Doubt]:
    """Return the doubts of a check; a damaged file differs, and other errors make it impossible."""
    doubts: list[Doubt] = []
    try:
        with redirect_stdout(sys.stderr):  # loading and sampling may print
            doubts.extend(check(run))
    except DamagedFileError as error:
        doubts.append(Doubt("", str(error)))
    except (RlhfError, OSError) as error:
        doubts.append(Doubt("", str(error), CheckState.unknown))
    changed = (FoundRun(run.folder).bundle or {"changed": {}})["changed"]
    for index, doubt in enumerate(doubts):
        if doubt.place.removeprefix(f"{run.folder}/").partition(",")[0] in changed:
            text = f"{doubt.text}; a bundle has replaced secrets or paths in the file"
            doubts[index] = Doubt(doubt.place, text, CheckState.unknown)
    return doubts


def main(arguments: Sequence[str]) -> int:
    """Verify the run that the command names; return the exit code."""
    parser = build_command_parser("rlhf_lab.verify", __doc__, uses_run=True, has_json=True)
    parser.add_argument("run_dir", nargs="?", help="a finished run; default: runs/latest")
    text = "random steps of each phase to replay (default: 1); none: compute nothing"
    parser.add_argument("--replay", default="1", metavar="N|none", help=text)
    text = "repeat the seed of an earlier verification to draw the same steps"
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help=text)
    options = parser.parse_args(arguments)
    if options.replay != "none" and not options.replay.isdecimal():
        parser.error(f"--replay {options.replay}: must be a number of steps, or none")
    return run_to_exit_code(lambda: _verify(options), as_json=options.json)


def _verify(options: argparse.Namespace) -> Result:
    folder = find_run_dir(options.run_dir).resolve()
    replays = 0 if options.replay == "none" else int(options.replay)
    values = {"seed": options.seed, "trusts_run": options.trust_run}
    run = read_checked_run(folder, replays=replays, **values)
    console = Console()
    checks = []
    for name, state, doubts in verify_run(run):
        first = [": ".join(filter(None, doubt[:2])) for doubt in doubts[:1]]
        more = [f"and {len(doubts) - 1} more"] if doubts[1:] else []
        console.say(f"{state:<17}  {': '.join([name, *first, *more])}")
        checks.append({"check": name, "state": state, "findings": [d._asdict() for d in doubts]})
    counts = Counter(check["state"] for check in checks)
    states = ", ".join(f"{counts[state]} {state}" for state in reversed(CheckState))
    console.say(f"{states}; --seed {run.seed} replays the same steps")
    if run.other:
        console.say(f"another machine or code, so numbers may be rounded differently: {run.other}")
    content = {"run": str(folder), "seed": run.seed, "other_environment": run.other or None}
    return Result(content | {"checks": checks}, DIFFERS if counts[CheckState.differs] else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
