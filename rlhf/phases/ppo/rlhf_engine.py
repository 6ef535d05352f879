"""The models of PPO, each in its own engine, and the rollout backends of the policy."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf.base.errors import ConfigError
from rlhf.base.random_streams import seed_for
from rlhf.base.ranks import Ranks
from rlhf.base.types import Extras, PromptBatch, RolloutBackend, StatefulWithTensors
from rlhf.config.batches import BatchPlan, batch_plans, num_added_micro_batches, rollout_plan
from rlhf.config.choices import AdvantageEstimator, Dtype, Phase, When
from rlhf.config.roles import Role, has_reward_model
from rlhf.config.schema.run import RunConfig
from rlhf.config.schema.supervised import OptimizerConfig
from rlhf.config.typed import values_by_key
from rlhf.data.encoding import Encoder
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.engine.devices import current_ranks, resolve_dtype
from rlhf.engine.select import AnyEngine, build_engine
from rlhf.engine.settings import EngineSettings, OptimizerSettings, optimizer_settings
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.kernels.kernel_checks import choose_kernels
from rlhf.models.build import (
    build_scorer,
    complete_reward_model,
    find_model_extensions,
    require_enough_positions,
)
from rlhf.models.language_model import Scorer
from rlhf.models.pretrained import Shard
from rlhf.models.tokenizers import load_tokenizer, with_separate_padding
from rlhf.options import Backend, PpoConfig
from rlhf.phases.ppo.models import PpoModels, SeparateModels
from rlhf.phases.ppo.prompts import StepPrompts, shard_prompt_batch
from rlhf.phases.ppo.reward_mix import build_reward_mix
from rlhf.phases.ppo.step_metrics import StepSpeed
from rlhf.phases.shared.backends import RolloutBackends
from rlhf.phases.shared.exporting import Export, build_export, store_sampling_settings
from rlhf.phases.shared.policies import (
    build_policy,
    build_reference,
    critic_source,
    policy_source,
)
from rlhf.phases.shared.policy_evaluation import AnsweringPolicy
from rlhf.phases.shared.preflight import require_capabilities
from rlhf.phases.shared.scoring import JudgeScores, ModelScores, ScoreSequences, zero_scores
from rlhf.run.model_folder import save_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Seeds = list[int] | None  # seeds of the prompts' episodes; None: no environment


class RLHFEngine:
    """Actor, reference, critic and reward model of one run, and backends that sample responses.

    Actor and reference start from the SFT model. The critic starts from the reward model or,
    without a reward model, from the SFT model. If the run trains the SFT model or the reward model,
    it is read from ``config.run_dir``, otherwise from the place that ``config`` names. An option
    may replace the reference, or let models share weights. ``ppo.steps`` must be set, because the
    learning-rate schedules need it.

    Raises:
        ConfigError, CheckpointError: if a model cannot be built from the configuration.
        CapabilityError: if the rollout backend cannot run here, or does not support the model.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # loading each model would draw one
        self.config = config
        self.ranks = ranks or current_ranks(config.hardware.device)
        choose_kernels(config.hardware.kernels)
        _require_ppo_phase(config)
        require_capabilities(config)
        dtype = resolve_dtype(config.hardware.dtype, config.hardware.device)
        self.settings = EngineSettings(zero=config.zero, dtype=dtype)
        if self._is_hybrid:
            from rlhf.options.hybrid_engine.hybrid_actor import actor_deepspeed_sections

            sections = actor_deepspeed_sections(config)
            self.settings = replace(self.settings, actor_sections=sections)
        self.speed = StepSpeed(config, self.ranks)
        self.plan = batch_plans(config)[Phase.ppo]
        self._engines: list[AnyEngine] = []
        self.policy_source, self.critic_source = policy_source(config), critic_source(config)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(
            config.model.tokenizer or str(self.policy_source.path),
            key=self.policy_source.key,
            revision=self.policy_source.revision,
            trust_remote_code=self.policy_source.trust_remote_code,
            end_token=config.model.end_token,
        )
        self.scores = self._build_score_function()
        shared = {"settings": self.settings, "plan": self.plan, "ranks": self.ranks}
        self.rewards = build_reward_mix(config, self.tokenizer, shared)
        self.models = self._build_models()
        self.actor = self.models.actor
        self.critic = self.models.critic
        self.constant_metrics: dict[str, float] = {}  # logged with every step
        if self._is_hybrid:
            from rlhf.options.hybrid_engine.hybrid_rollout import adapt_deepspeed_layers

            layers = adapt_deepspeed_layers(self.actor.module)
            self.constant_metrics["rollout/accelerated_layers"] = layers
        rows = rollout_plan(config).per_rank
        self.backends = RolloutBackends(config, self.tokenizer, dtype, self.ranks, rows)
        keeps_graphs = config.rollout.keep_graphs is When.always
        build_backend = partial(self.backends.build, keeps_graphs=keeps_graphs)
        temperature = config.rollout.temperature
        self.rollout: RolloutBackend = build_backend(temperature=temperature)
        # The policy to evaluate, backends that sample its answers, and models that score them.
        self.policy = AnsweringPolicy(
            self.actor,
            build_backend(temperature=config.rollout.eval_temperature or temperature),
            build_backend(temperature=temperature, greedy=True),
            self.models,
            self.plan.micro,
        )

    @property
    def has_critic(self) -> bool:
        """Return True if a value function is trained, which only GAE requires."""
        return self.config.ppo.advantage_estimator is AdvantageEstimator.gae

    @property
    def trained_engines(self) -> dict[str, StatefulWithTensors]:
        """Return the engines that are trained, by name: actor, and critic if it is separate."""
        engines: dict[str, StatefulWithTensors] = {"actor": self.actor}
        return engines if self.critic is None else engines | {"critic": self.critic}

    def build_critic_export(self) -> Export | None:
        """Build the export that saves the critic as a model; None if the run has no critic."""
        if self.config.ppo.shared_trunk:
            from rlhf.options.trunk.shared_trunk import build_trunk_critic_export

            return build_trunk_critic_export(self.actor, self.tokenizer)
        if self.critic is None:
            return None
        return build_export(self.config, self.critic, self.critic_source)

    def prompts(
        self, texts: list[str], columns: Extras | None = None, seeds: Seeds = None, *, step: int = 0
    ) -> PromptBatch:
        """Return this rank's share of one step's prompts; ``texts`` are the prompts of all ranks.

        For each prompt, ``columns`` has the dataset columns that rewards read, and ``seeds`` the
        seed of its episode in an environment. Each prompt is repeated ``ppo.responses_per_prompt``
        times in a row. Responses are sampled with the random numbers that a run uses in its step
        ``step``.
        """
        ids = Encoder(self.tokenizer, self.config.data.template).encode_prompts(texts)
        prompts = StepPrompts(ids, texts, columns or [{}] * len(texts), seeds)
        config, ranks, pad_id = self.config, self.ranks, self.tokenizer.pad_token_id
        return shard_prompt_batch(prompts, step=step, config=config, ranks=ranks, pad_id=pad_id)

    def save(self, folder: str | Path) -> None:
        """Write the policy and the critic to actor/ and critic/ in ``folder``, as a run does.

        Every rank must call this method.
        """
        exports = {"actor": build_export(self.config, self.actor, self.policy_source)}
        if (critic := self.build_critic_export()) is not None:
            exports["critic"] = critic
        store_sampling_settings(exports["actor"].model, self.config, phase=Phase.ppo)
        for name, export in exports.items():
            answers, place = name == "actor", Path(folder) / name
            tokenizer = self.tokenizer if answers else with_separate_padding(self.tokenizer)
            if not self.ranks.is_main:
                export.write(None)
                continue
            if not answers:
                export.model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
            task = "text-generation" if answers else "text-classification"
            save_model(place, export.write, tokenizer, description="Saved by rlhf.", task=task)
        self.ranks.barrier()

    def close(self) -> None:
        """End the processes of environment and rewards, close the engines and free their memory."""
        for processes in (self.backends, self.rewards):
            if processes is not None:
                processes.close()
        for engine in self._engines:
            engine.close()

    @property
    def _is_hybrid(self) -> bool:
        return self.config.rollout.backend is Backend.hybrid_engine

    def _build_models(self) -> PpoModels:
        config = self.config
        if config.ppo.shared_trunk:
            from rlhf.options.trunk.shared_trunk import build_trunk_models

            return build_trunk_models(self)
        policy = build_policy(
            config,
            self.tokenizer,
            dropout=config.ppo.actor_dropout,
            shard=self._build_parameter_placer(Role.actor),
        )
        self.require_enough_positions(policy.pretrained, key="model")
        if self._is_hybrid:
            from rlhf.options.hybrid_engine.hybrid_actor import adapt_policy

            adapt_policy(policy)
        actor = self.build_learner(policy, Role.actor)
        reference = build_reference(
            config,
            Phase.ppo,
            actor,
            self.tokenizer,
            partial(self._build_engine, role=Role.reference),
            shard=self._build_parameter_placer(Role.reference),
        )
        return SeparateModels(
            actor,
            reference,
            self.build_learner(self._build_scorer(learns=True), Role.critic)
            if self.has_critic
            else None,
            self.scores,
            self.rewards,
            temperature=config.rollout.temperature,
            align_overflow=config.ppo.align_overflow and self.settings.dtype is Dtype.fp16,
            entropy_gradient=config.ppo.entropy_coef > 0,
        )

    def _build_score_function(self) -> ScoreSequences:
        if not has_reward_model(self.config):
            return zero_scores if self.config.rewards else JudgeScores(GoldJudge(), self.tokenizer)
        scorer = self._build_scorer()
        self.require_enough_positions(scorer.pretrained, key="reward_model")
        model = complete_reward_model(scorer, self.critic_source, values_by_key(self.config))
        return ModelScores(self._build_engine(model, Role.reward))

    def _build_scorer(self, *, learns: bool = False) -> Scorer:
        """Build the reward model, which stays frozen; with ``learns``, build the critic instead."""
        config, source, role = self.config, self.critic_source, Role.reward
        if learns:
            role = Role.critic
            source = replace(
                source,
                dropout=config.ppo.critic_dropout,
                gradient_checkpointing=config.reward_model.gradient_checkpointing,
            )
        seed = seed_for(config.seed, "reward_model")
        return build_scorer(
            source,
            self.tokenizer,
            seed=seed,
            extensions=find_model_extensions(config, role, seed=seed),
            shard=self._build_parameter_placer(role),
        )

    def _build_parameter_placer(self, role: Role) -> Shard | None:
        settings, ranks = self.settings, self.ranks
        return build_parameter_placer(role, settings=settings, plan=self.plan, ranks=ranks)

    def require_enough_positions(self, model: PreTrainedModel, *, key: str) -> None:
        """Raise ConfigError if ``model``, from config key ``key``, has too few positions."""
        name, tokens = self.config.token_limit_after_prompt
        tokens += self.config.rollout.max_prompt_tokens
        require_enough_positions(
            model, tokens, key=key, wanted=f"rollout.max_prompt_tokens + {name}"
        )

    def build_learner(self, module: torch.nn.Module, role: Role) -> AnyEngine:
        """Build an engine that trains ``module``; for the actor, options may add micro-batches."""
        config, plan = self.config, self.plan
        if role is Role.actor:
            accumulation = plan.accumulation + num_added_micro_batches(config)
            plan = replace(plan, accumulation=accumulation)
        return self._build_engine(module, role, plan, ppo_optimizer_settings(config, role))

    def _build_engine(
        self,
        module: torch.nn.Module,
        role: Role,
        plan: BatchPlan | None = None,
        optimizer: OptimizerSettings | None = None,
    ) -> AnyEngine:
        """Build an engine that ``close`` frees; without ``optimizer`` its model is frozen."""
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


