"""Every command in the documentation works: each is run here, or known to be run elsewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from itertools import chain
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException

from rlhf.config.hydra_errors import to_hydra_override
from rlhf.jobs.search_command import parse_search
from rlhf.jobs.sweep_command import expand_sweep
from tests.conftest import Compose
from tests.runs import TINY_RUN, launch, python

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]
RUN_ELSEWHERE = {
    ".venv/bin/python -m tests.pretend_cuda launch.py experiment=smoke hardware=a100_40g": (
        "tests/runtime/test_gpu_runs.py"
    ),
    "python -m rlhf.compare RUN_DIR": "tests/compare/test_comparison_page.py",
    "python -m rlhf.compare RUN_DIR --against OTHER_RUN": "tests/compare/test_choices.py",
    "python -m rlhf.compare --answers FILE": "tests/compare/test_choices.py",
    "python examples/tutorial_data.py": "tests/runtime/test_examples.py",
    "python examples/arithmetic.py": "test_arithmetic_has_right_answers",
    "python examples/sentiment.py": "tests/rewards/test_sentiment_example.py",
    "transformers serve runs/latest/ppo/actor --host 127.0.0.1": "tests/chat/test_serve.py",
    "python -m rlhf.compare runs/latest": "tests/compare/test_comparison_page.py",
    "python -m rlhf.evaluate runs/latest": "tests/evaluate/test_evaluate.py",
    ". .venv/bin/activate": ".ci/run",
    "python3 -m venv .venv": ".ci/run",
    "pip install -c constraints.txt -e .": ".ci/run",
    "python -m rlhf.gpu_check": "tests/gpu_check/test_gpu_check.py",
    "python -m rlhf.gpu_check OUT_FOLDER": "tests/gpu_check/test_gpu_check.py",
    "python -m rlhf.gpu_check OUT_FOLDER --only decoders pipelines": "make soak",
    "python -m rlhf.evaluate RUN_DIR": "tests/evaluate/test_evaluate.py",
    "python -m rlhf.evaluate RUN_DIR --against OTHER_RUN --samples 8 --temperature 0.7 0.3": "same",
    "python -m rlhf.export RUN_DIR": "tests/test_export.py",
    "python -m rlhf.export RUN_DIR --checkpoint 40 --out FOLDER": "tests/runtime/test_resume.py",
    "python -m rlhf.export RUN_DIR --push OWNER/NAME": "tests/test_export.py",
    "python -m tools.cloud_files FOLDER hardware=8xh100_80g hardware.nodes=2 model=qwen3_8b "
    "data=rm_static": "tests/tools/test_cloud_files.py",
    "python -m rlhf.chat runs/latest": "tests/chat/test_chat_command.py",
    "python -m rlhf.chat MODEL_FOLDER": "tests/chat/test_lone_model.py",
    "python -m rlhf.chat runs/latest --environment --seed 3": "test_environment_run.py",
    "echo hello '|' python -m rlhf.chat runs/latest": "tests/chat/test_chat_command.py",
    "python -m rlhf.report runs/latest": "tests/report/test_run_page.py",
    "python -m rlhf.replay runs/latest": "tests/test_replay.py",
    "python -m rlhf.replay RUN_DIR --phase ppo --step 37": "tests/test_replay.py",
    "python -m rlhf.report RUN_DIR RUN_DIR": "tests/jobs/test_sweep.py",
    "python -m rlhf.report RUN_DIR RUN_DIR --html FILE": "tests/report/test_setting_curves.py",
    "python -m rlhf.report SWEEP_DIR": "tests/jobs/test_sweep.py",
    "python -m rlhf.watch runs/latest": "tests/watch/test_watch_in_browser.py",
    "python -m rlhf.watch SWEEP_DIR": "tests/watch/test_watch_in_browser.py",
    "python -m rlhf.watch runs/latest --terminal": "tests/watch/test_terminal.py",
    "python -m rlhf.report.dashboards ENTITY/PROJECT": "tests/report/test_dashboards.py",
    "PYTHONPATH=. python launch.py 'tracking.others=[notes:Notes]'": "test_tracker_of_the_page",
}


def commands_of(markdown: str) -> list[str]:
    """Commands in ```bash fences; a line that ends in a backslash goes on in the next."""
    fences = re.findall(r"^ *```bash\n(.*?)^ *```", markdown, flags=re.DOTALL | re.MULTILINE)
    lines = chain.from_iterable(f.replace("\\\n", " ").splitlines() for f in fences)
    commands = (shlex.join(shlex.split(line, comments=True)) for line in lines)
    return [command for command in commands if command]


COMMANDS = sorted({c for page in PAGES for c in commands_of(page.read_text())})


def composing(command: str, data_file: Path) -> list[list[str]]:
    """Arguments that compose what ``python launch.py ...`` would run: its first and last job."""
    if (search := parse_search(words(command), ROOT / "sweeps")) is not None:
        return [
            ["--cfg", "job", *search.fixed, *(f"{d.key}={d.example_value}" for d in search.space)]
        ]
    asked = expand_sweep(words(command), ROOT / "sweeps")
    given = [re.sub(r"^(data\.(?:eval_)?path)=.*", rf"\1={data_file}", a) for a in asked]
    if "--help" in given:
        return [given]
    flags = {"-m", "--cfg", "job"}
    overrides = OverridesParser.create().parse_overrides([a for a in given if a not in flags])
    (jobs,) = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return [["--cfg", "job", *job] for job in (jobs[0], jobs[-1])[: len(jobs)]]


def words(command: str) -> list[str]:
    """Arguments of ``python launch.py ...``."""
    return shlex.split(command)[2:]


def check_make(command: str) -> None:
    """The target is in the Makefile."""
    target = shlex.split(command)[1]
    rule = rf"^([a-z -]+ )?{re.escape(target)}( [a-z -]+)?:"
    assert re.search(rule, (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_pytest(command: str) -> None:
    """The tests that the command would run exist."""
    arguments = ["--collect-only", "-p", "no:cacheprovider", *shlex.split(command)[3:]]
    run = python("-m", "pytest", *arguments, popen=subprocess.Popen)  # no pytest within pytest
    assert run.returncode == 0, run.stdout


def check_launch(command: str, folder: Path, compose: Compose) -> None:
    """Every job that the command would start composes."""
    data_file = folder / "pairs.jsonl"
    data_file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    for arguments in composing(command, data_file):
        if "--help" in arguments or any("hydra" in word for word in arguments):
            run = launch(*arguments, cwd=folder)
            assert run.returncode == 0, f"{arguments}\n{run.stderr}"
        else:
            compose([to_hydra_override(word) for word in arguments[2:]])


def check_benchmark(command: str) -> None:
    """The benchmark accepts the options; tests/benchmarks runs each of them."""
    _, script, *options = shlex.split(command)
    run = python(script, *options, "--help", cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert {each for each in options if each.startswith("--")} <= set(
        re.findall(r"--[\w-]+", run.stdout)
    )


def check(command: str, folder: Path, compose: Compose) -> None:
    """Execute ``command`` in the way of its kind; a command of an unknown kind fails."""
    if command.startswith("make "):
        check_make(command)
    elif command.startswith(".venv/bin/python -m pytest "):
        check_pytest(command)
    elif command.startswith("python benchmarks/"):
        check_benchmark(command)
    elif command.startswith(("python launch.py", "PYTHONPATH=examples python launch.py")):
        check_launch(command.removeprefix("PYTHONPATH=examples "), folder, compose)
    else:
        assert command in RUN_ELSEWHERE, f"say in test_docs.py how this is executed: {command}"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command_works(command: str, tmp_path: Path, compose: Compose) -> None:
    check(command, tmp_path, compose)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "make coffee",
        "conda install rlhf",
        "python launch.py no_such_key=1",
        "python x.py",
        "python benchmarks/ppo_step.py --shape huge",
        "python benchmarks/ppo_step.py --colour red",
    ],
)
def test_wrong_command_fails(command: str, tmp_path: Path, compose: Compose) -> None:
    with pytest.raises((AssertionError, ConfigCompositionException)):
        check(command, tmp_path, compose)


def test_commands_are_found() -> None:
    page = "a\n```bash\nmake run  # go\n\n# only\npython \\\n  launch.py\n```\n```yaml\nx: 1\n```\n"
    assert commands_of(page) == ["make run", "python launch.py"]
    assert "make run" in COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_bash_fences(page: Path) -> None:
    assert not re.search(r"^ *```(sh|shell|console|zsh)\b", page.read_text(), re.MULTILINE)
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert not [text for kind, text in fences if not kind and re.match(r"(python|make|pip) ", text)]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.strip().replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_to_pages_and_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", page.read_text())
    for target, anchor in links:
        if target.startswith("http"):
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


