"""What the planner says of model states is what two real ranks keep while they train."""

import json
from typing import Any

import pytest
from filelock import FileLock

from rlhf.config.choices import Phase
from rlhf.models.model_uses import models_in_phase
from rlhf.plan.memory_model import MemorySetting, model_state_bytes
from tests.plan.planned import Compose, machine, run_of
from tests.plan.states_rank import CASES, LORA_RANK, OPT, RANKS, group_by_setting
from tests.runs import TORCHRUN, python, session_folder

pytestmark = pytest.mark.slow

Found = list[list[dict[str, Any]]]  # by rank, by case


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks measured, once for all workers."""
    folder = session_folder(tmp_path_factory) / "states"
    files = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            run = python(*TORCHRUN, "-m", "tests.plan.states_rank", folder)
            assert run.returncode == 0, run.stderr
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(case) for case in CASES])
def test_the_plan_is_what_is_measured(case: int, found: Found, compose: Compose) -> None:
    stage, lora, ema, threshold = CASES[case]
    cases = [of_rank[case] for of_rank in found]
    shape = {**OPT, "vocab_size": cases[0]["vocab"]}
    words = ["model=opt_125m", f"ppo.ema_beta={0.99 * ema}", f"hardware.ranks_per_node={RANKS}"]
    words += [f"model.architecture.{key}={value}" for key, value in shape.items()]
    words += ["lora=default", f"lora.rank={LORA_RANK}"] if lora else []
    config = run_of(compose, *words)
    actor = models_in_phase(config, Phase.ppo)[0]
    zero = group_by_setting(stage, threshold)
    states = model_state_bytes(MemorySetting(machine=machine(ranks=RANKS), zero=zero), actor)
    assert not states.host
    for of_rank in cases:
        assert (actor.weights, actor.trained) == (of_rank["weights"], of_rank["trained"])
        kept = of_rank["bytes"]
        kept["optimizer"] = kept.pop("masters") + kept.pop("moments")
        for name, bytes_ in kept.items():
            # Gradients of a parameter on both sides of a boundary are whole on both ranks.
            slack = 0.3 if (name, stage) == ("gradients", 2) else 0.05
            assert states.device[name] == pytest.approx(bytes_, rel=slack, abs=1000), name
