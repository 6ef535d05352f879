"""Answers that are exchanged on purpose."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.config.choices import Phase
from rlhf.data.records import Record
from rlhf.data.splits import PhaseData, swap_answers
from rlhf.phases.shared.context import records_with_label_noise

PAIRS = [Record(f"p{i}", f"good {i}", f"bad {i}") for i in range(100)]
LONE = Record("p", "an answer without a rejected one")
PART = PhaseData([*PAIRS, LONE], PAIRS[:10])


def exchanged(part: PhaseData) -> list[int]:
    """The places of pairs whose answers are exchanged; all else must be as it was."""
    found = []
    for place, (before, after) in enumerate(zip(PART.train, part.train, strict=True)):
        if after != before:
            assert after == before._replace(chosen=before.rejected, rejected=before.chosen)
            found.append(place)
    return found


def test_a_share_of_the_training_pairs_is_exchanged_by_the_seed() -> None:
    places = exchanged(swap_answers(PART, share=0.25, seed=1))
    assert len(places) == 25
    assert places == exchanged(swap_answers(PART, share=0.25, seed=1))
    assert places != exchanged(swap_answers(PART, share=0.25, seed=2))
    assert exchanged(swap_answers(PART, share=1.0, seed=1)) == list(range(100))
    assert swap_answers(PART, share=1.0, seed=1).eval == PART.eval


@pytest.mark.parametrize(("reward", "dpo"), [(0.5, 0.0), (0.0, 0.5)])
def test_reward_and_dpo_have_a_noise_of_their_own(reward: float, dpo: float) -> None:
    context: Any = SimpleNamespace(
        parts={Phase.sft: PART, Phase.reward: PART},
        config=SimpleNamespace(
            data_seed=1,
            reward=SimpleNamespace(label_noise=reward),
            dpo=SimpleNamespace(label_noise=dpo),
        ),
    )
    shares = {
        phase: len(exchanged(records_with_label_noise(context, phase))) / len(PAIRS)
        for phase in (Phase.sft, Phase.reward, Phase.dpo)
    }
    assert shares == {Phase.sft: 0.0, Phase.reward: reward, Phase.dpo: dpo}
