"""Each key of PPO, sampling and optimizers changes something, or a command that sets it is refused.

No list says which keys silence which. For each value of each key that could silence others, each
other key is changed: then targets, losses, optimizers, controllers, sampling or the sizes of
batches must change, or ``refuse_unread_keys`` must refuse the key.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from rlhf.base.errors import RlhfError
from rlhf.base.ranks import Ranks
from rlhf.base.types import Rollout
from rlhf.config.batches import batch_plans, num_phase_steps, rollout_plan
from rlhf.config.choices import Device, Dtype, KlEstimator, KlPlacement, Phase
from rlhf.config.effects import explain_if_unread
from rlhf.config.freeze import to_run_config
from rlhf.config.hydra_errors import schema_types
from rlhf.config.roles import SHARDED_WEIGHTS, Role
from rlhf.config.schema.keys import format_value
from rlhf.config.schema.ppo import PpoKeys
from rlhf.config.schema.rollout import RolloutKeys
from rlhf.config.schema.run import RunConfig
from rlhf.config.validation import validate
from rlhf.engine.settings import OptimizerSettings
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.logprob_reuse import LogprobReuse
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.models import Learner
from rlhf.phases.ppo.objective import MicroBatch, Objective
from rlhf.phases.ppo.rlhf_engine import ppo_optimizer_settings
from rlhf.phases.ppo.step_metrics import early_end_reason
from rlhf.phases.shared.scoring import ResponseLogprobs
from tests.config.test_effects import changed
from tests.conftest import Compose
from tests.needs_lab import needs_lab
from tests.phases.ppo.ppo_pieces import UNTIMED, some_rollout
from tests.plain_engine import TrainingEngine

# A run in which as many keys as possible have an effect.
BASE = """
experiment=smoke phase=pipeline ppo.rollout_batch_size=4 ppo.mini_batch_size=2
ppo.responses_per_prompt=4 ppo.steps=7 ppo.epochs=3 ppo.ppo_epochs=1 ppo.kl_ctl=0.3
ppo.kl_target=0.4 ppo.kl_horizon=20 ppo.cliprange=0.1 ppo.cliprange_high=0.15 ppo.dual_clip=1.02
ppo.cliprange_value=0.05 ppo.scale_reward=reference ppo.scale_reward_shift=true
ppo.reference_score_mean=0.5 ppo.reference_score_std=2 ppo.clip_reward_value=1.5
ppo.missing_end_score=-0.7 ppo.gamma=0.9 ppo.lam_critic=0.7 ppo.lam_length_alpha=0.4
ppo.entropy_coef=0.01 ppo.entropy_target=0.9 ppo.stop_update_kl=0.5 ppo.stop_run_kl=0.4
ppo.lr_guard_kl=1e-9 ppo.critic_min_lr_ratio=0.3 ppo.critic_warmup_steps=2 ppo.warmup_steps=3
ppo.critic_weight_decay=0.1 ppo.critic_beta1=0.8 ppo.critic_beta2=0.7 ppo.weight_decay=0.2
ppo.critic_lr_schedule=linear rollout.eval_temperature=0.5 rollout.max_rows=2 hardware.dtype=fp32
""".split()
# Other values of keys of which half the value would break a rule or not matter.
OTHER: dict[str, Any] = {
    "ppo.adam_eps": 0.1,
    "ppo.cliprange": 0.6,
    "ppo.cliprange_high": 9.0,
    "ppo.cliprange_value": 5.0,
    "ppo.entropy_target": 0.01,
    "ppo.epochs": 0.2,
    "ppo.kl_horizon": 40,
    "ppo.lr_guard_kl": 99.0,
    "ppo.micro_batch_size": 1,
    "ppo.min_lr_ratio": 0.9,
    "sft.min_lr_ratio": 0.9,
    "reward.min_lr_ratio": 0.9,
    "ppo.mini_batch_size": 4,
    "ppo.missing_end_penalty": 3.0,
    "ppo.reference_score_mean": -3.0,
    "ppo.responses_per_prompt": 2,
    "ppo.rollout_batch_size": 8,
    "ppo.stop_run_kl": 1e-9,
    "ppo.stop_update_kl": 1e-9,
    "ppo.actor_freeze_steps": 1,
    "rollout.min_p": 0.1,
    "rollout.min_response_tokens": 2,
    "rollout.stop": ["x"],
    "rollout.top_k": 3,
}
# What a value of a key that may silence others needs of further keys.
RATES = ("peak_tflops", "fp32_tflops", "memory_bandwidth_gb")
WITH: dict[str, dict[str, Any]] = {
    "ppo.kl_ctl=0.0": {"ppo.kl_target": None},
    "ppo.entropy_coef=0.0": {"ppo.entropy_target": None},
    "ppo.kl_estimator=k3_ratio": {"ppo.kl_placement": KlPlacement.loss},
    "ppo.kl_placement=loss": {"ppo.kl_estimator": KlEstimator.k3},
    "ppo.shared_trunk=true": {"ppo.num_layers_unfrozen": 1},
    "ppo.value_targets=monte_carlo": {"ppo.value_branches": 3},
    "hardware.device=cuda": {f"hardware.{name}": 1.0 for name in RATES},
}
# Further keys whose values may silence keys of the core, and numbers that switch something off.
FURTHER = "ppo.shared_trunk ppo.value_targets ppo.rollout_correction hardware.dtype".split()
FURTHER += ["hardware.device", "rollout.backend"]
OFF = "ppo.kl_ctl ppo.kl_target ppo.value_coef ppo.entropy_target ppo.missing_end_score".split()
OFF += "ppo.cliprange_high ppo.lam_critic ppo.lam_length_alpha".split()
SCORES = ("ppo.reference_score_mean", "ppo.missing_end_score")  # whose 0 switches nothing off
# Keys that other parts read: evaluations, samples, and the models that are built.
ELSEWHERE = {"ppo.eval_prompts", "ppo.eval_every", "ppo.sample_every", "ppo.actor_dropout"}
LR = 0.5


class Table(nn.Module):
    """A policy or a critic: its output is the rollout's, moved by two learned numbers per token."""

    def __init__(self) -> None:
        super().__init__()
        self.own_2T = nn.Parameter(torch.tensor([[0.5, -0.7, -0.6, 0.5, -0.5], [0.3] * 5]))

    def forward(self, before_BT: Tensor, other_BT: Tensor) -> Tensor:
        slope_BT = (other_BT - before_BT).nan_to_num()
        return before_BT + self.own_2T[0] + self.own_2T[1] * slope_BT


