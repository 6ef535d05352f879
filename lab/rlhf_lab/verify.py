"""Check a finished run against its records, and compute parts of it again.

python -m rlhf_lab.verify RUN_DIR                   read its files, and replay steps
python -m rlhf_lab.verify RUN_DIR --replay none     only read its files

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
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase, Source
from rlhf.config.consent import require_consent
from rlhf.config.effects import effect_of
from rlhf.config.freeze import load_run, read_command
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
ROUNDING = 1e-2  # largest relative difference to accept if another processor replays a step
EXACT = 1e-4  # largest difference between a policy in memory and the same policy from its files
OLDER = "an older version ran this, and recorded less"
# Entry of result.json, and the measure in held_out.json of which it is the mean.
MEANS = {"score": "score", "kl": "kl", "gold": "gold/gold", "exact": "gold/exact"}
WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d]+|[^\w\s.,;:!?'\"]")  # skips punctuation of sentences


class CheckState(StrEnum):
    """The outcomes of a check."""

    differs = "differs"
    unknown = "cannot be checked"
    ok = "ok"


class Doubt(NamedTuple):
    """A difference or an impossible check; ``place``: a file, a line, row or key in it, or ""."""

    place: str
    text: str
    state: CheckState = CheckState.differs


class CheckedRun(NamedTuple):
    """A finished run to check."""

    folder: Path
    config: RunConfig
    result: Mapping[str, Any]
    other: str
    """Differences of machine and code from the run's, which may change rounding; "": none."""
    seed: int
    replays: int
    trusts_run: bool


Doubts = Iterable[Doubt]


def check_hashes(run: CheckedRun) -> Doubts:
    """Compare files with the hashes of the last start, of result.json and of the manifests."""
    attempts, records = read_attempts(run.folder), run.result.get("records")
    if not attempts or records is None:
        yield Doubt(ATTEMPTS.name, OLDER, CheckState.unknown)
    recorded = {**(attempts[-1]["files"] if attempts else {}), **(records or {})}
    here = set(iterate_files(run.folder))
    yield from _compare_hashes(run.folder, recorded, here, "a file of the run")
    for phase in run.config.phase.order:
        files = _read_manifest(run, phase)["files"].items()
        hashes = {f"{phase}/{name}": identity[-1] for name, identity in files}
        yield from _compare_hashes(run.folder, hashes, here, f"a file of {phase}")


def check_inputs(run: CheckedRun) -> Doubts:
    """Compare the data and the user's code with their hashes at the start of the run."""
    require_consent(run.folder, is_given=run.trusts_run, others_only=True)
    for key, files in (INPUTS.read(run.folder) or {}).items():
        hashes = {path: identity[-1] for path, identity in files.items()}
        here = {path for path in files if Path(path).is_file()}
        yield from _compare_hashes(Path("/"), hashes, here, key)


def _compare_hashes(
    folder: Path, hashes: Mapping[str, Any], here: Container[str], what: str
) -> Doubts:
    """Compare the files ``here`` in ``folder`` with the recorded hashes, which may be hostile."""
    for name, sha256 in hashes.items():
        if name not in here and sha256 is not None:
            yield Doubt(str(folder / name), f"{what}, is not here", CheckState.unknown)
        elif name in here and file_identity(folder / name)[1] != sha256:
            yield Doubt(str(folder / name), f"{what}, is not what the run recorded")


def _read_manifest(run: CheckedRun, phase: Phase) -> dict[str, Any]:
    if (found := PHASE_MANIFEST.read(run.folder / phase)) is None:
        raise CheckpointError(f"{run.folder / phase / MANIFEST} is missing")
    return dict(found)


def check_logs(run: CheckedRun) -> Doubts:
    """Compare each line of the logs with its hash in the manifest of its phase."""
    for phase in run.config.phase.order:
        manifest = _read_manifest(run, phase)
        if "lines" not in manifest:
            yield Doubt(f"{phase}/{MANIFEST}", OLDER, CheckState.unknown)
        lines = manifest.get("lines", {})
        for name in (each for each in LOGS if each in lines):
            marks, found = lines[name].split(), mark_lines(run.folder / name, phase)
            if found != marks:
                pairs = enumerate(zip([*found, ""], [*marks, ""], strict=False))
                row = next(row for row, (ours, theirs) in pairs if ours != theirs)
                line = [*phase_lines(run.folder / name, phase), b"the end"][row].decode()[:80]
                yield Doubt(f"{name}, line {row + 1} of {phase}", f"was not written: {line}")


