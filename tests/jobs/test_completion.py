"""Tab completion offers values; a real bash asks for them as at the prompt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf.jobs.launch_command import complete_last_word, print_completions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("word", "choices"),
    [
        ("ppo.kl_estimator=", ["k1", "k2", "k3", "k3_ratio"]),
        ("plan=o", ["only", "off"]),
        ("data.deduplicate=", ["true", "false"]),
        ("ppo.whiten_advantages=", ["true", "false", "null"]),
        ("ppo.critic_lr_schedule=c", ["constant", "cosine"]),
        ("++rewards.mine.kind=fun", ["function"]),
        ("sweep=search_", ["search_gold_kl", "search_sft_lr"]),
        ("seed=", []),
        ("model=", []),  # a group, which Hydra completes
        ("no.such_key=", []),
        ("ppo.kl_est", []),
        ("", []),
    ],
)
def test_values_of_the_last_word(word: str, choices: list[str]) -> None:
    line = f"python launch.py seed=1 {word}"
    key = word.partition("=")[0]
    assert complete_last_word(line, ROOT / "sweeps") == [f"{key}={value}" for value in choices]


def test_other_questions_are_left_to_hydra() -> None:
    line = {"COMP_LINE": "python launch.py plan="}
    print_completions(["plan=only"], line, ROOT)
    print_completions(["-sc", "query=bash"], {}, ROOT)
    print_completions(["-sc", "query=bash"], {"COMP_LINE": "python launch.py se"}, ROOT)
    with pytest.raises(SystemExit) as end:
        print_completions(["-sc", "query=bash"], line, ROOT)
    assert end.value.code == 0


@pytest.mark.slow
def test_bash_offers_values_of_keys_and_groups() -> None:
    script = """
        eval "$(python launch.py -sc install=bash)"
        for word in plan= tracking=wandb; do
            COMP_WORDS=(python launch.py $word) COMP_CWORD=2 COMP_LINE="python launch.py $word"
            hydra_bash_completion && echo "${COMPREPLY[@]}"
        done
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "plan=check plan=only plan=off" in run.stdout, run.stderr
    assert "wandb tracking=wandb_offline" in run.stdout, run.stderr
