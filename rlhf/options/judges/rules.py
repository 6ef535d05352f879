"""Rules of a part of ``rewards`` with kind=judge."""

from __future__ import annotations

from rlhf.base.errors import refuse_broken_rule
from rlhf.config.choices import RewardKind
from rlhf.config.schema.run import RunConfig


def check_judges(config: RunConfig) -> None:
    """Raise ConfigError if a judge has values that exclude each other."""
    first_uses: dict[object, tuple[str, str | None]] = {}
    for name, part in config.rewards.items():
        if part.kind != RewardKind.judge:
            continue
        other, url = first_uses.setdefault((part.rubric, part.model), (name, part.url))
        broken = {
            f"url={part.url}: rewards.{other} sends the same requests (rubric={part.rubric}, "
            f"model={part.model}) to {url}, and both would share the stored answers; give one of "
            "the models another name, or use one url": part.url != url,
            f"columns=[{','.join(part.columns)}]: kind=judge compares with one column; without "
            "columns it scores each response alone": len(part.columns) > 1,
            f"votes={part.votes}: with temperature=0 all votes are the same; set "
            f"rewards.{name}.temperature=0.7, or votes=1": (
                part.votes > 1 and part.temperature == 0
            ),
        }
        refuse_broken_rule(broken, f"rewards.{name}.")
