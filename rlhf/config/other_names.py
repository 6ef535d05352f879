"""Names that TRL, trlx, OpenRLHF, verl and DeepSpeed-Chat give to our keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Phase

# Whole words of other programs, which no command of ours can mean -> what to type instead.
WORDS: Mapping[str, str] = read_yaml_beside(__file__, "other_words.yaml")


@cache
def read_other_names() -> Mapping[str, list[str]]:
    """Return our alternatives for each name of another program, as other_names.yaml has them."""
    return {
        name: [
            word.replace("*", phase)
            for word in ours.split(" or ")
            for phase in (Phase if "*" in word else ("",))
        ]
        for ours, others in read_yaml_beside(__file__, "other_names.yaml").items()
        for name in others
    }


def suggested_keys(name: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that the user may have meant by ``name``.

    ``name`` may be a key of another program, or one of our ``keys`` without its group. If ``name``
    begins with one of our groups, only that group's keys are returned, if there are any.
    """
    parts = name.replace("-", "_").split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    others = read_other_names()
    known = next((others[end] for end in ends if end in others), None)
    within = next(([end] for end in ends[1:] if end in keys), None)
    found = known or within or [key for key in keys if key.endswith(f".{parts[-1]}")]
    return [each for each in found if each.startswith(f"{parts[0]}.")] or found
