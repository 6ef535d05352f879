"""An episode that a model plays in the place of a chat."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.chat.talker import SampledAnswer
from rlhf.config.freeze import to_run_config, write_frozen_config
from rlhf.data.encoding import Encoder
from rlhf.options.environments.chat import play_episode
from tests.conftest import Compose
from tests.models_on_disk import small_tokenizer
from tests.runs import EPISODES


@pytest.mark.parametrize("why", ["ended", "cut"])
def test_every_answer_is_followed_by_one_end_token(
    why: str, compose: Compose, tmp_path: Path
) -> None:
    words = ["experiment=smoke", *EPISODES, "environment.max_turns=3", "data.template=plain"]
    config = to_run_config(compose(words))
    write_frozen_config(config, tmp_path)
    tokenizer = small_tokenizer()
    end, asked = Encoder(tokenizer, config.data.template).end_id, []
    said = [7, 8, end] if why == "ended" else [7, 8]

    def answer(ids: list[int], *_: Any) -> SampledAnswer:
        asked.append(ids)
        return SampledAnswer("no number", said, why)

    talker: Any = SimpleNamespace(tokenizer=tokenizer, answer=answer)
    written: list[str] = []
    sampling: Any = None
    play_episode(tmp_path, talker, sampling, seed=1, write=written.append)
    assert len(asked) > 1
    for before, after in pairwise(asked):
        added = after[len(before) :]
        assert after[: len(before)] == before
        assert added[:3] == [7, 8, end]
        assert end not in added[3:]
    assert written[-1].startswith("episode 1 ")
