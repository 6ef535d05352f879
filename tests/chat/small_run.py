"""A run directory with tiny, untrained models to chat with."""

from functools import cache
from pathlib import Path
from typing import Any

from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.data.plain_turns import build_plain_template
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.tokenizers import train_tokenizer
from tests.conftest import Compose
from tests.models_on_disk import source_of

WORDS = "hello there, and a good day to you. What is that? One, two, three and four more words."
POSITIONS = 128


def save_run(run_dir: Path, compose: Compose, *, expects_conversations: bool = True) -> Path:
    """Save a run of SFT, reward model and PPO; every model is drawn from a seed of its own."""
    config = to_run_config(compose(["hardware=cpu", "rollout.max_response_tokens=12"]))
    run_dir.mkdir()
    write_frozen_config(config, run_dir)
    tokenizer, models = small_models()
    tokenizer.chat_template = build_plain_template("") if expects_conversations else None
    for place, model in models.items():
        model.save_pretrained(run_dir / place)
        tokenizer.save_pretrained(run_dir / place)
    return run_dir


@cache
def small_models() -> tuple[Any, dict[str, Any]]:
    """Return a tokenizer and the models by their places; they are only saved."""
    tokenizer = train_tokenizer([WORDS] * 9, vocab_size=330)
    source = source_of("llama", fields={"max_position_embeddings": POSITIONS})
    return tokenizer, {
        "sft/model": build_actor(source, tokenizer, seed=1),
        "ppo/actor": build_actor(source, tokenizer, seed=2),
        "reward/model": build_scorer(source, tokenizer, seed=3).pretrained,
    }
