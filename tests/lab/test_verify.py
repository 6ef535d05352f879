"""python -m rlhf_lab.verify: planted cheats are found by name, and honest runs pass."""

import json
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rlhf import replay
from rlhf.base.errors import RewardError, RlhfError
from rlhf.base.ranks import Ranks
from rlhf.config.choices import RewardKind, Source
from rlhf.config.freeze import load_run, to_run_config, write_command, write_frozen_config
from rlhf.config.schema.keys import store_whole_paths
from rlhf.config.schema.rewards import RewardTerm
from rlhf.jobs import launch_command
from rlhf.jobs.launch_command import Job
from rlhf.replay import ReplayComparison
from rlhf.run.console import Console
from rlhf.runs.registry import FoundRun
from rlhf.runtime.worker import run_phases
from rlhf_lab import verify
from rlhf_lab.bundle import import_bundle, write_bundle
from rlhf_lab.verify import (
    CHECKS,
    COMPUTED_CHECKS,
    CheckedRun,
    CheckState,
    check_command,
    find_doubts,
    read_checked_run,
)
from tests.cheats import CHEATS, copy_run, edit_json, forge_answers, forge_hashes, swap_seed
from tests.conftest import Compose
from tests.documents import read_document

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return copy_run(tiny_run, tmp_path / "run")


def checked(folder: Path, **how: Any) -> CheckedRun:
    return read_checked_run(folder, **{"seed": 1, "replays": 0} | how)


