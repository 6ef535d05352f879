"""Keys of a part of ``rewards`` with kind=scorer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlhf.config.schema.keys import PART_KEYS, Names, key

READ_BY_SCORERS = (*PART_KEYS, "path*", "revision", "template", "add_end", "label", "run_code")


ScorerTemplate = StrEnum("ScorerTemplate", "auto chat pair plain")
"""The forms in which a scorer reads prompt and response."""


@dataclass(kw_only=True)
class ScorerKeys:
    """Keys of a part of ``rewards`` that a model scores as text, with its own tokenizer."""

    path: str | None = key(default=None, names=Names.place)
    """kind=scorer: Hugging Face folder or hub id of a sequence-classification model."""
    revision: str | None = None
    """kind=scorer: hub revision of path; null: the newest."""
    template: ScorerTemplate = ScorerTemplate.auto
    """kind=scorer: chat: the tokenizer's chat template; pair: prompt and response as two texts;
    plain: as one text; auto: the first of these that the tokenizer has."""
    add_end: bool = False
    """kind=scorer, template=plain: add the tokenizer's end token to the text."""
    label: str | None = None
    """kind=scorer: name or number of the label whose logit is the score, minus the other's if there
    are two labels; null: the only label, or LABEL_1 of LABEL_0 and LABEL_1."""
