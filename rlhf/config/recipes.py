"""The page of experiments and presets, made from ``conf/``.

``python -m rlhf.config.recipes`` renews ``docs/recipes.md``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from rlhf.config.names import REWARD_MODEL_GROUP
from rlhf.config.pages import write_below

TABLE_MARK = "<!-- Made by `python -m rlhf.config.recipes` from here to the end. -->\n"

# How the names of a family begin; what begins otherwise is small.
FAMILIES = {
    "DeepSpeed-Chat": "dsc_",
    "Tables of DeepSpeed-Chat's announcement": "table",
    "Small experiments on the generated task": "",
}
PRESETS = {
    "ppo": (
        "steps",
        "epochs",
        "rollout_batch_size",
        "mini_batch_size",
        "ppo_epochs",
        "kl_ctl",
        "kl_target",
        "cliprange",
        "cliprange_value",
        "gamma",
        "lam",
        "actor_lr",
        "critic_lr",
        "lr_schedule",
    ),
    **dict.fromkeys(
        ("sft", "reward", "dpo"),
        ("epochs", "batch_size", "max_tokens", "lr", "lr_schedule", "warmup_steps", "weight_decay"),
    ),
}


def recipes_page(conf: Path) -> str:
    """All experiments of ``conf``, a table per family, and the presets of its groups."""
    experiments = sorted((conf / "experiment").glob("*.yaml"))
    sections = []
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for title, prefix in FAMILIES.items():
            paths = [path for path in experiments if _family(path.stem) == prefix]
            sections.append(_section(title, [_experiment(path) for path in paths]))
        for group, keys in PRESETS.items():
            options = sorted((conf / group).glob("*.yaml"))
            rows = [_preset(path, keys) for path in options if path.stem != "default"]
            sections.append(_section(f"Presets of the group {group}", rows))
    return "\n".join(sections)


def _family(name: str) -> str:
    return next(prefix for prefix in FAMILIES.values() if name.startswith(prefix))


def _section(title: str, rows: list[dict[str, str]]) -> str:
    lines = [tuple(rows[0]), ("---",) * len(rows[0]), *(tuple(row.values()) for row in rows)]
    return f"## {title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _experiment(path: Path) -> dict[str, str]:
    """Cells of an experiment: what it chooses, and how large and fast it learns."""
    override = f"experiment={path.stem}"
    _, what = path.read_text(encoding="utf-8").splitlines()[1].split(": ", maxsplit=1)
    config = compose("config", [override], return_hydra_config=True)
    choices, order = config.hydra.runtime.choices, config.phase.order
    judged = {"reward", "ppo"} & set(order)
    return {
        "name": f"`{path.stem}`",
        "what": _cell(what),
        "model": choices["model"],
        "reward model": choices[REWARD_MODEL_GROUP] if judged else "none",
        "hardware": choices["hardware"],
        "ZeRO": choices["zero"],
        "LoRA": choices["lora"],
        "data": choices["data"],
        "sequences (pairs) of a step": _batch_sizes(config),
        "peak learning rates": _learning_rates(config),
        "command": f"`python launch.py {override}`",
    }


def _batch_sizes(config: DictConfig) -> str:
    """Global batch size of each phase that runs; of PPO rollout and mini-batch."""
    order = config.phase.order
    sizes = {phase: str(config[phase].batch_size) for phase in order if phase != "ppo"}
    if "ppo" in order:
        sizes["ppo"] = f"{config.ppo.rollout_batch_size} / {config.ppo.mini_batch_size}"
    return ", ".join(f"{phase} {size}" for phase, size in sizes.items())


def _learning_rates(config: DictConfig) -> str:
    """Learning rate of each phase that runs; of PPO the actor's, and the critic's if it has one."""
    order, ppo = config.phase.order, config.ppo
    rates = {phase: config[phase].lr for phase in order if phase != "ppo"}
    if "ppo" in order:
        rates["actor"] = ppo.actor_lr
    if "ppo" in order and ppo.advantage_estimator == "gae":
        rates["critic"] = ppo.critic_lr
    return ", ".join(f"{name} {_shown(rate)}" for name, rate in rates.items())


def _preset(path: Path, keys: tuple[str, ...]) -> dict[str, str]:
    """Cells of an option of ppo, sft, reward or dpo."""
    group, name = path.parent.name, path.stem
    what = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    values = compose("config", [f"{group}={name}"])[group]
    return {
        "option": f"`{group}={name}`",
        "what": _cell(what),
        **{key: _shown(values[key]) for key in keys},
    }


def _shown(value: Any) -> str:
    """``value`` as it is typed on the command line."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    linked = re.sub(r"https?://[^\s,;)]+", r"[source](\g<0>)", text)
    return linked.replace("|", "\\|")


def renew_page(path: Path, conf: Path) -> None:
    """Write the tables into ``path``, below its mark; what stands above is kept."""
    write_below(path, TABLE_MARK, recipes_page(conf))


if __name__ == "__main__":
    renew_page(Path("docs/recipes.md"), Path("conf"))
