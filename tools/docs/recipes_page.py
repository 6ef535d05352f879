"""Generate the tables of docs/recipes.md: experiments and presets in ``conf/``.

Run it with ``python -m tools.docs.recipes_page``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from rlhf.config.hydra_errors import REWARD_MODEL_GROUP
from tools.docs.pages import read_header, write_below

TABLE_MARK = "<!-- Made by `python -m tools.docs.recipes_page` from here to the end. -->\n"

# Folders of conf/experiment, and the titles of their tables.
FAMILIES = {
    "DeepSpeed-Chat": "dsc",
    "Tables of DeepSpeed-Chat's announcement": "tables",
    "Small experiments": "",
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
    """Return tables of all experiments in ``conf``, by family, and of the presets of its groups."""
    sections = []
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        for title, folder in FAMILIES.items():
            paths = sorted((conf / "experiment" / folder).glob("*.yaml"))
            rows = [
                _experiment(path, "/".join(filter(None, (folder, path.stem)))) for path in paths
            ]
            sections.append(_section(title, rows))
        for group, keys in PRESETS.items():
            options = sorted((conf / group).glob("*.yaml"))
            rows = [_preset(path, keys) for path in options if path.stem != "default"]
            sections.append(_section(f"Presets of the group {group}", rows))
    return "\n".join(sections)


def _section(title: str, rows: list[dict[str, str]]) -> str:
    lines = [tuple(rows[0]), ("---",) * len(rows[0]), *(tuple(row.values()) for row in rows)]
    return f"## {title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _experiment(path: Path, name: str) -> dict[str, str]:
    """Return the cells of an experiment: its choices, batch sizes and learning rates."""
    override = f"experiment={name}"
    config = compose("config", [override], return_hydra_config=True)
    choices, order = config.hydra.runtime.choices, config.phase.order
    judged = {"reward", "ppo"} & set(order)
    return {
        "name": f"`{name}`",
        "what": _title_cell(path),
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
    """Return the global batch size of each phase that runs; for PPO, rollout / mini-batch."""
    order = config.phase.order
    sizes = {phase: str(config[phase].batch_size) for phase in order if phase != "ppo"}
    if "ppo" in order:
        sizes["ppo"] = f"{config.ppo.rollout_batch_size} / {config.ppo.mini_batch_size}"
    return ", ".join(f"{phase} {size}" for phase, size in sizes.items())


def _learning_rates(config: DictConfig) -> str:
    """Return the learning rate of each phase that runs; for PPO, of actor and critic."""
    order, ppo = config.phase.order, config.ppo
    rates = {phase: config[phase].lr for phase in order if phase != "ppo"}
    if "ppo" in order:
        rates["actor"] = ppo.actor_lr
    if "ppo" in order and ppo.advantage_estimator == "gae":
        rates["critic"] = ppo.critic_lr
    return ", ".join(f"{name} {_shown(rate)}" for name, rate in rates.items())


def _preset(path: Path, keys: tuple[str, ...]) -> dict[str, str]:
    """Return the cells of an option of ppo, sft, reward or dpo."""
    group, name = path.parent.name, path.stem
    values = compose("config", [f"{group}={name}"])[group]
    return {
        "option": f"`{group}={name}`",
        "what": _title_cell(path),
        **{key: _shown(values[key]) for key in keys},
    }


def _shown(value: Any) -> str:
    """Return ``value`` as it is typed on the command line."""
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _title_cell(path: Path) -> str:
    """Return a cell with the title of a file in conf/, and its source if it has one."""
    header = read_header(path)
    return _cell(header.title if header.source is None else f"{header.title} ({header.source})")


def _cell(text: str) -> str:
    linked = re.sub(r"https?://[^\s,;)]+", r"[source](\g<0>)", text)
    return linked.replace("|", "\\|")


def renew_page(path: Path, conf: Path) -> None:
    """Replace the tables below the mark in ``path``; keep the text above it."""
    write_below(path, TABLE_MARK, recipes_page(conf))


if __name__ == "__main__":
    renew_page(Path("docs/recipes.md"), Path("conf"))
