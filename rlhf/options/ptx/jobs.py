"""Check the corpus before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rlhf.base.seams import JobParts
from rlhf.config.choices import Phase
from rlhf.config.schema.run import RunConfig
from rlhf.options.ptx.corpus import load_ptx_texts, reads_corpus


class CorpusCheck(JobParts):
    """A check of the corpus before the run starts, for a corpus that is quick to read."""

    def check_data(
        self, config: RunConfig, phases: Collection[Phase], is_quick: Callable[[str, str], bool]
    ) -> None:
        """Raise a DataError if the corpus that PPO reads is missing or has no text."""
        data, place = config.data, config.data.ptx_path
        if Phase.ppo not in phases or place is None or not is_quick("data.ptx_path", place):
            return
        if reads_corpus(config.ppo, data):
            load_ptx_texts(data, seed=config.seed)


JOBS = CorpusCheck()