def test_sweep_becomes_its_jobs(tmp_path: Path) -> None:
    data = tmp_path / "d"
    assert composing("python launch.py -m seed=1,2 data.path=x.jsonl", data) == [
        ["--cfg", "job", "seed=1", f"data.path={data}"],
        ["--cfg", "job", "seed=2", f"data.path={data}"],
    ]


@pytest.mark.slow
def test_tracker_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "notes.py").write_text(code)
    run_dir = tmp_path / "run"
    words = [*TINY_RUN, "phase=sft", "tracking.others=[notes:Notes]", f"run_dir={run_dir}"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = launch(*words, cwd=tmp_path, PYTHONPATH=path)
    assert run.returncode == 0, run.stderr
    assert "notes:Notes failed" not in run.stdout
    assert (run_dir / "notes.txt").read_text().startswith("sft 0 None\nsft 1 None\n")


def test_arithmetic_has_right_answers(tmp_path: Path) -> None:
    run = python(ROOT / "examples" / "arithmetic.py", cwd=tmp_path)
    assert "2400 questions" in run.stdout
    rows = [json.loads(line) for line in (tmp_path / "arithmetic.jsonl").read_text().splitlines()]
    right = [int(row["completion"]) == int(row["answer"]) for row in rows]
    assert 0.45 < sum(right) / len(right) < 0.55
    sums = {row["prompt"]: row["answer"] for row in rows}
    assert sums["\n\nHuman: What is 7 + 5?\n\nAssistant:"] == "12"
    assert sums["\n\nHuman: 3 minus 9 please.\n\nAssistant:"] == "-6"
