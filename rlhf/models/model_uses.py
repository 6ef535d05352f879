"""List the models that each phase of a run holds, and count their trained weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rlhf.config.choices import AdvantageEstimator, ModelInit, Phase
from rlhf.config.roles import Role, has_reward_model, reward_model_base
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.run import RunConfig
from rlhf.models.shapes import ModelShape, shape_of
from rlhf.models.sources import config_fields
from rlhf.options import RewardConfig
from rlhf.options.ensembles.keys import CombineName
from rlhf.options.lora.keys import LoraRole


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """One model that a phase holds in memory; sizes are numbers of weights, not bytes."""

    role: Role
    shape: ModelShape
    is_scorer: bool
    trained: int
    """Trained weights, adapters included."""
    extra_weights: int
    """Weights in addition to ``shape``: adapters, or the copies in a shared trunk's branches."""
    layers: int
    """Number of layers that the backward pass goes through."""
    checkpointed: int
    """Number of layers that the backward pass recomputes (gradient checkpointing)."""
    has_ema: bool = False
    member_weights: int = 0
    """Weights of the members of an ensemble after the first."""

    @cached_property
    def weights(self) -> int:
        """Return the number of all weights, extra weights and members included."""
        first = self.shape.scorer_weights if self.is_scorer else self.shape.weights
        return first + self.extra_weights + self.member_weights


def forward_flops(model: ModelUse, *, sequences: float, tokens: float, positions: float) -> float:
    """Return the FLOPs of a forward pass over ``sequences``, each of ``tokens`` tokens.

    Logits, or a scorer's values, are computed at ``positions`` tokens of each sequence.
    """
    shape = model.shape
    # In training the members learn after the first, and cost about as much per step.
    members = 0 if model.trained else model.member_weights
    products = 2 * (shape.multiplied_weights + model.extra_weights + members) * tokens
    # 4 FLOPs per pair of tokens, for half of all pairs, since attention is causal.
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens * tokens
    width = 1 if model.is_scorer else shape.vocab
    return sequences * (products + attention + 2 * width * shape.embedding * positions)


def backward_to_forward_ratio(model: ModelUse) -> float:
    """Return the ratio of backward FLOPs (including recomputation) to forward FLOPs.

    Input gradients cost as many FLOPs as the forward pass. Weight gradients cost the same times the
    share of the weights that is trained.
    """
    learning = min(1.0, model.trained / model.weights)
    return (model.layers + model.checkpointed) / model.shape.layers + learning


class UnknownModelError(Exception):
    """A model has an unknown shape; the message names its configuration key."""


def models_in_phase(config: RunConfig, phase: Phase) -> tuple[ModelUse, ...]:
    """Return the models of ``phase``, trained models first.

    Raises:
        UnknownModelError: if the shape of a model is not known.
    """
    policy, scorer = ("model", config.model), reward_model_base(config)
    match phase:
        case Phase.sft:
            return (_model_use(config, policy, Role.sft, LoraRole.sft),)
        case Phase.reward:
            use = _model_use(config, scorer, Role.reward_training, LoraRole.reward)
            return (_add_members(use, config.reward),)
        case Phase.dpo:
            actor = _model_use(config, policy, Role.actor, LoraRole.actor)
            return (actor, *_frozen_reference(config, actor))
        case Phase.ppo if config.ppo.shared_trunk:
            return (_trunk_use(config, policy), *_frozen_reward_model(config, scorer))
        case Phase.ppo:
            actor = _model_use(config, policy, Role.actor, LoraRole.actor)
            critic = _model_use(config, scorer, Role.critic, LoraRole.critic)
            has_critic = config.ppo.advantage_estimator is AdvantageEstimator.gae
            learning = (actor, critic) if has_critic else (actor,)
            return (
                *learning,
                *_frozen_reference(config, actor, teacher=config.ppo.teacher_path),
                *_frozen_reward_model(config, scorer),
            )


