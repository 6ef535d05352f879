"""What tests of the planner share: configurations, models in a role, a machine of round numbers."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from rlhf.config.choices import Dtype
from rlhf.config.freeze import to_run_config
from rlhf.config.machine_rates import Machine
from rlhf.config.roles import Role
from rlhf.config.schema.run import RunConfig
from rlhf.models.model_uses import ModelUse
from rlhf.models.shapes import FAMILIES, ModelShape
from rlhf.plan.plan import Plan, plan_run
from tests.architectures import sizes
from tests.conftest import Compose

# 2 layers of 12 h^2 = 768 matrix weights; h = 8.
TINY_MODEL = sizes("opt", 8, 32, vocab_size=100, max_position_embeddings=30)


_runs: dict[tuple[str, ...], RunConfig] = {}
_plans: dict[tuple[str, ...], Plan] = {}


def run_of(compose: Compose, *overrides: str) -> RunConfig:
    """The configuration of a command line, which is composed once."""
    if overrides not in _runs:
        _runs[overrides] = to_run_config(compose(list(overrides)))
    return deepcopy(_runs[overrides])


def plan_of(compose: Compose, *overrides: str) -> Plan:
    """The plan of a command line, without its data; tests share it, with its advice."""
    if overrides not in _plans:
        _plans[overrides] = plan_run(run_of(compose, *overrides))
    return _plans[overrides]


def changed(config: RunConfig, **groups: dict[str, Any]) -> RunConfig:
    """``config`` with some fields of its groups changed; composing it anew would take a second."""
    parts = {name: replace(getattr(config, name), **fields) for name, fields in groups.items()}
    return replace(config, **parts)


def shape(**fields: Any) -> ModelShape:
    """A tiny OPT with some fields changed."""
    return FAMILIES["opt"](TINY_MODEL | fields)


def use(role: Role = Role.actor, **changes: Any) -> ModelUse:
    """A tiny model of which all learns, or nothing where the role is a frozen one."""
    of = changes.pop("shape", shape())
    is_scorer = role in (Role.critic, Role.reward, Role.reward_training)
    weights = of.scorer_weights if is_scorer else of.weights
    fields = {
        "role": role,
        "shape": of,
        "is_scorer": is_scorer,
        "trained": 0 if role.is_frozen else weights,
        "extra_weights": 0,
        "layers": 0 if role.is_frozen else of.layers,
        "checkpointed": 0,
    }
    return ModelUse(**fields | changes)


def machine(**changes: Any) -> Machine:
    """Four GPUs in two nodes whose figures are round."""
    fields = {
        "ranks": 4,
        "nodes": 2,
        "is_gpu": True,
        "dtype": Dtype.bf16,
        "fp32_logits": False,
        "memory": 80 * 2**30,
        "host_memory_of_node": 1000 * 2**30,
        "operations": 1e6,
        "bandwidth": 1e6,
        "link": 1e5,
        "network_of_node": 1e4,
        "host_link": 1e4,
        "nvme_of_node": 1e3,
        "price_per_hour": 10.0,
    }
    return Machine(**fields | changes)


def named(uses: Iterable[ModelUse]) -> dict[str, ModelUse]:
    """Models by their role."""
    return {model.role.value: model for model in uses}