def check_command(run: CheckedRun) -> Doubts:
    """Compose the command again, and compare the keys that a resumed run may not change."""
    from rlhf.jobs.completion import build_new_config
    from rlhf.jobs.launch_command import compose_job
    from rlhf.runtime.launch_mode import LAUNCHER

    require_consent(run.folder, is_given=run.trusts_run, others_only=True)
    words = read_command(run.folder)
    typed = [f"{word.lstrip('+').partition('=')[0]}." for word in words]
    with compose_job(words, LAUNCHER.with_name("conf")) as job:
        asked = values_by_key(build_new_config(job._replace(resume=None)))
    for key, value in values_by_key(run.config).items():
        is_same = value == asked.get(key) or _is_whole_path_of(value, asked.get(key))
        if key != "run_dir" and not effect_of(key).resume_may_change and not is_same:
            is_typed = any(f"{key}.".startswith(each) for each in typed)
            text = f"{value}, and the command with conf/ gives {asked.get(key)}"
            yield Doubt(
                f"config.yaml, {key}", text, CheckState.differs if is_typed else CheckState.unknown
            )


def _is_whole_path_of(value: Any, asked: Any) -> bool:
    """Return True if ``asked`` is a relative path that means ``value`` in some folder."""
    if isinstance(value, list) and isinstance(asked, list) and len(value) == len(asked):
        return all(a == b or _is_whole_path_of(a, b) for a, b in zip(value, asked, strict=True))
    if not isinstance(value, str) or not isinstance(asked, str) or not value.startswith("/"):
        return False
    return value.endswith("/" + re.sub(r"^(\.\./)+", "", os.path.normpath(asked)))


def check_leaks(run: CheckedRun) -> Doubts:
    """Find held-out prompts that differ from training prompts only in case or punctuation."""
    from rlhf.runtime.run_data import load_phase_data

    require_consent(run.folder, is_given=run.trusts_run, others_only=True)
    parts = load_phase_data(run.config, lambda _: None).values()
    trained = {_words_of(record): record for part in parts for record in part.train}
    for record in (record for part in parts for record in part.eval):
        other = trained.get(words := _words_of(record))
        if words and other and (other.prompt, other.text) != (record.prompt, record.text):
            text = f"held out, and trained on in {describe_row(other)}: {words[:60]}"
            yield Doubt(describe_row(record), text)


def _words_of(record: Record) -> str:
    return " ".join(WORD.findall((record.prompt or record.text or "").casefold()))


def check_results(run: CheckedRun) -> Doubts:
    """Compare result.json with results of phases, metrics, and values of held-out prompts."""
    from rlhf.runtime.phase_runs import find_objective

    logged: dict[str, list[Any]] = defaultdict(list)
    for line in METRICS.read_lines(run.folder):
        for name, value in line.items():
            logged[name].append(value)
    for phase, own in run.result["phases"].items():
        if own != read_json_object(run.folder / phase / RESULT):
            yield Doubt(RESULT.name, f"phases.{phase} differs from {phase}/{RESULT}")
        for name, value in own.items():
            values = logged[f"{phase}/eval_{re.sub('_(before|after)$', '', name)}"]
            if values and value not in values:
                yield Doubt(RESULT.name, f"{phase}.{name}={value}, and its metric is {values[-1]}")
    for when, measures in (HELD_OUT.read(run.folder) or {}).items():
        for title, name in MEANS.items():
            value, values = run.result["phases"]["ppo"].get(f"{title}_{when}"), measures.get(name)
            if values and None not in values and value != (mean := mean_of(values)):
                yield Doubt(HELD_OUT.name, f"{title}_{when} is {mean}, not {value}")
    name, value = find_objective(run.result["phases"], run.folder)
    if run.result["objective"] != value:
        yield Doubt(RESULT.name, f"objective={run.result['objective']}, and {name} is {value}")
    seals = {name: part.sealed for name, part in run.config.rewards.items() if part.sealed}
    if run.result.get("judges", {}) != seals:
        yield Doubt(RESULT.name, f"judges={run.result.get('judges')}, and config.yaml has {seals}")


def check_samples(run: CheckedRun) -> Doubts:
    """Let the judge of the generated task rate the responses in samples.jsonl again."""
    from rlhf.data.synthetic_pairs import GoldJudge

    if run.config.data.source is not Source.synthetic:
        yield Doubt(SAMPLES.name, "its data has no judge by rule", CheckState.unknown)
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
    """Let the trained policy answer the prompts of the last samples again, and score them."""
    from rlhf.evaluate.answer_rows import Evaluator, last_trained_policy

    lines = list(SAMPLES.read_lines(run.folder))
    if not lines:
        yield Doubt(SAMPLES.name, "the run has no answers", CheckState.unknown)
        return
    last = [each for each in lines if each["step"] == lines[-1]["step"]]
    last = [each for each in last if each.get("model") == "actor"]
    compared, config = ["prompt", "response", "score", "kl"], run.config
    moves = MovingReferenceKeys.of(config).reference_every > 0
    if moves or DistillationKeys.of(config).teacher_path is not None:
        compared.remove("kl")  # an Evaluator measures from the model that training started from
        text = "kl is to a reference that the run has not stored"
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
                yield Doubt(f"samples.jsonl, last answer {number}", text, _blame(run))


