"""Make the teacher the reference of PPO, and check that it has the tokens of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf.base.types import TokenEngine
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import Tokens, check_same_tokens, load_tokenizer
from rlhf.phases.shared.policies import policy_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "ppo.teacher_path"


def check_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise an error if the teacher has other tokens than the run's ``tokenizer``."""
    if Phase.ppo in config.phase.order and config.ppo.teacher_path is not None:
        teacher = config.ppo.teacher_path
        theirs = load_tokenizer(expand_user_path(teacher, key=KEY), key=KEY)
        own, other = (Tokens.from_tokenizer(each) for each in (tokenizer, theirs))
        check_same_tokens(own, other, place=teacher, name=KEY, way_out="")


def find_reference(config: RunConfig, phase: Phase, _: TokenEngine) -> ModelSource | None:
    """Return the source of PPO's teacher with other weights; None: there is no such teacher."""
    if phase is not Phase.ppo or config.ppo.teacher_path is None:
        return None
    path = str(expand_user_path(config.ppo.teacher_path, key=KEY))
    source = policy_source(config)
    return replace(source, key=KEY, path=path, revision=None, architecture=None)
