"""Tiny models of PPO under plain engines, and a rollout to learn from."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.base.metrics import Metrics
from rlhf.base.ranks import Ranks
from rlhf.base.types import Responses, Rollout
from rlhf.config.batches import BatchPlan
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import collate_prompts
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.language_model import LanguageModel
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.ppo.targets import TargetMaker, Targets
from rlhf.phases.shared.scoring import ModelScores
from tests.architectures import sizes
from tests.plain_engine import PlainEngine, TrainingEngine
from tests.quick_hydra import compose_once
from tests.rounding import assert_near, terms_of

UNTIMED = SimpleNamespace(metrics=lambda *_, **__: {})  # in place of StepSpeed
ROWS, MICRO = 4, 2
PARTS = ROWS // MICRO  # micro-batches of an optimiser step
PROMPT_LENGTHS = [2, 4, 3, 1]
MAX_TOKENS = 8
LENGTHS = [3, 5, 1, 4]  # response tokens of each row
TEMPERATURE = 0.7
TOKENIZER = train_tokenizer(["words"], vocab_size=260)
ARCHITECTURE = sizes("llama", 8, 8, heads=1, initializer_range=0.5)  # far from uniform


class OneOfTwo(Ranks):
    """A rank beside another rank with the same rollout, so that all sums are doubled."""

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        return {name: each + each for name, each in metrics.items()}


def source(**options: Any) -> ModelSource:
    return ModelSource(key="model", path=None, architecture=ARCHITECTURE, **options)


_defaults = cache(compose_once)


def engine_config(*, max_tokens: int = MAX_TOKENS, **rollout: Any) -> RunConfig:
    """The configuration of an engine, with these keys of its group rollout."""
    defaults = _defaults()
    rollout = {"max_response_tokens": max_tokens, **rollout}
    return replace(defaults, seed=1, rewards={}, rollout=replace(defaults.rollout, **rollout))


def maker_of(config: RunConfig, parts: Mapping[str, RewardTerm] | None = None) -> TargetMaker:
    """The maker of targets of a run, with the hooks of its options."""
    return TargetMaker(config.ppo, Ranks(), parts, build_hooks(config))


def separate_engine(
    *,
    lr: float = 0.0,
    overflows: tuple[bool, bool] = (False, False),
    ptx_parts: int = 0,
    has_critic: bool = True,
    dropout: float = 0.0,
    **options: Any,
) -> Any:
    """What PPOTrainer needs of an RLHFEngine; ``options`` are those of SeparateModels."""
    actor = TrainingEngine(
        LanguageModel(build_actor(source(dropout=dropout), TOKENIZER, seed=1)),
        accumulation=PARTS + ptx_parts,
        lr=lr,
        overflows=overflows[0],
    )
    critic = TrainingEngine(
        build_scorer(source(dropout=dropout), TOKENIZER, seed=2),
        accumulation=PARTS,
        lr=lr,
        overflows=overflows[1],
    )
    reference = PlainEngine(LanguageModel(build_actor(source(), TOKENIZER, seed=3)))
    reward = PlainEngine(build_scorer(source(), TOKENIZER, seed=4))
    models = SeparateModels(
        actor,
        reference,
        critic if has_critic else None,
        ModelScores(reward),
        **{"temperature": TEMPERATURE, **options},
    )
    return SimpleNamespace(
        actor=actor,
        critic=critic,
        models=models,
        has_critic=has_critic,
        ranks=Ranks(),
        plan=BatchPlan(per_rank=ROWS, micro=MICRO, accumulation=PARTS),
        tokenizer=TOKENIZER,
        config=engine_config(),
        constant_metrics={},
        speed=UNTIMED,
    )


def some_rollout(*, seed: int = 0) -> Rollout:
    """Random prompts and responses, and random opinions of them; NaN behind a response."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = [torch.randint(2, 258, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    prompts = collate_prompts(
        ids, list("abcd"), noise(ROWS, 5), pad_id=0, device=torch.device("cpu")
    )
    keep_BT = torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]
    responses = Responses(
        torch.randint(2, 258, (ROWS, 5), generator=generator).masked_fill(~keep_BT, 0),
        keep_BT,
        torch.tensor([True, False, True, True]),
    )
    logprobs_BT = -5.5 + 0.3 * noise(ROWS, 5)
    opinions = (logprobs_BT, logprobs_BT + 0.2 * noise(ROWS, 5), noise(ROWS, 5))
    behind = (each_BT.masked_fill(~keep_BT, torch.nan) for each_BT in opinions)
    return Rollout(prompts, responses, *behind, 4 * noise(ROWS))


def targets_of(maker: TargetMaker, rollout: Rollout, *, kl_ctl: float) -> Targets:
    """The targets of a rollout, whose scores count in the moments."""
    maker.update_moments(rollout)
    return maker.make(rollout, kl_ctl=kl_ctl)


def kept(x_BT: Tensor) -> list[list[float]]:
    """The cells of response tokens, one list for each row."""
    return [row[:length].tolist() for row, length in zip(x_BT, LENGTHS, strict=True)]


def flat(x_BT: Tensor) -> Tensor:
    """The same in one row."""
    return torch.cat([row[:length] for row, length in zip(x_BT, LENGTHS, strict=True)])


def log_distributions(module: nn.Module, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N, V) and ids (N,) of all response tokens, each row alone and unpadded."""
    rows, tokens = [], []
    for row, (prompt, response) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        ids = torch.cat(
            [rollout.prompts.ids_BP[row, -prompt:], rollout.responses.ids_BT[row, :response]]
        )
        logits_SV = module.pretrained(ids[None]).logits[0] / TEMPERATURE
        rows.append(logits_SV[prompt - 1 : -1].log_softmax(-1))
        tokens.append(ids[prompt:])
    return torch.cat(rows), torch.cat(tokens)


def assert_gradient(got: dict[str, Tensor], loss: Tensor, module: nn.Module) -> None:
    """``got`` is the gradient of ``loss`` by the trained parameters of ``module``.

    Up to rounding: where terms cancel, that is a share of the largest gradient.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(loss, list(trained.values()))
    assert any(gradient.abs().max() > 1e-4 for gradient in expected), "a gradient worth the name"
    # Backwards each product is summed once more, and over the tokens of the batch.
    tokens = max(p + r for p, r in zip(PROMPT_LENGTHS, LENGTHS, strict=True))
    terms = 2 * terms_of(module, tokens) + ROWS * tokens
    assert_near([got[name] for name in trained], expected, terms=terms)
