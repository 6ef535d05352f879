"""model.path: weights and tokenizer of a Hugging Face folder."""

from pathlib import Path

import torch

from rlhf.config.freeze import to_run_config
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.tokenizers import load_or_train_tokenizer
from tests.conftest import Compose
from tests.models_on_disk import save_base, small_tokenizer


def test_a_model_is_what_its_folder_holds(compose: Compose, tmp_path: Path) -> None:
    saved = save_base(tmp_path, "llama", small_tokenizer())
    overrides = [f"{key}.path={tmp_path}" for key in ("model", "reward_model")]
    groups = ["model=pretrained", "model@reward_model=pretrained"]
    config = to_run_config(compose([*groups, *overrides]))
    tokenizer = load_or_train_tokenizer(config.model, key="model", texts=())
    assert tokenizer.get_vocab() == small_tokenizer().get_vocab()
    actor = build_actor(ModelSource.from_config(config.model, key="model"), tokenizer, seed=7)
    source = ModelSource.from_config(config.reward_model, key="reward_model")
    scorer = build_scorer(source, tokenizer, seed=7).pretrained
    for name, weights in saved.state_dict().items():
        assert torch.equal(actor.get_parameter(name), weights)
        if not name.startswith("lm_head"):
            assert torch.equal(scorer.get_parameter(name), weights)
