"""The command ``rlhf``: runs, sweeps and tools from any folder, with options beside the data."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import launch as app
from rlhf.__main__ import TOOLS, main
from rlhf.base.command import build_command_parser
from rlhf.base.errors import ConfigError
from rlhf.base.program import name_commands
from rlhf.config.freeze import read_command, write_command
from rlhf.config.run_dir import find_run_dir, point_latest_to
from tests.runs import ROOT, TINY_RUN, python

PAGE = (ROOT / "docs/sweeps.md").read_text()
(MINE,) = re.findall(r"```yaml\n(# @package _global_\n.*?)```", PAGE, re.DOTALL)
THEIRS = "# @package _global_\n# a recipe of theirs\ndefaults: [smoke, _self_]\nseed: 8\n"
Answer = tuple[int, str, str]


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an experiment and a sweep in conf/ and an experiment in other/."""
    options = {"conf/experiment/mine": MINE, "other/experiment/theirs": THEIRS}
    options["conf/sweeps/question"] = "# which seed?\nexperiment: mine\ngrid: {seed: [1, 2]}\n"
    for name, text in options.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rlhf(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Run ``rlhf`` with words in this process, which keeps its own settings."""

    def run(*words: str) -> Answer:
        monkeypatch.setattr(app, "set_up_process", lambda: None)
        monkeypatch.setattr(sys, "argv", ["rlhf", *words])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.setenv("HYDRA_MAIN_MODULE", "__main__")  # conf/ is beside launch.py
        monkeypatch.setattr("runpy.run_path", lambda *_, **__: sys.exit(app.start()))
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def test_tools_are_the_modules(
    rlhf: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr("runpy.run_module", lambda name, **_: started.append((name, sys.argv[1:])))
    for tool in TOOLS:
        assert rlhf(tool, "--help")[0] == 0
        module, words = started.pop()
        assert module == f"rlhf.{tool.replace('-', '_')}"
        assert find_spec(module) is not None
        assert words == ["--help"]
    code, _, err = rlhf("evalute")
    assert code == 2
    assert err.startswith("error: cannot read evalute: it has no =; ")
    assert err.endswith("; did you mean evaluate?\n")
    assert rlhf("verify")[2].startswith("error: verify: not an override of rlhf; write python -m ")


def test_a_tool_is_named_as_it_is_started(away: Path) -> None:
    parser = build_command_parser("rlhf.gpu_check", "python -m rlhf.gpu_check --only A\n")
    assert parser.format_help().startswith("usage: rlhf gpu-check [-h]\n\nrlhf gpu-check --only A")


def test_advice_names_what_works_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    advice = "python launch.py resume=a, python -m rlhf.gpu_check, python -m rlhf_lab.verify a"
    monkeypatch.chdir(ROOT)
    assert name_commands(advice) == advice == str(ConfigError(advice))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.py").touch()  # of another program
    there = "rlhf resume=a, rlhf gpu-check, python -m rlhf_lab.verify a"
    assert name_commands(advice) == there == str(ConfigError(advice))


@pytest.mark.parametrize("start", ["python launch.py", "rlhf"])
def test_a_stored_command_has_the_words(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path if start == "rlhf" else ROOT)
    write_command(["seed=2", "name=a b"], tmp_path)
    assert (tmp_path / "command.txt").read_text() == f"{start} seed=2 'name=a b'\n"
    assert read_command(tmp_path) == ["seed=2", "name=a b"]


def test_without_a_folder_tools_take_the_latest_run(
    away: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = "RUN_DIR: none is given, and there is no runs/latest in this folder"
    with pytest.raises(ConfigError, match=refused):
        find_run_dir(None)
    run = Path("runs/mine/1")
    run.mkdir(parents=True)
    point_latest_to(run, print)
    replayed = run.with_name(".replay-x")
    replayed.mkdir()
    point_latest_to(replayed, print)
    assert find_run_dir(None).resolve() == run.resolve()
    assert f"using runs/latest, which is {run.resolve()}\n" in capsys.readouterr().err
    assert find_run_dir("elsewhere") == Path("elsewhere")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--help", "conf: experiment=mine, sweep=question\n"),
        ("--config-dir other --help", "other: experiment=theirs\n"),
        ("--help experiment=mine", "experiment=mine  The recipe of our project.\n"),
        ("--help sweep=question", "sweep=question  which seed?\n"),
        ("--config-dir=other --help experiment=theirs seed", "seed = 8  "),
        ("--cfg job experiment=mine", "kl_ctl: 0.1\n"),
        ("-cd other experiment=theirs plan=only --json", '"fits": true'),
    ],
)
def test_own_options_are_found(words: str, shown: str, rlhf: Callable[..., Answer]) -> None:
    code, out, err = rlhf(*words.split())
    assert code == 0, err
    assert shown in out


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize("file", ["local/default", "methods", "hydra/sweeper/jobs"])
def test_downloads_set_nothing_that_was_not_chosen(file: str, rlhf: Callable[..., Answer]) -> None:
    for folder in (Path("conf"), Path("other")):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{file}.yaml").write_text("# @package _global_\nseed: 99\n")
    code, out, err = rlhf("--cfg", "job", "phase=sft")
    assert (code, "\nseed: 1\n" in out) == (0, True), err
    code, _, err = rlhf("--config-dir=other", "phase=sft")
    assert code == 2
    assert "other: must be a folder with the layout of conf/, but without hydra, local" in err


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config-dir nowhere", "--config-dir=nowhere: must be a folder with the layout of conf/"),
        ("experiment=theirs", "unknown option experiment=theirs; options: "),
        ("-m sweep=nothing", "conf/sweeps; choose one of actor_lr, "),
        ("experiment=smoke", "conf/experiment/smoke.yaml has the name of an option of rlhf; "),
        ("experiment=broken", "conf/experiment/broken.yaml cannot be read (ParserError: while "),
        ("experiment=latin", "conf/experiment/latin.yaml cannot be read ('utf-8' codec can't "),
        ("experiment=keys", "conf/experiment/keys.yaml must begin with the line `# @package _glo"),
        ("experiment=uses", 'conf/experiment/broken.yaml", line 2, column 1'),
    ],
)
def test_wrong_options_are_one_line(words: str, message: str, rlhf: Callable[..., Answer]) -> None:
    texts = {"smoke": MINE, "broken": "a: [\n", "latin": "a: caf\xe9", "keys": "seed: 3\n"}
    texts["uses"] = "# @package _global_\ndefaults: [broken]\n"
    for name, text in texts.items():
        Path(f"conf/experiment/{name}.yaml").write_bytes(text.encode("latin-1"))
    code, _, err = rlhf(*words.split())
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_run_keeps_its_own_options(away: Path, rlhf: Callable[..., Answer]) -> None:
    """It is resumed, and is a source, when the options are gone."""
    shared = ("experiment=", "reward.", "ppo.", "rollout.")
    tiny = [word for word in TINY_RUN if not word.startswith(shared)]
    words = ["--config-dir", "other", "experiment=theirs", "phase=sft", *tiny]
    ended = python("-m", "rlhf", *words, cwd=away, PYTHONPATH=f"{ROOT}:{ROOT / 'lab'}")
    assert ended.returncode == 0, ended.stderr
    assert "\n  rlhf chat runs/theirs/" in ended.stdout
    assert f"rlhf 'hydra.searchpath=[file://{away}/other]' experiment=theirs" in ended.stdout
    assert (away / "runs/latest/conf/experiment/theirs.yaml").read_text() == THEIRS
    assert (away / "runs/latest").resolve().parent.name == "theirs"
    (away / "other").rename(away / "moved")
    code, out, err = rlhf("resume=runs/latest", "launcher.dry_run=true")
    assert (code, "launch.py resume=runs/latest" in out) == (0, True), err
    code, out, err = rlhf("from_run=runs/latest", "phase=reward", "plan=only", "--json")
    assert (code, '"fits": true' in out) == (0, True), err
