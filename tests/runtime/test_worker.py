"""What a rank decides before its phases."""

import json
from pathlib import Path

from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.models.tokenizers import load_tokenizer
from rlhf.runtime.worker import create_or_load_tokenizer, drop_repeated_lines
from tests.conftest import Compose
from tests.models_on_disk import save_models


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
    words = ["phase=reward", "model@reward_model=pretrained"]
    config = to_run_config(compose([*words, f"reward_model.path={tmp_path / 'reward'}"]))
    tokenizer = create_or_load_tokenizer(config, tmp_path, parts={})
    assert tokenizer.get_vocab() == load_tokenizer(tmp_path / "reward", key="k").get_vocab()
    again = create_or_load_tokenizer(config, tmp_path, parts={})
    assert again.get_vocab() == tokenizer.get_vocab()
