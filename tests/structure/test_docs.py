"""Every command in the documentation works: each is run here, or known to be run elsewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException

from rlhf.config.hydra_errors import to_hydra_override
from rlhf.config.hydra_parts import parse_overrides
from rlhf.config.typed import to_run_config
from rlhf.jobs.search_command import parse_search
from rlhf.jobs.sweep_command import expand_sweep
from rlhf.jobs.sweeper import combine_values
from rlhf.look.look_command import build_look_parser, compose_config, split_words
from rlhf.run.trackers import build_tracker
from tests.conftest import Compose
from tests.runs import TINY_RUN, launch, python

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]
RUN_ELSEWHERE = {
    ".venv/bin/python -m tests.pretend_cuda launch.py experiment=smoke hardware=a100_40g": (
        "tests/runtime/test_gpu_runs.py"
    ),
    "pip install examples/plugin": "tests/test_plugin.py",
    "python launch.py --help ppo.sapo_temperature": "tests/test_plugin.py",
    "python launch.py experiment=smoke ppo.sapo_temperature=1.0": "tests/test_plugin.py",
    "python examples/tutorial_data.py": "tests/runtime/test_examples.py",
    "python examples/arithmetic.py": "test_arithmetic_has_right_answers",
    "python examples/sentiment.py": "tests/rewards/test_sentiment_example.py",
    "transformers serve runs/latest/ppo/actor --host 127.0.0.1": "tests/chat/test_serve.py",
    ". .venv/bin/activate": ".ci/run",
    "python3 -m venv .venv": ".ci/run",
    "pip install -c constraints.txt -e .": ".ci/run",
    "echo hello '|' python -m rlhf.chat runs/latest": "tests/chat/test_chat_command.py",
    "rlhf -m sweep=question": "tests/test_rlhf.py",
    "rlhf --config-dir FOLDER experiment=mine": "tests/test_rlhf.py",
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
OF_AGENTS = commands_of((ROOT / "AGENTS.md").read_text())  # tests/test_agent.py executes each


def composing(command: str, data_file: Path) -> list[list[str]]:
    """Arguments that compose what ``python launch.py ...`` would run: its first and last job."""
    if (search := parse_search(words(command), ROOT / "sweeps")) is not None:
        return [
            ["--cfg", "job", *search.fixed, *(f"{d.key}={d.example_value}" for d in search.space)]
        ]
    asked, _ = expand_sweep(words(command), ROOT / "sweeps")
    kept = [word for word in asked if not word.startswith("hydra.sweeper.")]
    given = [re.sub(r"^(data\.(?:eval_)?path)=.*", rf"\1={data_file}", word) for word in kept]
    if "--help" in given:
        return [given]
    flags = {"-m", "--cfg", "job", "--json"}
    jobs = combine_values(parse_overrides([a for a in given if a not in flags]), paired=[])
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
    """The file has a test of the name that the command selects."""
    file, option, name = shlex.split(command)[3:]
    tests = re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE)
    assert option == "-k"
    assert any(name in each for each in tests)


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
    """The benchmark has the options; tests/benchmarks runs each of them."""
    _, script, *options = shlex.split(command)
    text = (ROOT / script).read_text()
    names = re.findall(r"^from (\w+)", text, re.M)
    check_options(options, filter(Path.exists, (ROOT / f"benchmarks/{n}.py" for n in names)), text)


def check_command(command: str) -> None:
    """The command has the options, and a test names its module."""
    module, *options = shlex.split(command)[2:]
    path = ROOT / ("lab" if module.startswith("rlhf_lab") else "") / module.replace(".", "/")
    check_options(options, path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")])
    assert any(module in each.read_text() for each in ROOT.glob("tests/**/test_*.py")), command


def check_options(options: list[str], files: Iterable[Path], text: str = "") -> None:
    known = set(re.findall(r'"(--[\w-]+)"', text + "".join(path.read_text() for path in files)))
    assert {each for each in options if each.startswith("--")} <= known | {"--help"}


def check_look(command: str) -> None:
    """The words of the look compose; tests/look runs its options."""
    options = build_look_parser().parse_intermixed_args(shlex.split(command)[3:])
    # The fixture ``compose`` has initialized Hydra; afterwards there is another instance.
    other, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    assert compose_config(*split_words(options.words)).data.source
    GlobalHydra.instance().hydra = other


def check(command: str, folder: Path, compose: Compose) -> None:
    """Execute ``command`` in the way of its kind; a command of an unknown kind fails."""
    if command in OF_AGENTS or command in RUN_ELSEWHERE:
        return
    if command.startswith("make "):
        check_make(command)
    elif command.startswith(".venv/bin/python -m pytest "):
        check_pytest(command)
    elif command.startswith("python -m rlhf.data "):
        check_look(command)
    elif command.startswith("python -m rlhf"):
        check_command(command)
    elif command.startswith("python benchmarks/"):
        check_benchmark(command)
    elif command.startswith(("python launch.py", "PYTHONPATH=examples python launch.py")):
        check_launch(command.removeprefix("PYTHONPATH=examples "), folder, compose)
    else:
        raise AssertionError(f"say in test_docs.py how this is executed: {command}")


@pytest.mark.slow
def test_documented_commands_work(tmp_path: Path, compose: Compose) -> None:
    for command in COMMANDS:
        check(command, tmp_path, compose)


@pytest.mark.slow
def test_wrong_commands_fail(tmp_path: Path, compose: Compose) -> None:
    bench = "python benchmarks/ppo_step.py --colour red"
    for command in ("make coffee", "conda install rlhf", "python launch.py no_key=1", bench):
        with pytest.raises((AssertionError, ConfigCompositionException)):
            check(command, tmp_path, compose)


def test_commands_stand_in_bash_fences() -> None:
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"^ *```(sh|shell|console|zsh)\b", text, re.MULTILINE), page
        fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
        plain = [text for kind, text in fences if not kind]
        assert not [text for text in plain if re.match(r"(python|make|pip) ", text)], page


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.strip().replace(" ", "-") for each in words}


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", page.read_text()):
            if target.startswith("http"):
                continue
            found = (page.parent / target).resolve() if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


def test_tracker_of_the_page(
    tmp_path: Path, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "notes.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = to_run_config(compose([*TINY_RUN, "tracking.others=[notes:Notes]"]))
    said: list[str] = []
    tracker = build_tracker(config, tmp_path, is_main=True, say=said.append)
    for step in (0, 1):
        tracker.log("sft", step, {"sft/loss": 1.0})
    tracker.finish()
    assert not [line for line in said if "failed" in line]
    assert (tmp_path / "notes.txt").read_text() == "sft 0 None\nsft 1 None\n"


def test_arithmetic_has_right_answers(tmp_path: Path) -> None:
    run = python(ROOT / "examples" / "arithmetic.py", cwd=tmp_path)
    assert "2400 questions" in run.stdout
    rows = [json.loads(line) for line in (tmp_path / "arithmetic.jsonl").read_text().splitlines()]
    right = [int(row["completion"]) == int(row["answer"]) for row in rows]
    assert 0.45 < sum(right) / len(right) < 0.55
    sums = {row["prompt"]: row["answer"] for row in rows}
    assert sums["\n\nHuman: What is 7 + 5?\n\nAssistant:"] == "12"
    assert sums["\n\nHuman: 3 minus 9 please.\n\nAssistant:"] == "-6"