class Tables:
    """The models of PPO as tables: two, or with a shared trunk one that one optimizer trains."""

    def __init__(self, config: RunConfig, policy: TrainingEngine, critic: TrainingEngine) -> None:
        self.config, self.policy, self.critic = config, policy, critic

    def learner_groups(self, *, trains_actor: bool) -> list[list[Learner]]:
        if self.config.ppo.shared_trunk:
            return [[Learner(Role.actor, self.policy, self._losses)]]
        actor = [Learner(Role.actor, self.policy, self._actor_loss)] * trains_actor
        has_critic = self.config.ppo.advantage_estimator == "gae"
        return [[*[Learner(Role.critic, self.critic, self._critic_loss)] * has_critic, *actor]]

    def _actor_loss(self, batch: MicroBatch, objective: Objective) -> Any:
        logprobs_BT = self.policy(batch.logprobs_BT, batch.reference_logprobs_BT)
        return objective.actor_loss(ResponseLogprobs(logprobs_BT, -logprobs_BT), batch)

    def _critic_loss(self, batch: MicroBatch, objective: Objective) -> Any:
        return objective.critic_loss(self.critic(batch.values_BT, batch.returns_BT), batch)

    def _losses(self, batch: MicroBatch, objective: Objective) -> Any:
        values_BT = self.policy(batch.values_BT, batch.returns_BT)
        (one, found), (two, more) = (
            self._actor_loss(batch, objective),
            objective.critic_loss(values_BT, batch),
        )
        return one + two, found | more


@cache
def rollout_of_a_step() -> Rollout:
    """Return a rollout of likely tokens, which another policy has sampled."""
    found = some_rollout()
    logprobs_BT = found.logprobs_BT + 5
    return found._replace(
        responses=found.responses._replace(logprobs_BT=logprobs_BT + 0.5 * found.values_BT),
        logprobs_BT=logprobs_BT,
        reference_logprobs_BT=found.reference_logprobs_BT + 5,
    )


