"""What a rank decides before and after its phases."""

import json
from pathlib import Path

import pytest

from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.models.tokenizers import load_tokenizer
from rlhf.run.results import phase_result_path, write_json
from rlhf.runtime.phase_runs import collect_results
from rlhf.runtime.worker import create_or_load_tokenizer, drop_repeated_lines
from tests.conftest import Compose
from tests.models_on_disk import save_models

RESULTS = {
    "sft": {"perplexity_after": 2.5},
    "reward": {"accuracy": 0.75},
    "ppo": {"score_after": 1.5},
    "dpo": {"accuracy": 0.625},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "extra", "objective"),
    [
        ("[sft]", {}, -2.5),
        ("[sft,reward]", {}, 0.75),
        ("[sft,reward,ppo]", {}, 1.5),
        ("[sft,reward,ppo]", {"gold_after": 0.8}, 0.8),
        ("[sft,dpo]", {}, 0.625),
        ("[sft,dpo]", {"gold_after": 0.8}, 0.8),
    ],
)
def test_the_objective_is_that_of_the_last_phase(
    order: str, extra: dict[str, float], objective: float, compose: Compose, tmp_path: Path
) -> None:
    for phase, result in RESULTS.items():
        last = extra if phase in ("ppo", "dpo") else {}
        write_json(phase_result_path(tmp_path, phase), result | last)
    config = to_run_config(compose([f"phase.order={order}"]))
    assert collect_results(config.phase.order, tmp_path)["objective"] == objective


def test_a_phase_that_begins_again_is_named(tmp_path: Path) -> None:
    lines = [{"phase": phase, "step": 1} for phase in ("sft", "ppo")]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said: list[str] = []
    for _ in range(2):  # a second start finds no line of PPO any more
        drop_repeated_lines(tmp_path, [Phase.reward, Phase.ppo], {}, said.append)
    assert said == ["ppo: begins again, as it was stopped before its first checkpoint"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == lines[0]


def test_a_reward_model_trained_alone_brings_its_own_tokenizer(
    compose: Compose, tmp_path: Path
) -> None:
    save_models(tmp_path, policy="some words", reward="entirely other text")
    config = to_run_config(
        compose(
            [
                *("phase=reward", "model@reward_model=pretrained"),
                f"reward_model.path={tmp_path / 'reward'}",
            ]
        )
    )
    tokenizer = create_or_load_tokenizer(config, tmp_path, parts={})
    assert tokenizer.get_vocab() == load_tokenizer(tmp_path / "reward", key="k").get_vocab()
    again = create_or_load_tokenizer(config, tmp_path, parts={})
    assert again.get_vocab() == tokenizer.get_vocab()
