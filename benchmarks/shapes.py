"""What the benchmarks work on: shapes of models, the models on disk, prompts, configurations.

A module, not a command.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlhf.base.types import PromptBatch
    from rlhf.config.schema.run import RunConfig

CONF = Path(__file__).resolve().parents[1] / "conf"
FIRST_ID = 5  # prompts hold no special tokens


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Shape of one decoder with as many key-value heads as heads; opt or llama."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    positions: int = 2048
    family: str = "opt"

    @property
    def matrices(self) -> int:
        """Weights of all layers' matrices; biases and norms are under 0.2 % of them."""
        inner = 3 if self.family == "llama" else 2  # gate, up and down; or up and down
        return self.layers * (4 * self.hidden**2 + inner * self.hidden * self.ffn)

    @property
    def head(self) -> int:
        """Weights of the vocabulary projection."""
        return self.vocab * self.hidden

    def architecture(self) -> dict[str, Any]:
        """Fields of the Hugging Face config."""
        fields: dict[str, Any] = {
            "model_type": self.family,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": self.positions,
        }
        if self.family == "llama":
            return fields | {"intermediate_size": self.ffn}
        return fields | {"ffn_dim": self.ffn, "word_embed_proj_dim": self.hidden}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A policy (and its reference), and a reward model (and the critic)."""

    policy: Decoder
    scorer: Decoder


TINY_MODEL = Decoder(vocab=300, hidden=16, layers=2, heads=2, ffn=32, positions=512)
TINY = Decoder(vocab=8192, hidden=256, layers=6, heads=4, ffn=1024, positions=512)
SMALL = Decoder(vocab=50272, hidden=512, layers=6, heads=8, ffn=2048)
BASE = Decoder(vocab=50272, hidden=768, layers=12, heads=12, ffn=3072)
MEDIUM = Decoder(vocab=50272, hidden=1024, layers=24, heads=16, ffn=4096)
LARGE = Decoder(vocab=50272, hidden=2048, layers=24, heads=32, ffn=8192)
LLAMA = Decoder(vocab=32000, hidden=2048, layers=24, heads=32, ffn=5504, family="llama")
MICRO_LLAMA = Decoder(
    vocab=300, hidden=16, layers=2, heads=2, ffn=32, positions=512, family="llama"
)
LLAMA_60M = Decoder(vocab=8192, hidden=512, layers=12, heads=8, ffn=2048, family="llama")
SHAPES = {
    "micro": Shape(policy=TINY_MODEL, scorer=TINY_MODEL),
    "micro_llama": Shape(policy=MICRO_LLAMA, scorer=TINY_MODEL),
    "tiny": Shape(policy=TINY, scorer=TINY),
    "small": Shape(policy=SMALL, scorer=SMALL),
    "opt125m": Shape(policy=BASE, scorer=SMALL),
    "opt1b": Shape(policy=LARGE, scorer=MEDIUM),
    "llama60m": Shape(policy=LLAMA_60M, scorer=TINY),
    "llama1b": Shape(policy=LLAMA, scorer=MEDIUM),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The prompts of one iteration; every response has exactly ``response_tokens`` tokens."""

    sequences: int = 16
    prompt_tokens: int = 64
    """Of the longest prompt."""
    response_tokens: int = 64
    padding: float = 0.0
    """Share of the prompts' columns that is padding, at most a half."""

    def prompt_lengths(self) -> list[int]:
        """Lengths spread evenly around their mean, the longest last."""
        shortest, last = 1 - 2 * self.padding, max(1, self.sequences - 1)
        shares = (shortest + (1 - shortest) * i / last for i in range(self.sequences))
        return [max(1, round(self.prompt_tokens * share)) for share in shares]

    def prompts(self, step: int, *, vocab: int, device: torch.device) -> PromptBatch:
        """Random prompts; another batch for every step."""
        import torch

        from rlhf.base.random_streams import random_stream
        from rlhf.data.collate import collate_prompts

        ids = [
            torch.randint(FIRST_ID, vocab, (length,), generator=random_stream(1, "ids", step, row))
            for row, length in enumerate(self.prompt_lengths())
        ]
        draws_BT = torch.rand(
            self.sequences, self.response_tokens, generator=random_stream(1, "draws", step)
        )
        texts = [""] * self.sequences
        rows = [row.tolist() for row in ids]
        return collate_prompts(rows, texts, draws_BT, pad_id=0, device=device)


def make_models(folder: Path, shape: Shape) -> None:
    """A policy and a reward model with random weights, and their tokenizer, as folders on disk."""
    from transformers.utils import logging

    from rlhf.models.build import build_actor, build_scorer
    from rlhf.models.sources import ModelSource
    from rlhf.models.tokenizers import train_tokenizer

    logging.disable_progress_bar()
    tokenizer = train_tokenizer(["a benchmark"], vocab_size=300)
    sources = [
        ModelSource(key="model", path=None, architecture=decoder.architecture())
        for decoder in (shape.policy, shape.scorer)
    ]
    build_actor(sources[0], tokenizer, seed=1).save_pretrained(folder / "policy")
    build_scorer(sources[1], tokenizer, seed=2).pretrained.save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)


def run_overrides(folder: Path, work: Work) -> list[str]:
    """PPO on the models of ``folder``: one epoch, one mini-batch, a learned reward model."""
    return [
        "phase=ppo",
        "model=pretrained",
        "model@reward_model=pretrained",
        f"model.path={folder / 'policy'}",
        f"reward_model.path={folder / 'reward'}",
        f"ppo.rollout_batch_size={work.sequences}",
        f"ppo.mini_batch_size={work.sequences}",
        "ppo.ppo_epochs=1",
        "data.template=plain",
        f"rollout.max_prompt_tokens={work.prompt_tokens}",
        f"rollout.max_response_tokens={work.response_tokens}",
        f"rollout.min_response_tokens={work.response_tokens}",
    ]


def run_config(folder: Path, work: Work, overrides: Iterable[str]) -> RunConfig:
    """The configuration of ``run_overrides``, and more."""
    from hydra import compose

    from rlhf.config.hydra_parts import composing
    from rlhf.config.typed import to_run_config

    with composing(CONF):
        return to_run_config(compose("config", [*run_overrides(folder, work), *overrides]))
