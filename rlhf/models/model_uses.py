"""List the models that each phase of a run holds, and count their trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rlhf.config.choices import ModelInit, Phase
from rlhf.config.roles import Role, has_reward_model, reward_model_base
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.methods import Part, methods_in_use, parts_of
from rlhf.models.shapes import ModelShape, UnknownModelError, shape_of
from rlhf.models.sources import config_fields
from rlhf.options import Backend
from rlhf.options.average.costs import with_average
from rlhf.options.hybrid_engine.costs import with_hybrid_engine
from rlhf.options.lora.costs import with_adapters
from rlhf.options.scorers.costs import list_scorers, with_scorers
from rlhf.options.trunk.costs import with_shared_trunk


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """One model that a phase holds in memory; sizes are numbers of weights, not bytes."""

    role: Role
    shape: ModelShape
    is_scorer: bool
    trained: int
    """Trained weights, adapters included."""
    extra_weights: int
    """Weights in addition to ``shape``: those that an option adds."""
    layers: int
    """Number of layers that the backward pass goes through."""
    checkpointed: int
    """Number of layers that the backward pass recomputes (gradient checkpointing)."""
    fp32_copies: tuple[str, ...] = ()
    """Names of copies of the trained weights; the key zero.offload_NAME moves one to the host."""
    successive_weights: int = 0
    """Weights of further scorers, which score every text in turn and are trained in turn."""
    is_own_reference: bool = False
    """True if the model without its trained weights, such as adapters, is also the reference."""
    is_stored: bool = False
    """True if checkpoints store the weights of the frozen model."""
    scores_at_once: bool = False
    """True if one pass scores a rollout for policy, reference and critic."""
    needs_deepspeed: str | None = None
    """Setting, as key=value, for which only DeepSpeed can run the model."""

    @cached_property
    def weights(self) -> int:
        """Return the number of all weights."""
        base = self.shape.scorer_weights if self.is_scorer else self.shape.weights
        return base + self.extra_weights + self.successive_weights


def forward_flops(model: ModelUse, *, sequences: float, tokens: float, positions: float) -> float:
    """Return the FLOPs of a forward pass over ``sequences``, each of ``tokens`` tokens.

    Logits, or a scorer's values, are computed at ``positions`` tokens of each sequence.
    """
    shape = model.shape
    # A training step runs only one scorer, and all scorers cost about the same.
    further = 0 if model.trained else model.successive_weights
    products = 2 * (shape.linear_layer_weights + model.extra_weights + further) * tokens
    # 4 FLOPs per element of a head and pair of tokens; causal attention has half of all pairs.
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens * tokens
    width = 1 if model.is_scorer else shape.vocab
    return sequences * (products + attention + 2 * width * shape.embedding * positions)


def backward_to_forward_ratio(model: ModelUse) -> float:
    """Return the ratio of backward FLOPs (including recomputation) to forward FLOPs.

    Input gradients cost as many FLOPs as the forward pass. Weight gradients cost this number
    times the trained share of the weights.
    """
    learning = min(1.0, model.trained / model.weights)
    return (model.layers + model.checkpointed) / model.shape.layers + learning


def models_in_phase(config: RunConfig, phase: Phase) -> tuple[ModelUse, ...]:
    """Return the models of ``phase``, trained models first.

    Raises:
        UnknownModelError: if the shape of a model is not known.
    """
    sources = _model_sources(config, phase)
    added = costs_of_methods(config)
    models: list[ModelUse] = []
    for role, source in sources.items():
        if role is Role.reference and models[0].is_own_reference and source == sources[Role.actor]:
            continue
        model = _build_model_use(config, source, role)
        if config.ppo.ema_beta > 0:
            model = with_average(config, model)
        if config.ppo.shared_trunk:
            model = with_shared_trunk(config, phase, model)
        if config.lora.rank:
            model = with_adapters(config, model)
        if config.rollout.backend is Backend.hybrid_engine:
            model = with_hybrid_engine(phase, model)
        for costs in added:
            model = costs.adapt_model(config, phase, model)
        if role is Role.reward and list_scorers(config):
            model = with_scorers(model, config, is_used=has_reward_model(config))
        models.append(model)
    return tuple(models)


class Costs(Part):
    """Base class of what a method adds to a plan (by default nothing), without importing torch."""

    def adapt_model(self, config: RunConfig, phase: Phase, model: ModelUse) -> ModelUse:  # noqa: ARG002
        """Return ``model`` as the method changes it in ``phase``: its trained weights or copies."""
        return model

    def added_step_seconds(
        self,
        config: RunConfig,  # noqa: ARG002
        phase: Phase,  # noqa: ARG002
        tokens: float,  # noqa: ARG002
        seconds: Mapping[str, float],  # noqa: ARG002
    ) -> dict[str, float]:
        """Return the seconds per step of ``phase`` of the method's activities, by name.

        ``tokens`` is the expected length of a response; ``seconds`` has those of the core.
        """
        return {}


def costs_of_methods(config: RunConfig) -> list[Costs]:
    """Return the costs of the methods that ``config`` switches on."""
    return parts_of(Costs, (method.costs() for method in methods_in_use(config)))


def _model_sources(config: RunConfig, phase: Phase) -> dict[Role, tuple[str, ModelConfig]]:
    """Return the config key and value of each model of ``phase``, trained models first."""
    policy, scorer = ("model", config.model), reward_model_base(config)
    match phase:
        case Phase.sft:
            return {Role.sft: policy}
        case Phase.reward:
            return {Role.reward_training: scorer}
        case Phase.dpo:
            return {Role.actor: policy, Role.reference: policy}
        case Phase.ppo:
            scores = has_reward_model(config) or list_scorers(config)
            reward = {Role.reward: scorer} if scores else {}
            if config.ppo.shared_trunk:  # the actor's layers are also the critic's, the reference's
                return {Role.actor: policy, **reward}
            critic = {Role.critic: scorer} if config.ppo.has_separate_critic else {}
            replacements = (method.reference(config, phase) for method in methods_in_use(config))
            reference = next((source for source in replacements if source is not None), policy)
            return {Role.actor: policy, **critic, Role.reference: reference, **reward}


def _build_model_use(config: RunConfig, source: tuple[str, ModelConfig], role: Role) -> ModelUse:
    key, model = source
    shape = shape_of(model, key=key)
    if shape is None:
        raise UnknownModelError(_unknown_shape_message(key, model))
    is_scorer = role in (Role.reward_training, Role.critic, Role.reward)
    weights = shape.scorer_weights if is_scorer else shape.weights
    group = config.reward_model if is_scorer else config.model
    checkpointing = group.gradient_checkpointing
    recomputed = shape.layers if checkpointing is True else min(int(checkpointing), shape.layers)
    return ModelUse(
        role=role,
        shape=shape,
        is_scorer=is_scorer,
        trained=0 if role.is_frozen else weights,
        extra_weights=0,
        layers=0 if role.is_frozen else shape.layers,
        checkpointed=0 if role.is_frozen else recomputed,
    )


def _unknown_shape_message(key: str, model: ModelConfig) -> str:
    is_random = model.init is ModelInit.random
    origin = f"{key}.architecture" if is_random else f"{key}.path={model.path}"
    if model_type := config_fields(model, key=key).get("model_type"):
        return f"the planner does not know model_type={model_type} of {origin}"
    return f"{origin} has no readable config.json here and {key}.architecture has no model_type"