def verified(run: Path, capsys: Capture, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = verify.main([str(run), "--json", *words])
    found = read_document("verify", capsys.readouterr().out)
    return code, {each["check"]: each for each in found["checks"]}


def test_an_honest_run_passes(run: Path, capsys: Capture) -> None:
    assert verify.main([str(run), "--replay", "none"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [f"ok                 {name}" for name in CHECKS]
    assert last.startswith("7 ok, 0 cannot be checked, 0 differs; --seed ")


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_found_by_its_check(name: str, run: Path) -> None:
    check, plant = CHEATS[name]
    plant(run, Random(name))
    found = find_doubts(CHECKS[check], checked(run))
    assert CheckState.differs in {each.state for each in found}, found


def test_a_difference_is_named_with_file_line_and_value(run: Path, capsys: Capture) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    row = next(row for row, line in enumerate(lines) if '"reward/loss"' in line)
    of_phase = sum('"phase": "reward"' in line for line in lines[: row + 1])
    lines[row] = json.dumps(json.loads(lines[row]) | {"reward/loss": 0.125}) + "\n"
    (run / "metrics.jsonl").write_text("".join(lines))
    code, checks = verified(run, capsys, "--replay", "1")
    assert code == verify.DIFFERS
    (found,) = checks["logs"]["findings"]
    assert found["place"] == f"metrics.jsonl, line {of_phase} of reward"
    assert found["text"].startswith('the run did not write: {"phase": "reward", "step": 1')
    assert checks["replay"]["state"] == "cannot be checked", "nothing is computed after that"


def test_what_a_bundle_lacks_cannot_be_checked(run: Path, capsys: Capture) -> None:
    for path in run.glob("*/*/model.safetensors"):
        path.unlink()
    code, checks = verified(run, capsys)
    assert code == 0, checks
    assert checks["replay"]["findings"][0]["text"]
    states = {name: each["state"] for name, each in checks.items()}
    assert states == dict.fromkeys(CHECKS, "ok") | dict.fromkeys(
        ("files", "answers", "replay"), "cannot be checked"
    )
    (run / "ppo" / "manifest.json").unlink()
    swap_seed(run, Random(0))
    assert verify.main([str(run), "--replay", "none"]) == verify.DIFFERS
    said = f"differs            files: {run / 'config.yaml'}: a file of the run differs from "
    assert said in capsys.readouterr().out, "what is missing hides no difference"


def test_what_a_bundle_has_replaced_cannot_be_checked(tiny_run: Path, tmp_path: Path) -> None:
    write_bundle(FoundRun(tiny_run), tmp_path / "run.zip")
    import_bundle(tmp_path / "run.zip", tmp_path / "run")
    run = checked(tmp_path / "run")
    assert {each.state for each in find_doubts(CHECKS["files"], run)} == {CheckState.unknown}
    assert not find_doubts(CHECKS["logs"], run)
    samples = run.folder / "samples.jsonl"
    samples.write_text(samples.read_text().replace("Human", "H."))
    assert {each.state for each in find_doubts(CHECKS["logs"], run)} == {CheckState.differs}
    change = {samples.name: [1, "0f"]}
    edit_json(run.folder / "bundle.json", lambda found: found["changed"].update(change))
    assert {each.state for each in find_doubts(CHECKS["logs"], run)} == {CheckState.unknown}


def test_a_run_of_an_older_version_is_not_accused(run: Path, capsys: Capture) -> None:
    (run / "attempts.json").unlink()
    edit_json(run / "result.json", lambda found: found.pop("records"))
    for phase in ("sft", "reward", "ppo"):
        edit_json(run / phase / "manifest.json", lambda found: found.pop("lines"))
    code, checks = verified(run, capsys, "--replay", "none")
    assert code == 0, checks
    assert {checks[name]["state"] for name in ("files", "logs")} == {"cannot be checked"}


def test_files_that_the_run_was_given_are_compared(run: Path, capsys: Capture) -> None:
    data = run.parent / "mine.jsonl"
    data.write_text("{}\n")
    identity = verify.file_identity(data)
    (run / "inputs.json").write_text(json.dumps({"data.path": {str(data): identity}}))
    forge_hashes(run)
    found = find_doubts(CHECKS["files"], checked(run))
    assert [each.place for each in found] == [str(run / "inputs.json")], "there was no such file"
    assert not find_doubts(CHECKS["inputs"], checked(run))
    data.write_text("[]\n")
    (each,) = find_doubts(CHECKS["inputs"], checked(run))
    assert each[:2] == (str(data), "a file of data.path differs from its recorded hash")
    assert each.state is CheckState.differs
    data.unlink()
    (each,) = find_doubts(CHECKS["inputs"], checked(run))
    assert each.state is CheckState.unknown


def test_a_relative_path_of_the_command_is_the_whole_one_of_the_run(
    tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any folder, since the run has stored the whole path."""
    (tmp_path / "mine.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    words = ["data=local", "data.path=[./mine.jsonl]", "data.template=plain"]
    words.append("data.eval_path=other.jsonl")
    config = to_run_config(compose([*words[:3], f"data.eval_path={tmp_path}/others.jsonl"]))
    run = CheckedRun(tmp_path, store_whole_paths(config), {}, "", 1, 0, trusts_run=True)
    write_frozen_config(config, tmp_path)
    write_command(words, tmp_path)
    job = Job(compose(words), words, is_plan=True)
    monkeypatch.setattr(launch_command, "compose_job", lambda *_: nullcontext(job))
    for place in (tmp_path, Path("/")):
        monkeypatch.chdir(place)
        found = [each.place for each in check_command(run) if each.state is CheckState.differs]
        assert found == ["config.yaml, data.eval_path"]


def test_a_damaged_file_differs_and_hides_nothing(run: Path) -> None:
    (run / "metrics.jsonl").write_text("raised\n")
    assert find_doubts(CHECKS["results"], checked(run))[0].state is CheckState.differs


@pytest.mark.parametrize("content", ["{}", '{"phases": 3, "lines": 1, "files": {"a": []}}'])
def test_odd_files_end_in_no_traceback(content: str, run: Path) -> None:
    names = ("result.json", "attempts.json", "inputs.json", "ppo/manifest.json", "ppo/result.json")
    for name in (*names, "ppo/held_out.json", "samples.jsonl", "metrics.jsonl", "bundle.json"):
        path = run / name
        before = path.read_bytes() if path.exists() else b""
        path.write_text(content)
        with suppress(RlhfError):
            read = checked(run)
            others = CHECKS.keys() - {"command", "leaks"}  # which read none of these files
            assert any(find_doubts(CHECKS[key], read) for key in others) or name == "bundle.json"
        path.write_bytes(before) if before else path.unlink()


def test_another_prompt_in_a_sample_differs(run: Path) -> None:
    samples = run / "samples.jsonl"
    samples.write_text(samples.read_text().replace("Human: ", "Human: Please. ", 1))
    (found, *_) = find_doubts(CHECKS["samples"], checked(run))
    assert found.place == "samples.jsonl, line 1"
    assert found.text.startswith("not a prompt of the synthetic task")


def test_a_finished_run_that_is_started_again_checks_its_judges(run: Path) -> None:
    judge = RewardTerm(kind=RewardKind.function, function="judge:f", weight=0, sealed="0" * 64)
    before, config = (run / "result.json").read_text(), load_run(run)
    (run / "judge.py").write_text("")
    start = partial(
        run_phases,
        run_dir=run,
        ranks=Ranks(),
        console=Console(),
        start_watch=pytest.fail,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run)
        with pytest.raises(RewardError, match=r"rewards\.right\.sealed=0+: .* have changed"):
            start(replace(config, rewards={"right": judge}))
        assert (run / "result.json").read_text() == before
    start(config)
    assert len(json.loads((run / "attempts.json").read_text())["attempts"]) == 3
    assert not find_doubts(CHECKS["files"], checked(run))


def test_a_held_out_prompt_that_is_trained_on_is_a_leak(tiny_run: Path, tmp_path: Path) -> None:
    rows = [
        f'{{"prompt": "What is {i} + 5?", "chosen": "{i + 5}", "rejected": "no"}}'
        for i in range(40)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:30]) + "\n")
    (tmp_path / "held.jsonl").write_text("\n".join(rows[30:]) + "\n")
    run = checked(tiny_run)
    data = replace(run.config.data, source=Source.local, path=str(tmp_path / "train.jsonl"))
    data = replace(data, eval_path=str(tmp_path / "held.jsonl"), split=[1, 1, 1])
    run = run._replace(config=replace(run.config, data=data))
    assert not find_doubts(CHECKS["leaks"], run)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(rows[33].replace("What is", "WHAT is,") + "\n")
    (found,) = find_doubts(CHECKS["leaks"], run)
    assert "held.jsonl" in found.place
    assert found.text.endswith("train.jsonl, row 31: what is 33 + 5")


def test_the_policy_answers_again(run: Path) -> None:
    assert not find_doubts(COMPUTED_CHECKS["answers"], checked(run))
    forge_answers(run, Random(0))
    found = find_doubts(COMPUTED_CHECKS["answers"], checked(run))
    assert len(found) == 2
    assert {each.state for each in found} == {CheckState.differs}


@pytest.mark.parametrize("word", ["reference_every: 1", "teacher_path: teacher"])
def test_the_distance_from_a_reference_that_is_gone_is_no_difference(run: Path, word: str) -> None:
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("\nppo:\n", f"\nppo:\n  {word}\n"))
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(line | {"kl": line["kl"] + 1}) + "\n" for line in lines)
    (run / "samples.jsonl").write_text(text)
    (found,) = find_doubts(COMPUTED_CHECKS["answers"], checked(run, trusts_run=True))
    assert (found.state, found.text[:3]) == (CheckState.unknown, "kl ")


@pytest.mark.parametrize(
    ("ours", "other", "state"),
    [
        (2.0, "", CheckState.ok),
        (2.000001, "", CheckState.differs),
        (2.000001, "threads 2", CheckState.ok),
        (2.5, "threads 2", CheckState.unknown),
    ],
)
def test_only_the_same_machine_can_accuse(
    ours: float, other: str, state: CheckState, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {} if ours == 2 else {"model/weight": ("0f", "1f")}
    metrics = {} if ours == 2 else {"sft/loss": (2.0, ours)}
    taken = []

    def take(_: Path, planned: replay.Replay, target: Path) -> ReplayComparison:
        taken.append((planned.phase, planned.end))
        return ReplayComparison(2, 1, planned.end if metrics else None, metrics | digests)

    monkeypatch.setattr(replay, "take_steps_again", take)
    run = checked(tiny_run, replays=2 if ours == 2 else 1)._replace(other=other)
    found = find_doubts(COMPUTED_CHECKS["replay"], run)
    assert {each.state for each in found} == ({state} - {CheckState.ok})
    if metrics:
        return
    first = list(taken)
    taken.clear()
    find_doubts(COMPUTED_CHECKS["replay"], run)
    assert taken == first, "the same seed draws the same steps"
    assert [phase for phase, _ in taken] == [p for p in ("sft", "reward", "ppo") for _ in range(2)]
    assert len(set(taken)) > 3, "the steps of a phase differ"


@pytest.mark.parametrize("name", ["../../secret", "ABSOLUTE", "/proc/kmsg", "\0", "/dev/zero"])
def test_no_file_outside_of_a_run_is_read(
    name: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "secret").write_text('{"phase": "ppo", "step": 1, "text": "a line of mine"}\n')
    name = name.replace("ABSOLUTE", str(tmp_path / "secret"))
    manifest = run / "ppo/manifest.json"
    edit_json(manifest, lambda found: found["files"].update({name: [1, "0"]}))
    edit_json(manifest, lambda found: found["lines"].update({name: "0"}))
    edit_json(run / "attempts.json", lambda a: a["attempts"][-1]["files"].update({name: "0"}))
    (run / "inputs.json").write_text(json.dumps({"data.path": {name: [1, "0"]}}))
    with (run / "config.yaml").open("a") as file:
        file.write("# from elsewhere\n")
    assert verify.main([str(run), "--replay", "none", "--json"]) in (0, 1)
    captured = capsys.readouterr()
    assert "a line of mine" not in captured.out + captured.err
    found = {each["check"]: each for each in read_document("verify", captured.out)["checks"]}
    assert "is missing" in str(found["files"]["findings"])
    for check in ("inputs", "command", "leaks"):
        assert "(inputs.json), which need your consent" in str(found[check]["findings"])


def test_a_command_of_others_reads_no_variable(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN_VARIABLE", "the value of mine")
    with (run / "command.txt").open("a") as file:
        file.write("'name=${oc.env:PLAIN_VARIABLE}'\n")
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + "# from elsewhere\n")
    assert verify.main([str(run), "--replay", "none"]) == 1
    captured = capsys.readouterr()
    assert "the value of mine" not in captured.out + captured.err
    assert "command.txt), which need your consent" in captured.out


def test_a_result_without_a_phase_is_refused(run: Path) -> None:
    edit_json(run / "result.json", lambda found: found["phases"].pop("ppo"))
    with pytest.raises(RlhfError, match=r"phases\.ppo is missing"):
        checked(run)
