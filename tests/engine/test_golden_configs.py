"""The DeepSpeed JSON of every option of conf/zero, of every model, against checked-in files.

``python -m tests.engine.test_golden_configs`` writes them anew; read the difference before you keep
it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from omegaconf import DictConfig

from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_parts import composing
from rlhf.config.roles import Role
from rlhf.engine.deepspeed_config import deepspeed_config
from tests.conftest import Compose
from tests.runs import ROOT

Json = dict[str, Any]

CONF, GOLDEN = ROOT / "conf", Path(__file__).parent / "golden"
OPTIONS = sorted(path.stem for path in (CONF / "zero").glob("*.yaml"))
TWO_NODES = ["hardware=8xa100_80g", "hardware.nodes=2", "hardware.dtype=fp16", "lora=default"]
PLAN = BatchPlan(per_rank=8, micro=4, accumulation=2)


def generated(option: str, compose: Compose) -> Json:
    """Dtype -> role -> JSON on sixteen GPUs; stage 0 has no fp16, and MixZ++ nothing else."""
    config = to_run_config(compose([*TWO_NODES, f"zero={option}"]))
    ranks = config.hardware.nodes * config.hardware.ranks_per_node
    return {
        dtype: {
            role: deepspeed_config(
                role, zero=config.zero, dtype=dtype, plan=PLAN, max_grad_norm=1.0, ranks=ranks
            )
            for role in Role
        }
        for dtype, is_valid in (
            (Dtype.bf16, not config.zero.quantize_frozen_weights),
            (Dtype.fp16, config.zero.stage > 0),
        )
        if is_valid
    }


def golden(option: str) -> Json:
    return json.loads((GOLDEN / f"{option}.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_configs_are_those_of_the_file(option: str, compose: Compose) -> None:
    assert generated(option, compose) == golden(option)


def test_every_file_is_of_an_option() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == OPTIONS


@pytest.mark.parametrize("option", OPTIONS)
def test_deepspeed_reads_every_value(option: str) -> None:
    """A name that DeepSpeed does not know would be refused, or leave the value at its default."""
    from deepspeed.runtime.config import DeepSpeedConfig

    configs = (each for roles in golden(option).values() for each in roles.values())
    for ours in {json.dumps(each): each for each in configs}.values():
        theirs = DeepSpeedConfig(ours)
        section = theirs.zero_config.model_dump(mode="json", by_alias=True)
        places = whole_places(theirs, ours["zero_optimization"])
        assert section.items() >= {**ours["zero_optimization"], **places}.items()
        halves = {"bf16": theirs.bfloat16_config, "fp16": theirs.float16_config}
        for name, half in halves.items():
            assert half.model_dump().items() >= ours.get(name, {"enabled": False}).items()
        top = set(ours) - {*halves, "zero_optimization"}
        assert {name: getattr(theirs, name) for name in top} == {name: ours[name] for name in top}


def whole_places(theirs: Any, section: Json) -> Json:
    """What DeepSpeed read of the places of offloading, which it fills up with its defaults."""
    places = {}
    for name in section.keys() & {"offload_param", "offload_optimizer"}:
        places[name] = getattr(theirs.zero_config, name).model_dump(mode="json")
        assert places[name].items() >= section[name].items()
    return places


def renew() -> None:
    """Write the files anew."""
    with composing(CONF):
        for option in OPTIONS:
            text = json.dumps(generated(option, _composed), indent=1)
            (GOLDEN / f"{option}.json").write_text(f"{text}\n")


def _composed(overrides: list[str]) -> DictConfig:
    return hydra_compose("config", [*overrides, "run_dir=unused"])


if __name__ == "__main__":
    renew()