def train(config: RunConfig) -> list[Any]:
    """Return what a step of PPO leaves: weights, coefficients, and whether the phase ends."""
    per_step = batch_plans(config)[Phase.ppo]
    policy, critic = (
        TrainingEngine(Table(), accumulation=per_step.accumulation, lr=LR) for _ in range(2)
    )
    engine: Any = SimpleNamespace(
        actor=policy,
        models=Tables(config, policy, critic),
        has_critic=config.ppo.advantage_estimator == "gae",
        ranks=Ranks(),
        plan=per_step,
        config=config,
        constant_metrics={},
        speed=UNTIMED,
    )
    trainer = PPOTrainer(engine, config.ppo, build_hooks(config))
    stats = trainer.train_rlhf(rollout_of_a_step())
    found: list[Any] = [early_end_reason(config.ppo, stats.metrics) is not None]
    for each in (policy, critic):
        found += each.module.own_2T.flatten().tolist()
    return [*found, trainer.kl.coefficient, trainer.entropy.weight, policy.lr_scale]


def settings_of(optimizer: OptimizerSettings) -> list[float]:
    """Return the numbers of an optimizer, with its learning rate in some steps."""
    rates = [optimizer.lr * optimizer.schedule(step) for step in range(0, 60, 3)]
    numbers = (*optimizer.betas, optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm)
    return [*rates, *numbers]


def optimizers(config: RunConfig) -> list[Any]:
    """Return the settings of all optimizers, and what the critic is built with."""
    found = settings_of(ppo_optimizer_settings(config, Role.actor))
    if config.ppo.advantage_estimator == "gae" and not config.ppo.shared_trunk:
        found += settings_of(ppo_optimizer_settings(config, Role.critic))
        found += [config.ppo.critic_dropout]  # RLHFEngine builds the critic with it
        if config.hardware.dtype in (Dtype.fp16, Dtype.auto):
            found += [config.ppo.align_overflow]
    for phase in (Phase.sft, Phase.reward):
        own = getattr(config, phase)
        found += settings_of(OptimizerSettings.from_config(own, total_steps=60))
    return found


def sizes(config: RunConfig) -> list[Any]:
    """Return the sizes of batches and phases."""
    steps = [num_phase_steps(config, phase, examples=18) for phase in config.phase.order]
    return [*steps, *batch_plans(config).values(), rollout_plan(config), config.ppo.ppo_epochs]


def sampling(config: RunConfig) -> list[Any]:
    """Return what decides how responses are sampled, and whether log-probs are reused."""
    rollout, is_fast = config.rollout, config.rollout.backend == "fast"
    common = "max_prompt_tokens max_response_tokens temperature top_k top_p min_p eval_temperature"
    found = [getattr(rollout, name) for name in f"{common} min_response_tokens stop".split()]
    found += [rollout.max_rows if is_fast else None]
    if is_fast and (config.zero.auto or config.zero.stage == SHARDED_WEIGHTS):
        found += [rollout.gather_weights]
    if is_fast and config.hardware.device is Device.cuda:
        found += [rollout.cuda_graphs, rollout.keep_graphs if rollout.cuda_graphs else None]
        shares = rollout.cuda_graphs and not config.environment.is_used
        found += [rollout.mean_response_tokens if shares else None]
    reuse = LogprobReuse(rollout, config.ppo, build_hooks(config))
    responses = rollout_of_a_step().responses
    if not rollout.backend.measures_logprobs:
        responses = responses._replace(logprobs_BT=None)
    for mismatch in (None, 0.0, 0.015, 9.0):
        reuse.mismatch = mismatch
        found.append(reuse.can_reuse(responses))
    return found


Observe = Callable[[RunConfig], list[Any]]
OBSERVED: list[Observe] = [sizes, optimizers, sampling, train]
LIKELY: dict[str, Observe] = {}  # where another value of a key was seen last


