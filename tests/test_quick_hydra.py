"""The quicker composition of the tests gives what Hydra and OmegaConf give by themselves."""

import subprocess
import sys

import pytest

from tests.runs import ROOT

COMPOSE = """
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from hydra import compose
from omegaconf import OmegaConf
from rlhf.base.errors import ConfigError
from rlhf.config.hydra_parts import composing
from rlhf.config.typed import merge_into_schema, to_run_config
if sys.argv[1] == "quick":
    from tests.quick_hydra import compose_quickly
    compose_quickly()
with composing(Path(sys.argv[2])):
    for experiment in ("smoke", "arithmetic", "default"):
        words = [] if experiment == "default" else [f"experiment={experiment}"]
        cfg = compose("config", [*words, "+rewards.ends={kind: stop}", "seed=3"])
        copy = deepcopy(cfg)
        copy.ppo.steps, copy.rewards.ends.kind = 7, "gold"
        print(OmegaConf.to_yaml(cfg), OmegaConf.to_yaml(copy))
        print(OmegaConf.is_struct(copy), copy.ppo._get_full_key("steps"))
        print(OmegaConf.to_yaml(OmegaConf.merge(cfg, {"ppo": {"steps": 9}}), resolve=True))
        copy.rewards = {}
        for steps, sizes in ((7, None), (7, 2), (8, 2), (7, None), ("x", 2), (7, "y"), (7, None)):
            copy.ppo.steps, copy.sft.batch_size = steps, sizes or cfg.sft.batch_size
            try:
                config = to_run_config(copy)
            except ConfigError as error:
                print(error)
            else:
                config.ppo.steps = 99  # which no later configuration must have
                print(OmegaConf.to_yaml(merge_into_schema(copy)), replace(config, run_dir=None))
"""


@pytest.mark.slow
def test_quick_configurations_are_those_of_hydra() -> None:
    quick, plain = (
        subprocess.run(
            [sys.executable, "-c", COMPOSE, how, str(ROOT / "conf")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for how in ("quick", "plain")
    )
    assert quick == plain
    assert plain.count("steps: 7") == 11, "arithmetic needs its rewards"
    assert plain.count("ppo.steps=x: expected") == 3
