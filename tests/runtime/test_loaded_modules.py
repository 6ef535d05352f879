"""What a run and a plan import while they run: no option that is off, and a plan no torch."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.runs import TINY_RUN, python

OPTION = re.compile(r"rlhf\.options\.(\w+)\.(\w+)")
# Light modules of options that every command asks, because they say what the option needs.
ALWAYS = {"keys", "rules", "environment_rules", "costs", "report", "critic_states"}
ON = {"phase_store"}


def modules_of_command(file: Path, *words: str) -> set[str]:
    run = python("-m", "tests.loaded_modules", file, *words, popen=subprocess.Popen)
    assert run.returncode == 0, run.stderr
    return set(file.read_text().split())


@pytest.mark.slow
def test_a_run_without_options_imports_no_module_of_an_option_and_no_deepspeed(
    tiny_run: Path, tmp_path: Path
) -> None:
    words = [*TINY_RUN, f"from_run={tiny_run}", "ppo.steps=1", f"run_dir={tmp_path / 'run'}"]
    found = modules_of_command(tmp_path / "modules", *words, "plan=off")
    options = [match for each in found if (match := OPTION.match(each))]
    assert {match[2] for match in options} >= {"keys", "rules"}
    wrong = {match[0] for match in options if match[1] not in ON and match[2] not in ALWAYS}
    assert wrong == set()
    assert "deepspeed" not in found  # one rank on a CPU does not need it


@pytest.mark.slow
def test_a_plan_imports_no_torch(tmp_path: Path) -> None:
    command = ["experiment=smoke", "plan=only", "model=opt_125m"]
    command += ["lora=all", "lora.roles=[actor]", "ppo.ema_beta=0.9"]
    found = modules_of_command(tmp_path / "modules", *command)
    assert {"torch", "transformers", "peft"} & found == set()