def _require_ppo_phase(config: RunConfig) -> None:
    if Phase.ppo not in config.phase.order:
        raise ConfigError(
            f"phase: the run trains {', '.join(config.phase.order)} without ppo, and RLHFEngine "
            "holds the models of PPO; use a run of phase=pipeline or phase=ppo"
        )


def ppo_optimizer_settings(config: RunConfig, role: Role) -> OptimizerSettings:
    """Return AdamW settings of actor or critic, with a schedule over all its optimizer steps."""
    ppo, is_actor = config.ppo, role is Role.actor
    if ppo.steps is None:
        raise ConfigError(
            "ppo.steps=null: learning-rate schedules need the number of steps; set ppo.steps, or "
            "start the run with launch.py, which computes ppo.steps from ppo.epochs"
        )
    steps = ppo.steps - (ppo.actor_freeze_steps if is_actor else 0)
    return optimizer_settings(
        config,
        _optimizer_config(ppo, role),
        Phase.ppo,
        role,
        total_steps=steps * ppo.ppo_epochs * rollout_plan(config).mini_batches,
    )


def _optimizer_config(ppo: PpoConfig, role: Role) -> OptimizerConfig:
    """Return the optimizer options of ``role``; for the critic, critic_* keys take precedence."""
    names = [field.name for field in fields(OptimizerConfig) if field.name != "lr"]
    values = {name: getattr(ppo, name) for name in names}
    if role is Role.critic:
        critic_values = {name: getattr(ppo, f"critic_{name}", None) for name in names}
        values |= {name: value for name, value in critic_values.items() if value is not None}
    return OptimizerConfig(lr=ppo.actor_lr if role is Role.actor else ppo.critic_lr, **values)
