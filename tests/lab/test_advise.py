"""rlhf_lab.advise: what a probe measures, what it advises, and the command."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config.typed import to_run_config
from rlhf_lab.advise import PROBE, Probe
from tests.conftest import Compose
from tests.documents import read_document
from tests.runs import TINY_RUN, python

RISING = (-3.0, 0.1, 0.3, 0.7, 0.75, 0.74)


def rollouts(offset: float, *, steps: int = 30, batch: int = 64) -> Iterator[Mapping[str, Any]]:
    """Yield responses whose scores have deviation 1 and ``offset`` within and between prompts."""
    rng = random.Random(3)
    for step in range(steps):
        for prompt in range(batch // 4):
            base = rng.gauss(0, offset)
            for _ in range(4):
                score = base + rng.gauss(0, 1)
                yield {"step": step, "prompt": str(prompt), "score": score, "tokens": 6.0}


@pytest.mark.parametrize(
    ("offset", "explained", "overrides"),
    [
        (0.0, [-0.2, 0.0], {"advantage_estimator": "reinforce_pp", "responses_per_prompt": 1}),
        (2.0, [-0.2, 0.0], {"advantage_estimator": "rloo", "responses_per_prompt": 8}),
        (
            0.0,
            RISING,
            {"advantage_estimator": "gae", "responses_per_prompt": 1, "actor_freeze_steps": 3},
        ),
        (2.0, RISING, {"advantage_estimator": "rloo", "responses_per_prompt": 8}),
    ],
)
def test_the_least_noise_is_advised(
    offset: float, explained: list[float], overrides: Mapping[str, Any]
) -> None:
    probe = Probe.of(rollouts(offset), explained)
    assert probe.overrides == {f"ppo.{name}": value for name, value in overrides.items()}


def test_noises_are_those_of_advantages() -> None:
    """The variance around the others' mean is that of such differences, counted one by one."""
    lines = list(rollouts(1.0, steps=400))
    probe = Probe.of(lines, [0.0, 0.0])
    scores = [line["score"] for line in lines]
    groups = [scores[start : start + 4] for start in range(0, len(scores), 4)]
    around_others = [
        score - statistics.fmean(group[:place] + group[place + 1 :])
        for group in groups
        for place, score in enumerate(group)
    ]
    of_four = probe.within * 4 / 3
    expected = statistics.variance(around_others) / statistics.variance(scores)
    assert of_four == pytest.approx(expected, rel=0.02)
    assert probe.batch == 64
    assert probe.noises["rloo"] == pytest.approx(probe.within * 8 / 7 * 72 / 64)
    assert Probe.of(rollouts(0.0, batch=512), [0.0]).group == 32, "more responses, larger groups"
    assert Probe.of(rollouts(0.0, batch=60), [0.0]).group == 4, "a group size divides the batch"


def test_rollouts_without_a_difference_are_refused() -> None:
    alike = [{"step": 1, "prompt": "a", "score": 1.0, "tokens": 3.0}] * 4
    with pytest.raises(ConfigError, match="all 4 responses have the score 1"):
        Probe.of(alike, [0.0])
    alone = [{"step": 1, "prompt": str(n), "score": float(n), "tokens": 3.0} for n in range(4)]
    for lines in (alone, []):
        with pytest.raises(CheckpointError, match=r"no prompt has two responses.*plan=only"):
            Probe.of(lines, [0.0])


@pytest.mark.parametrize(
    "words",
    [
        "ppo=dapo data.size=100000",
        "ppo.gdpo=true",
        "ppo.epochs=1",
        "experiment=ppo_shared_trunk",
        "checkpoint.stop_after=ppo/1",
    ],
)
def test_a_probe_replaces_the_keys_that_it_excludes(words: str, compose: Compose) -> None:
    probing = PROBE | {"ppo.steps": 9, "ppo.actor_freeze_steps": 8}
    config = to_run_config(compose([*words.split(), *(f"{k}={v}" for k, v in probing.items())]))
    assert config.ppo.epochs is config.checkpoint.stop_after is None


@pytest.mark.slow
def test_command_probes_and_leaves_nothing(tmp_path: Path) -> None:
    def advise(*words: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "rlhf_lab.advise", *words, "--json", cwd=tmp_path)

    probed = advise(*(word for word in TINY_RUN if word != "ppo.steps=2"), "--steps", "2")
    assert probed.returncode == 0, probed.stderr
    found = read_document("advise", probed.stdout)
    assert found["probe"]["batch"] == 16
    assert found["probe"]["responses"] == 3 * 16
    assert len(found["probe"]["explained"]) == 3
    assert not [*tmp_path.glob(".advise-*"), *tmp_path.glob("runs/latest")]
    refused = advise("experiment=smoke", "ppo.kl_ctl=-1")
    assert refused.returncode == 2
    assert "exit code 2" in json.loads(refused.stdout)["error"]["message"]
    assert "ppo.kl_ctl" in refused.stderr
