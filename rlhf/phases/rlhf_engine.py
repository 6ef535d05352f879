"""The models of PPO, each under its own DeepSpeed configuration, and what samples from them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rlhf.algorithms.streams import seed_for, stream
from rlhf.config.checks import BatchPlan, phase_plans, ptx_plan
from rlhf.config.choices import AdvantageEstimator, Dtype, LoraRole, ModelInit, Phase
from rlhf.config.roles import Role
from rlhf.config.schema import RunConfig
from rlhf.data.collate import collate_prompts
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.data.tokens import Encoder
from rlhf.engine.build import AnyEngine, build_engine
from rlhf.engine.hybrid_config import hybrid_engine_section
from rlhf.engine.machine import current_ranks, resolve_dtype
from rlhf.engine.partitioning import partitioner
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.models.building import build_scorer, require_positions
from rlhf.models.policy import Policy
from rlhf.models.scorer import Scorer
from rlhf.models.sharded import Shard
from rlhf.models.tokenizers import load_tokenizer
from rlhf.models.trunk import build_trunk
from rlhf.phases.adapters import lora_spec
from rlhf.phases.policies import (
    build_policy,
    build_reference,
    learning_source,
    rollout_backend,
)
from rlhf.phases.policy_evaluation import AnsweringPolicy
from rlhf.phases.ppo_models import AdapterOff, PpoModels, SeparateModels, TrunkModels
from rlhf.phases.ppo_optimizers import ppo_optimizer
from rlhf.phases.ppo_speed import StepSpeed
from rlhf.phases.rollout_checks import require_rollouts
from rlhf.phases.sources import critic_source, policy_source
from rlhf.rollout.experience import JudgeScores, ModelScores, Scores
from rlhf.rollout.hybrid_engine import adapt_layers, open_to_engine
from rlhf.types import PromptBatch, Ranks, RolloutBackend

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RLHFEngine:
    """Actor, reference, critic and reward model of one run, and what samples from the actor.

    Actor and reference start from the SFT model, critic and reward model from the reward model:
    those of ``config.run_dir`` where the run makes them, else those that ``config`` names. Where a
    judge takes the place of the reward model, the critic starts from the SFT model. With
    adapters the reference is the actor without them; with a shared trunk actor, reference and
    critic are branches of one model. ``ppo.steps`` must be set: the schedules end there.

    Raises:
        ConfigError, CheckpointError: a model cannot be built from the configuration.
        CapabilityError: the rollout backend cannot run here, or not with this model.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = ranks or current_ranks(config.hardware.device)
        require_rollouts(config)
        self.settings = EngineSettings(
            zero=config.zero,
            dtype=resolve_dtype(config.hardware.dtype, config.hardware.device),
            hybrid_engine=hybrid_engine_section(config),
        )
        self.speed = StepSpeed(config, self.ranks)
        self.rollout_metrics: dict[str, float] = {}  # what each step tells, and is known now
        self.plan = phase_plans(config)[Phase.ppo]
        self._engines: list[AnyEngine] = []
        self.policy_source, self.critic_source = policy_source(config), critic_source(config)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            config.model.tokenizer or str(self.policy_source.path),
            key=self.policy_source.key,
            revision=self.policy_source.revision,
            trust_remote_code=self.policy_source.trust_remote_code,
            end_token=config.model.end_token,
        )
        self.scores = self._scores()
        self.models: PpoModels = (
            self._trunk_models() if config.ppo.shared_trunk else self._separate_models()
        )
        self.actor = self.models.actor
        self.critic = self.models.critic
        backend = partial(
            rollout_backend, config, self.tokenizer, dtype=self.settings.dtype, ranks=self.ranks
        )
        temperature, of_evaluation = config.rollout.temperature, config.rollout.eval_temperature
        self.rollout: RolloutBackend = backend(temperature=temperature)
        self._eval_rollout = backend(temperature=of_evaluation or temperature)
        self._greedy_rollout = backend(temperature=temperature, greedy=True)

    @property
    def has_critic(self) -> bool:
        """True where values are learned beside the policy."""
        return self.config.ppo.advantage_estimator is AdvantageEstimator.gae

    @property
    def policy(self) -> AnsweringPolicy:
        """The actor as evaluations see it."""
        return AnsweringPolicy(
            self.actor,
            self._eval_rollout,
            self._greedy_rollout,
            self.models.opinions,
            self.plan.micro,
        )

    def prompts(self, texts: list[str], *, step: int = 0) -> PromptBatch:
        """This rank's prompts as a batch; ``step`` picks the random numbers of their responses.

        Each comes ``ppo.responses_per_prompt`` times, one after another.
        """
        texts = [text for text in texts for _ in range(self.config.ppo.responses_per_prompt)]
        names = ("prompts", self.ranks.rank, step)
        draws_BT = torch.rand(
            len(texts),
            self.config.rollout.max_response_tokens,
            generator=stream(self.config.seed, *names),
        )
        return collate_prompts(
            Encoder(self.tokenizer, self.config.data.template).prompts(texts),
            texts,
            draws_BT,
            pad_id=self.tokenizer.pad_token_id,
            device=self.ranks.device,
        )

    def close(self) -> None:
        """Free what DeepSpeed holds."""
        for engine in self._engines:
            engine.close()

    def _separate_models(self) -> SeparateModels:
        config = self.config
        policy = build_policy(
            config,
            self.tokenizer,
            dropout=config.ppo.actor_dropout,
            shard=self._shard(Role.actor),
        )
        self._require_positions(policy.pretrained, key="model")
        actor = self._actor(policy)
        copy = build_reference(config, self.tokenizer, shard=self._shard(Role.reference))
        reference = AdapterOff(actor) if copy is None else self._engine(copy, Role.reference)
        return SeparateModels(
            actor,
            reference,
            self._trained(self._scorer(learns=True), Role.critic) if self.has_critic else None,
            self.scores,
            temperature=config.rollout.temperature,
            align_overflow=config.ppo.align_overflow and self.settings.dtype is Dtype.fp16,
            entropy_gradient=config.ppo.entropy_coef > 0,
        )

    def _actor(self, policy: Policy) -> AnyEngine:
        """The actor's engine, with DeepSpeed's layers in it where rollouts are to use them."""
        if self.settings.hybrid_engine is None:
            return self._trained(policy, Role.actor)
        open_to_engine(policy)
        actor = self._trained(policy, Role.actor)
        self.rollout_metrics["rollout/accelerated_layers"] = adapt_layers(actor.module)
        return actor

    def _trunk_models(self) -> TrunkModels:
        config = self.config
        trunk = build_trunk(
            learning_source(config, dropout=config.ppo.actor_dropout),
            self.tokenizer,
            num_layers_unfrozen=config.ppo.num_layers_unfrozen or 0,
            num_value_layers=config.ppo.num_value_layers,
            seed=seed_for(config.seed, "model"),
        )
        self._require_positions(trunk.pretrained, key="model")
        return TrunkModels(
            self._trained(trunk, Role.actor),
            self.scores,
            temperature=config.rollout.temperature,
            entropy_gradient=config.ppo.entropy_coef > 0,
        )

    def _scores(self) -> Scores:
        """What scores responses: the reward model, or the judge in its place."""
        if self.config.reward_model.init is ModelInit.gold:
            return JudgeScores(GoldJudge(), self.tokenizer)
        scorer = self._scorer()
        self._require_positions(scorer.pretrained, key="reward_model")
        return ModelScores(self._engine(scorer, Role.reward))

    def _scorer(self, *, learns: bool = False) -> Scorer:
        """The reward model, frozen as it is, or as the critic's start."""
        config, source, spec = self.config, self.critic_source, None
        if learns:
            spec = lora_spec(config.lora, LoraRole.critic)
            source = replace(
                source,
                dropout=config.ppo.critic_dropout,
                gradient_checkpointing=config.reward_model.gradient_checkpointing,
            )
        seed = seed_for(config.seed, "reward_model")
        shard = self._shard(Role.critic if learns else Role.reward)
        return build_scorer(source, self.tokenizer, seed=seed, lora=spec, shard=shard)

    def _shard(self, role: Role) -> Shard | None:
        return partitioner(role, settings=self.settings, plan=self.plan, ranks=self.ranks)

    def _require_positions(self, model: PreTrainedModel, *, key: str) -> None:
        rollout = self.config.rollout
        require_positions(
            model,
            rollout.max_prompt_tokens + rollout.max_response_tokens,
            key=key,
            wanted="rollout.max_prompt_tokens + max_response_tokens",
        )

    def _trained(self, module: torch.nn.Module, role: Role) -> AnyEngine:
        """An engine with the optimiser of its role; the actor's steps take in the corpus too."""
        config, plan = self.config, self.plan
        if role is Role.actor and config.ppo.ptx_coef:
            plan = replace(plan, accumulation=plan.accumulation + ptx_plan(config).accumulation)
        return self._engine(module, role, plan, ppo_optimizer(config, role))

    def _engine(
        self,
        module: torch.nn.Module,
        role: Role,
        plan: BatchPlan | None = None,
        optimizer: OptimizerSettings | None = None,
    ) -> AnyEngine:
        """An engine, of a frozen model without ``optimizer``, that is freed by ``close``."""
        engine = build_engine(
            module,
            role=role,
            settings=self.settings,
            plan=plan or self.plan,
            ranks=self.ranks,
            optimizer=optimizer,
        )
        self._engines.append(engine)
        return engine