def check_replay(run: CheckedRun) -> Doubts:
    """Replay random steps of each phase; compare their logs, exactly on the same machine."""
    from rlhf.replay import create_replay_folder, plan_replay, take_steps_again

    require_consent(run.folder, is_given=run.trusts_run)
    draw = random.Random(run.seed)
    trained = {p: each for p, each in run.result["phases"].items() if "reused_from" not in each}
    lasts = {phase: plan_replay(run.folder, Phase(phase), None).end for phase in trained}
    for phase in (phase for phase in trained for _ in range(run.replays)):
        replay = plan_replay(run.folder, Phase(phase), draw.randint(1, lasts[phase]))
        with create_replay_folder(None, beside=run.folder) as target:
            found = take_steps_again(run.folder, replay, target)
        numbers = [pair for pair in found.differing.values() if not isinstance(pair[0], str)]
        if run.other and all(_is_close(*pair, ROUNDING) for pair in numbers):
            continue
        for name, (theirs, ours) in found.differing.items():
            text = f"{name}={theirs}, and the replay has {ours}"
            yield Doubt(f"metrics.jsonl, {phase} step {found.step}", text, _blame(run))


def _blame(run: CheckedRun) -> CheckState:
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
COMPUTING: Mapping[str, Check] = {"answers": check_answers, "replay": check_replay}


def read_checked_run(
    folder: Path, *, seed: int, replays: int, trusts_run: bool = False
) -> CheckedRun:
    """Read the configuration and the result of a run to check.

    Raises:
        CheckpointError: if the run has not finished, or one of these files is damaged.
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
    """Yield the name, the outcome and the findings of each check.

    Nothing is computed again if ``run.replays`` is 0, or if a file differs or is missing.
    """
    is_whole = True
    for name, check in {**CHECKS, **(COMPUTING if run.replays else {})}.items():
        found = [Doubt("", "not computed, since files differ or are missing", CheckState.unknown)]
        if name in CHECKS or is_whole:
            found = doubts_of(check, run)
        states = {each.state for each in found}
        state = next((each for each in CheckState if each in states), CheckState.ok)
        is_lacking = name == "files" and any(each.text != OLDER for each in found)
        is_whole &= state is not CheckState.differs and not is_lacking
        yield name, state, sorted(found, key=lambda each: each.state is not state)


def doubts_of(check: Check, run: CheckedRun) -> list[Doubt]:
    """Return the doubts of a check; a damaged file differs, other errors are unknown."""
    found: list[Doubt] = []
    try:
        with redirect_stdout(sys.stderr):  # the output of loading and sampling
            found.extend(check(run))
    except DamagedFileError as error:
        found.append(Doubt("", str(error)))
    except (RlhfError, OSError) as error:
        found.append(Doubt("", str(error), CheckState.unknown))
    changed = (FoundRun(run.folder).bundle or {"changed": {}})["changed"]
    for number, each in enumerate(found):
        if each.place.removeprefix(f"{run.folder}/").partition(",")[0] in changed:
            text = f"{each.text}; a bundle has replaced secrets or paths in it"
            found[number] = Doubt(each.place, text, CheckState.unknown)
    return found


def main(arguments: Sequence[str]) -> int:
    """Verify the run that the command names; return the exit code."""
    parser = build_command_parser("rlhf_lab.verify", __doc__, uses_run=True, has_json=True)
    parser.add_argument("run_dir", type=Path, help="directory of a finished run")
    text = "random steps of each phase to replay (default: 1); none: compute nothing"
    parser.add_argument("--replay", default="1", metavar="N|none", help=text)
    text = "the number that an earlier verification printed draws the same steps"
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help=text)
    options = parser.parse_args(arguments)
    if options.replay != "none" and not options.replay.isdecimal():
        parser.error(f"--replay {options.replay}: must be a number of steps, or none")
    return run_to_exit_code(lambda: _verify(options), as_json=options.json)


def _verify(options: argparse.Namespace) -> Result:
    folder = expand_user_path(options.run_dir, key="RUN_DIR").resolve()
    replays = 0 if options.replay == "none" else int(options.replay)
    given = {"seed": options.seed, "trusts_run": options.trust_run}
    run = read_checked_run(folder, replays=replays, **given)
    console = Console()
    checks = []
    for name, state, found in verify_run(run):
        first = [": ".join(filter(None, each[:2])) for each in found[:1]]
        more = [f"and {len(found) - 1} more"] if found[1:] else []
        console.say(f"{state:<17}  {': '.join([name, *first, *more])}")
        checks.append({"check": name, "state": state, "findings": [f._asdict() for f in found]})
    counts = Counter(check["state"] for check in checks)
    states = ", ".join(f"{counts[state]} {state}" for state in reversed(CheckState))
    console.say(f"{states}; --seed {run.seed} replays the same steps")
    if run.other:
        console.say(f"another machine or code, so numbers may be rounded differently: {run.other}")
    content = {"run": str(folder), "seed": run.seed, "other_environment": run.other or None}
    return Result(content | {"checks": checks}, DIFFERS if counts[CheckState.differs] else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
