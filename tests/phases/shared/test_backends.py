"""The rollout backend that phases, evaluation and chat build from the configuration."""

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.config.choices import Dtype
from rlhf.config.freeze import to_run_config
from rlhf.data.collate import collate_prompts
from rlhf.models.build import build_actor
from rlhf.models.language_model import LanguageModel
from rlhf.phases.shared.backends import build_rollout_backend
from tests.conftest import Compose
from tests.models_on_disk import small_tokenizer
from tests.phases.ppo.ppo_pieces import source
from tests.plain_engine import PlainEngine

TOKENS = 6


@pytest.mark.parametrize("rollout", ["fast", "hf"])
def test_greedy_takes_the_same_tokens_whatever_is_drawn(rollout: str, compose: Compose) -> None:
    words = [f"rollout={rollout}", f"rollout.max_response_tokens={TOKENS}"]
    tokenizer = small_tokenizer()
    actor = PlainEngine(LanguageModel(build_actor(source(), tokenizer, seed=1)))
    responses = {}
    for greedy in (True, False):
        backend = build_rollout_backend(
            to_run_config(compose(words)),
            tokenizer,
            temperature=3.0,
            dtype=Dtype.fp32,
            ranks=Ranks(),
            greedy=greedy,
        )
        for draw in (0.05, 0.95):
            prompts = collate_prompts(
                [[5, 6], [7]],
                ["", ""],
                torch.full((2, TOKENS), draw),
                pad_id=tokenizer.pad_token_id,
                device=torch.device("cpu"),
            )
            responses[greedy, draw] = backend.generate(actor, prompts).ids_BT
    assert torch.equal(responses[True, 0.05], responses[True, 0.95])
    assert not torch.equal(responses[False, 0.05], responses[False, 0.95])
