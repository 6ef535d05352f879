"""Check the configs of a run's models for errors that otherwise only a later phase would raise.

Nothing is downloaded. transformers is imported only if a model's classes must be inspected.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import CapabilityError, ConfigError
from rlhf.config.choices import ModelInit, Phase
from rlhf.config.roles import (
    given_reward_model,
    has_reward_model,
    reward_model_base,
    tokenizer_base,
)
from rlhf.config.schema.model import ModelConfig, check_sequence_lengths
from rlhf.config.schema.run import RunConfig
from rlhf.methods import methods_in_use
from rlhf.models.families import FAMILIES
from rlhf.models.sources import ModelSource, config_fields
from rlhf.models.tokenizers import check_same_tokens, read_tokens
from rlhf.options import Backend
from rlhf.options.fused_layers.keys import FusedLayers
from rlhf.options.scorers.costs import list_scorers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

POSITION_FIELD = "max_position_embeddings"  # the config field with the number of positions
POSITION_FIELDS = {POSITION_FIELD, "n_positions"}
UNCHECKED_TOKENS = 4096  # allowed unchecked for a known family without a sliding_window


def require_fast_decoding(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise CapabilityError if rollout=fast cannot decode the longest prompt and response."""
    tokens, fields = config.rollout.max_prompt_tokens, config_fields(config.model)
    tokens += config.token_limit_after_prompt[1]
    is_known = fields.get("model_type") in FAMILIES or not fields
    has_rollouts = Phase.ppo in phases or Phase.dpo in phases
    if config.rollout.backend is not Backend.fast or not has_rollouts:
        return
    if is_known and (fields.get("sliding_window") or UNCHECKED_TOKENS) >= tokens:
        return
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from rlhf.rollout.decoders.via_cache import decoding_unsupported_reason

    built = find_model_config("model", config.model)
    model = None if built is None else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(built), None)
    # Encoder-decoder models are not checked: only building one shows if its decoder works alone.
    if built is None or model is None or built.is_encoder_decoder:
        return
    if (obstacle := decoding_unsupported_reason(model, built, tokens=tokens)) is not None:
        raise CapabilityError(
            f"rollout.backend=fast: a model of model_type={built.model_type} {obstacle}; "
            "use rollout=hf"
        )


def require_positions(config: RunConfig, _: Container[Phase]) -> None:
    """Raise ConfigError if a sequence is longer than a model's config allows."""

    def fields_with_position_limit(key: str, model: ModelConfig) -> Mapping[str, Any]:
        fields = config_fields(model, key=key)
        is_complete = not fields or POSITION_FIELDS & set(fields)
        if is_complete or (built := find_model_config(key, model)) is None:
            return fields
        limit = getattr(built, POSITION_FIELD, None)  # the family's default
        return {} if limit is None else {POSITION_FIELD: limit}

    check_sequence_lengths(config, fields_with_position_limit)


def require_scorer(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if the reward model or critic cannot be built, or has no trained head."""
    ppo, (key, model) = config.ppo, reward_model_base(config)
    scores = Phase.ppo in phases and (ppo.has_separate_critic or has_reward_model(config))
    if scores and Phase.reward not in config.phase.order and key == "reward_model":
        source = ModelSource.from_config(model, key=key)
        if model.init is ModelInit.pretrained and Path(str(source.path)).is_dir():
            from rlhf.models.pretrained import require_one_label_model

            require_one_label_model(source)
    model_type = config_fields(model, key=key).get("model_type")
    is_known = model_type is None or model_type in FAMILIES or model.trust_remote_code
    if is_known or not (scores or Phase.reward in phases):
        return
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    built = find_model_config(key, model)
    if built is not None and type(built) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        critic = " with ppo.advantage_estimator=reinforce_pp, which has no critic"
        raise CapabilityError(
            f"{key}: transformers has no reward model for model_type={model_type}: use "
            "model@reward_model=... (another family, with the same tokenizer), or "
            f"phase=pipeline_rule{critic if ppo.has_separate_critic else ''} (docs/rewards.md)"
        )


def require_text_scorers(config: RunConfig, phases: Container[Phase]) -> None:
    """Raise an error if a part of ``rewards`` with kind=scorer names a folder it cannot use."""
    if Phase.ppo in phases and list_scorers(config):
        from rlhf.options.scorers.text_scorer import read_scorer_forms

        read_scorer_forms(config, downloads=False)


def require_same_tokens(config: RunConfig, _: Container[Phase]) -> None:
    """Raise ConfigError if a pretrained reward model cannot read each token of the actor."""
    if (model := given_reward_model(config)) is None:
        return
    key, owner = tokenizer_base(config)
    if config.from_run is not None:
        owner = replace(owner, tokenizer=f"{config.from_run}/tokenizer", end_token=None)
    ours, theirs = read_tokens(owner, key=key), read_tokens(model, key="reward_model")
    if ours is not None and theirs is not None:
        check_same_tokens(ours, theirs, place=str(model.path))
    size = config_fields(model, key="reward_model").get("vocab_size")
    if ours is not None and isinstance(size, int) and ours.last_id >= size:
        raise ConfigError(
            f"reward_model.path={model.path}: the model has {size} embeddings, and the actor can "
            f"write the token id {ours.last_id}; use a reward model with the actor's tokens"
        )


def require_named_layers(config: RunConfig, phases: Collection[Phase]) -> None:
    """Raise an error if keys name layers, or a number of layers, that a model lacks."""
    if config.ppo.shared_trunk:
        from rlhf.options.trunk.rules import check_trunk_layers

        check_trunk_layers(config, phases)
    if config.fused_layers is FusedLayers.liger:
        from rlhf.options.fused_layers.rules import check_liger_layers

        check_liger_layers(config, phases)
    if config.lora.rank:
        from rlhf.options.lora.rules import check_adapted_layers

        check_adapted_layers(config, phases)
    for method in methods_in_use(config):
        method.check_models(config, phases)


def build_weightless_model(auto_class: str, key: str, model: ModelConfig) -> PreTrainedModel | None:
    """Build the model on the meta device; return None if its config cannot be built."""
    import torch
    import transformers

    if (config := find_model_config(key, model)) is None:
        return None
    with torch.device("meta"):
        built: PreTrainedModel = getattr(transformers, auto_class).from_config(config)
        return built


def find_model_config(key: str, model: ModelConfig) -> PreTrainedConfig | None:
    """Return the model's config; None if transformers cannot build it from the known fields."""
    from rlhf.models.build import architecture_config

    try:
        return architecture_config(key, config_fields(model, key=key) | {"num_labels": 1})
    except ConfigError:
        return None


# Both plan=only and the start of a run, before its first phase, make these checks.
MODEL_CHECKS = (
    require_positions,
    require_scorer,
    require_same_tokens,
    require_text_scorers,
    require_fast_decoding,
    require_named_layers,
)
