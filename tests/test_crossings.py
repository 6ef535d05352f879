"""tests/crossings.py: what its checks find, and twelve pairs of settings."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.methods import installed_methods, methods_in_use
from rlhf.options.ptx.rules import uses_corpus
from tests.conftest import Compose
from tests.crossings import (
    TOLERANCE,
    cross_in_process,
    different_metrics,
    draw_pairs,
    prepare,
    read_settings,
    without_repeated_keys,
    wrong_metrics,
)
from tests.needs_lab import needs_lab
from tests.runs import ROOT, session_folder

SEED, PARTS, PAIRS = 3, 3, 4
# Folders in rlhf/options, and when a run uses them.
IN_USE: dict[str, Callable[[RunConfig], object]] = {
    "ahead": lambda config: config.rollout.lag,
    "average": lambda config: config.ppo.ema_beta,
    "corrections": lambda config: config.ppo.uses_corrections,
    "environments": lambda config: config.environment.is_used,
    "lora": lambda config: config.lora.rank,
    "phase_store": lambda config: config.reuse.phases != "never",
    "ptx": uses_corpus,
    "replay": lambda config: config.checkpoint.digest_every,
    "rollout_log": lambda config: config.ppo.log_rollouts_every,
    "trunk": lambda config: config.ppo.shared_trunk,
}
# Options that need a GPU, another program or model, or a part of the score that asks one.
ELSEWHERE = {"fused_layers", "hybrid_engine", "vllm", "judges", "scorers"}


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_twelve_pairs(part: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = session_folder(tmp_path_factory) / "crossings"
    prepare(folder)
    answers = cross_in_process(part, PARTS, seed=SEED, count=PAIRS, folder=folder, replays="none")
    assert [line for line in answers if not line.startswith(("equal", "refused"))] == []
    assert sum(line.startswith("equal") for line in answers) == PAIRS


def test_every_option_and_method_is_crossed(compose: Compose) -> None:
    """Each option is switched on by a setting, and each is drawn beside all others."""
    crossed: set[str] = set()
    for setting in read_settings():
        words = [f"+{x}" if x.startswith("rewards=") else x for x in setting.words]  # as launch.py
        config = to_run_config(
            compose(["experiment=smoke", "hardware=cpu", *without_repeated_keys(words)])
        )
        crossed |= {name for name, is_on in IN_USE.items() if is_on(config)}
        crossed |= {method.name for method in methods_in_use(config)}
    options = {path.name for path in (ROOT / "rlhf/options").iterdir() if path.is_dir()}
    assert options - {"__pycache__"} == IN_USE.keys() | ELSEWHERE
    assert {*IN_USE, *(method.name for method in installed_methods())} == crossed
    pairs = draw_pairs(1)
    assert len(pairs) > 3400
    assert pairs != draw_pairs(2)
    assert sorted(pairs, key=repr) == sorted(draw_pairs(2), key=repr)


def line_of(step: int, **values: float) -> dict[str, Any]:
    return {"phase": "ppo", "step": step, **{f"ppo/{name}": x for name, x in values.items()}}


def test_the_checks_of_metrics(tmp_path: Path) -> None:
    def run(name: str, *lines: dict[str, Any]) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        return tmp_path / name

    first = {"ratio_mean": 1.0, "kl_to_reference": 0.0, "score_mean": 2.0}
    good = run("good", line_of(1, **first), line_of(2, **first | {"kl_to_reference": 0.5}))
    assert [*wrong_metrics(good, frozenset())] == []
    moved = first | {"ratio_mean": 1.1, "kl_to_reference": 0.1, "score_mean": math.nan}
    bad = run("bad", line_of(1, **moved))
    found = " ".join(wrong_metrics(bad, frozenset()))
    assert all(name in found for name in ("ratio_mean", "kl_to_reference", "score_mean"))
    assert [*wrong_metrics(bad, frozenset({"ratio", "kl"}))] == ["step 1: ppo/score_mean=nan"]
    near = first | {"score_mean": 2.0 + TOLERANCE}
    assert [*different_metrics(good, run("near", line_of(1, **near), line_of(2)))] == []
    far = first | {"score_mean": 2.01}
    assert len([*different_metrics(good, run("far", line_of(1, **far)))]) == 1
