"""Check the corpus before a run starts, if it is quick to read."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig


def check_data(
    config: RunConfig, phases: Collection[Phase], is_quick: Callable[[str, str], bool]
) -> None:
    """Raise a DataError if the corpus that PPO reads is missing or has no text."""
    data, place = config.data, config.data.ptx_path
    if Phase.ppo not in phases or place is None or not is_quick("data.ptx_path", place):
        return
    from rlhf.options.ptx.corpus import load_ptx_texts, reads_corpus

    if reads_corpus(config.ppo, data):
        load_ptx_texts(data, seed=config.data_seed)