def has_effect(config: RunConfig, key: str, seen: dict[Observe, list[Any]]) -> bool:
    """Return True if another value of ``key`` changes anything that is observed.

    ``seen`` keeps what was observed of ``config``.
    """
    config, other = with_steps(config), with_steps(other_config(config, key))
    for observe in sorted(OBSERVED, key=lambda each: each is not LIKELY.get(key)):
        if observe not in seen:
            seen[observe] = observe(config)
        now = observe(other)
        if len(now) != len(seen[observe]) or any(map(differ, now, seen[observe])):
            LIKELY[key] = observe
            return True
    return False


def with_steps(config: RunConfig) -> RunConfig:
    """Return ``config`` with the number of PPO's steps, as ``count_ppo_steps`` sets it."""
    return changed(config, "ppo.steps", num_phase_steps(config, Phase.ppo, examples=18))


def differ(one: Any, two: Any) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return not math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-8)
    return bool(one != two)


def own_keys() -> list[str]:
    """Return the core's keys of PPO and sampling, and those of the other optimizers."""
    keys = [f"ppo.{field.name}" for field in fields(PpoKeys)]
    keys += [f"rollout.{field.name}" for field in fields(RolloutKeys)]
    optimizer = ("lr_schedule", "min_lr_ratio", "warmup_steps", "weight_decay")
    return keys + [f"{phase}.{name}" for phase in ("sft", "reward") for name in optimizer]


def values_of(key: str, now: Any) -> Iterator[Any]:
    """Yield other values of a key: all of an enum, and numbers that switch something off or on."""
    kind = schema_types()[key]
    kinds = get_args(kind) or (kind,)
    for each in kinds:
        if isinstance(each, type) and issubclass(each, Enum):
            yield from (value for value in each if value is not now)
    if isinstance(now, bool):
        yield not now
    elif isinstance(now, float) and key not in SCORES:
        yield 0.0
    if type(None) in kinds and now is not None:
        yield None


def other_config(config: RunConfig, key: str) -> RunConfig:
    """Return ``config`` with another value of ``key``, by which something should change."""
    now = value_at(config, key)
    if key == "ppo.whiten_advantages":
        other: Any = not config.ppo.whitens_advantages
    elif key in OTHER or now is None:
        other = OTHER.get(key, 0.37)
    elif isinstance(now, bool):
        other = not now
    elif isinstance(now, Enum):
        members = list(type(now))
        other = members[(members.index(now) + 1) % len(members)]
    else:
        other = now * 2 if isinstance(now, int) else now / 2 or 0.37
    return changed(config, key, other)


def value_at(config: RunConfig, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def is_allowed(config: RunConfig) -> bool:
    try:
        validate(config)
    except RlhfError:
        return False
    return True


def settings_with(base: RunConfig, switches: list[str]) -> dict[str, RunConfig]:
    """Return ``base``, and with each other value of each switch; rules refuse some of them."""
    found = {"": base}
    for key in switches:
        for value in values_of(key, value_at(base, key)):
            word = f"{key}={format_value(value)}"
            config = changed(base, key, value)
            for other, needed in WITH.get(word, {}).items():
                config = changed(config, other, needed)
            if is_allowed(config):
                found[word] = config
    return found


def silent_keys(settings: dict[str, RunConfig]) -> list[str]:
    """Return the keys that are accepted and change nothing, each beside a setting."""
    found = []
    for word, config in settings.items():
        seen: dict[Observe, list[Any]] = {}
        for key in own_keys():
            if key in ELSEWHERE or word.startswith(f"{key}=") or explain_if_unread(config, key):
                continue
            if not has_effect(config, key, seen) and is_allowed(other_config(config, key)):
                found.append(f"{word} {key}")
    return found


@needs_lab
@pytest.mark.slow
def test_no_key_is_accepted_and_without_effect(compose: Compose) -> None:
    base = to_run_config(compose(BASE))
    choices = [
        key
        for key in own_keys()
        if isinstance(value_at(base, key), Enum | bool)
        and key.startswith("ppo.")
        and not key.endswith("schedule")  # which bad_commands.txt has
    ]
    settings = settings_with(base, [*choices, *OFF, *FURTHER])
    assert len(settings) > 30
    # No whole response of this rollout has a ratio beyond GSPO's upper limit.
    assert silent_keys(settings) == ["ppo.surrogate=gspo ppo.cliprange_high"]
