"""The rollout backend that phases, evaluation and chat build from the configuration."""

from typing import Any

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.config.choices import Dtype
from rlhf.config.freeze import to_run_config
from rlhf.data.collate import collate_prompts
from rlhf.models.build import build_actor
from rlhf.models.language_model import LanguageModel
from rlhf.phases.shared.backends import RolloutBackends, build_rollout_backend
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


@pytest.mark.parametrize("rollout", ["fast", "hf"])
@pytest.mark.parametrize(
    ("max_rows", "rows", "most"), [("3", 2, 2), ("2", 3, 2), ("null", 3, 3), ("2", None, 2)]
)
def test_an_evaluation_decodes_no_more_rows_than_training(
    rollout: str, max_rows: str, rows: int | None, most: int, compose: Compose
) -> None:
    """All held-out prompts are one call, and memory was planned for a step's share of a rank."""
    config = to_run_config(compose([f"rollout={rollout}", f"rollout.max_rows={max_rows}"]))
    backend: Any = build_rollout_backend(
        config, small_tokenizer(), temperature=1.0, dtype=Dtype.fp32, ranks=Ranks(), rows=rows
    )
    assert (backend.settings if rollout == "fast" else backend).max_rows == most


def test_backends_of_a_process_share_what_they_keep(compose: Compose) -> None:
    config = to_run_config(compose([]))
    backends = RolloutBackends(config, small_tokenizer(), Dtype.fp32, Ranks(), 2)
    built: list[Any] = [
        backends.build(temperature=1.0, greedy=greedy, keeps_graphs=keeps)
        for greedy, keeps in ((False, True), (True, True), (False, False))
    ]
    assert built[0].kept is built[1].kept is not None
    assert built[2].kept is None