def _model_use(
    config: RunConfig, model: tuple[str, ModelConfig], role: Role, lora_role: LoraRole | None
) -> ModelUse:
    key, source = model
    shape = shape_of(source, key=key)
    if shape is None:
        raise UnknownModelError(_unknown_shape_message(key, source))
    is_scorer = role in (Role.reward_training, Role.critic, Role.reward)
    weights = shape.scorer_weights if is_scorer else shape.weights
    lora = config.lora
    has_adapters = bool(lora.rank) and lora_role in lora.roles
    rank = lora.critic_rank if lora_role is LoraRole.critic and lora.critic_rank else lora.rank
    adapters = shape.adapter_weights(rank) if has_adapters else 0
    trained = 0 if role.is_frozen else weights
    if has_adapters:
        rest = weights - shape.multiplied_weights if lora.train_rest else 0
        head = shape.embedding if is_scorer and not lora.train_rest else 0
        trained = adapters + rest + head
    own = config.reward_model if is_scorer else config.model
    checkpointing = own.gradient_checkpointing
    has_ema = bool(config.ppo.ema_beta) and Phase.ppo in config.phase.order
    layers = shape.layers if checkpointing is True else min(int(checkpointing), shape.layers)
    return ModelUse(
        role=role,
        shape=shape,
        is_scorer=is_scorer,
        trained=trained,
        extra_weights=adapters,
        layers=0 if role.is_frozen else shape.layers,
        checkpointed=0 if role.is_frozen else layers,
        has_ema=role is Role.actor and has_ema,
    )


def _unknown_shape_message(key: str, model: ModelConfig) -> str:
    is_random = model.init is ModelInit.random
    origin = f"{key}.architecture" if is_random else f"{key}.path={model.path}"
    if kind := config_fields(model, key=key).get("model_type"):
        return f"the planner does not know model_type={kind} of {origin}"
    return f"{origin} has no readable config.json here and {key}.architecture has no model_type"


def _frozen_reference(
    config: RunConfig, actor: ModelUse, *, teacher: str | None = None
) -> tuple[ModelUse, ...]:
    """Return the frozen reference, or () if the actor without its adapters is the reference.

    A ``teacher``, the folder or hub id of another model, takes its place.
    """
    key, model = "model", config.model
    if teacher is not None:
        key, model = "ppo.teacher", replace(model, init=ModelInit.pretrained, path=teacher)
    elif actor.extra_weights and not config.lora.train_rest:
        return ()
    return (_model_use(config, (key, model), Role.reference, None),)


def _frozen_reward_model(
    config: RunConfig, scorer: tuple[str, ModelConfig]
) -> tuple[ModelUse, ...]:
    """Return the frozen reward model, or () if the run has none."""
    if not has_reward_model(config):
        return ()
    use = _model_use(config, scorer, Role.reward, None)
    return (use if config.reward.combine is CombineName.warm else _add_members(use, config.reward),)


def _add_members(use: ModelUse, config: RewardConfig) -> ModelUse:
    """Return the model with the weights of its further members: top layers, norm and head."""
    shape = use.shape
    layers = min(config.num_own_layers(shape.layers), shape.layers)
    own = layers * shape.layer_weights + shape.tail + shape.embedding
    further = (config.members - 1) * own
    trained = 0 if use.role.is_frozen else use.trained + further
    return replace(use, trained=trained, member_weights=further)


def _trunk_use(config: RunConfig, policy: tuple[str, ModelConfig]) -> ModelUse:
    """Return the shared trunk as one model; its branches are counted as extra weights."""
    ppo = config.ppo
    use = _model_use(config, policy, Role.actor, None)
    shape = use.shape
    unfrozen = min(ppo.num_layers_unfrozen or 0, shape.layers)
    top = unfrozen * shape.layer_weights + shape.tail + shape.head
    branch = ppo.num_value_layers * shape.layer_weights + shape.tail if ppo.num_value_layers else 0
    learning = top + branch + shape.embedding
    return replace(
        use,
        trained=learning,
        extra_weights=learning,  # the reference's copy of the top, the critic's layers and head
        layers=unfrozen + ppo.num_value_layers,
        checkpointed=max(0, use.checkpointed - (shape.layers - unfrozen)),
    )
