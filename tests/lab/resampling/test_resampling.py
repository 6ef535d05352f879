"""DAPO's dynamic sampling: which prompts are replaced, by what, and how often."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, Rollout, TermScores
from rlhf.config.typed import to_run_config
from rlhf.phases.ppo.hooks import build_hooks
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.ppo.step_metrics import equal_scores_mask
from rlhf.phases.ppo.targets import TargetMaker
from tests.conftest import Compose

SIZE, GROUPS = 2, 4
STEPS_DONE = 7
# Scores of both responses to each prompt, by attempt; a prompt is replaced if they are equal.
SCORES = [
    [(0, 0), (0, 1), (1, 1), (2, 2)],
    [(5, 5), (0, 9), (0, 3), (4, 4)],
    [(6, 7), (0, 9), (0, 9), (8, 8)],
]
ATTEMPTED = torch.zeros(SIZE * GROUPS)  # no prompt, without rounds
ATTEMPT = [2, 0, 1, 2]  # from which a prompt comes after two rounds


class Loader:
    """Prompts whose ids are 1000 + 100 * attempt + row, with padding that grows by attempt."""

    def __init__(self, first: int = 0, groups: int = GROUPS) -> None:
        self.rows = range(first * SIZE, (first + groups) * SIZE)
        self.attempts: list[int] = []
        self.context: Any = None

    def own_prompts(self, step: int, *, attempt: int = 0) -> PromptBatch:
        assert step == STEPS_DONE
        self.attempts.append(attempt)
        ids_B1 = torch.tensor([[1000 + 100 * attempt + row] for row in self.rows])
        ids_BP = torch.cat([torch.zeros(len(ids_B1), attempt, dtype=torch.long), ids_B1], dim=1)
        texts = [f"{attempt}/{row}" for row in self.rows]
        columns = [{"text": text} for text in texts]
        return PromptBatch(ids_BP, ids_BP > 0, torch.zeros(len(texts), 3), texts, columns, step=8)


def answer(prompts: PromptBatch) -> Rollout:
    """Responses that tell their prompt, as long as the attempt."""
    attempts, rows = zip(*(map(int, text.split("/")) for text in prompts.texts), strict=True)
    width, size = 1 + attempts[0], len(rows)
    keep_BT = torch.ones(size, width, dtype=torch.bool)
    ids_BT = prompts.ids_BP[:, -1:].expand(size, width).contiguous()
    scores_B = torch.tensor(
        [float(SCORES[a][r // SIZE][r % SIZE]) for a, r in zip(attempts, rows, strict=True)]
    )
    values_BT = ids_BT.float()
    parts = TermScores(scores_B[:, None], torch.zeros(size, 1, dtype=torch.bool))
    responses = Responses(ids_BT, keep_BT, keep_BT[:, 0], values_BT)
    return Rollout(prompts, responses, values_BT, values_BT, values_BT, scores_B)._replace(
        parts=parts, last_values_B=scores_B, seconds={"generate": 1.0, "score": float(size)}
    )


def sampled(compose: Compose, rounds: int, loader: Loader, ranks: Ranks | None = None) -> Rollout:
    keys = ["ppo.advantage_estimator=grpo", f"ppo.responses_per_prompt={SIZE}"]
    keys += ["ppo.missing_end_penalty=0", f"ppo.resampling_rounds={rounds}"]
    config = to_run_config(compose(keys))
    tokenizer = SimpleNamespace(pad_token_id=0)
    loader.context = SimpleNamespace(ranks=ranks or Ranks(), tokenizer=tokenizer)
    maker = TargetMaker(config.ppo, Ranks())
    trainer: Any = SimpleNamespace(
        generate_experience=answer, target_maker=maker, steps_done=STEPS_DONE
    )
    rollout = answer(loader.own_prompts(STEPS_DONE))
    for hook in build_hooks(config):
        hook.prepare(trainer, cast(PromptLoader, cast(Any, loader)))
        rollout, _ = hook.prepare_rollout(trainer, rollout)
    return rollout


def texts_of(attempts: list[int]) -> list[str]:
    return [f"{attempts[row // SIZE]}/{row}" for row in range(GROUPS * SIZE)]


@pytest.mark.parametrize(
    ("rounds", "attempts", "tried"),
    [(0, [0] * GROUPS, [0]), (1, [1, 0, 1, 1], [0, 1]), (2, ATTEMPT, [0, 1, 2])],
)
def test_prompts_with_equal_scores_are_replaced_up_to_a_cap(
    compose: Compose, rounds: int, attempts: list[int], tried: list[int]
) -> None:
    loader = Loader()
    found = sampled(compose, rounds, loader)
    assert found.prompts.texts == texts_of(attempts)
    assert found.prompts.columns == [{"text": text} for text in found.prompts.texts]
    assert loader.attempts == tried
    for row, text in enumerate(found.prompts.texts):
        attempt = int(text.split("/")[0])
        name, width = 1000 + 100 * attempt + row, 1 + max(attempts)
        gap = max(attempts) - attempt
        assert found.prompts.ids_BP[row].tolist() == [0] * max(attempts) + [name]
        assert found.prompts.attend_BP[row].sum() == 1
        for part in (found.responses.ids_BT, found.logprobs_BT, found.values_BT):
            assert part[row].tolist() == [name] * (width - gap) + [0] * gap
        assert found.responses.keep_BT[row].tolist() == [True] * (width - gap) + [False] * gap
        score = SCORES[attempt][row // SIZE][row % SIZE]
        assert found.scores_B[row] == score
        assert found.parts is not None
        assert found.parts.scores_BK[row, 0] == score
        assert found.measures.get("replaced_share", ATTEMPTED)[row] == (attempt > 0)
    rows = sum({0: [8], 1: [8, 6], 2: [8, 6, 4]}[rounds])
    assert found.seconds == {"generate": rounds + 1.0, "score": float(rows)}


class OneOfTwo(Ranks):
    """A rank beside another one, which needs all of its prompts replaced."""

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, GROUPS // 2)


def test_ranks_sample_alike_and_replace_the_same(compose: Compose) -> None:
    alone = sampled(compose, 2, Loader())
    loaders = [Loader(first, GROUPS // 2) for first in (0, GROUPS // 2)]
    parts = [sampled(compose, 2, loader, OneOfTwo(size=2)) for loader in loaders]
    assert parts[0].prompts.texts + parts[1].prompts.texts == alone.prompts.texts
    assert torch.cat([part.scores_B for part in parts]).equal(alone.scores_B)
    assert {part.seconds["score"] for part in parts if part.seconds} == {12.0}, "in step"


def test_a_missing_end_makes_scores_differ(compose: Compose) -> None:
    config = to_run_config(
        compose(["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=2"])
    ).ppo
    rollout = answer(Loader().own_prompts(7))
    ended_B = rollout.responses.ended_B.clone()
    ended_B[0] = False
    rollout = rollout._replace(responses=rollout.responses._replace(ended_B=ended_B))
    scores_B = TargetMaker(config, Ranks()).clipped_scores(rollout)
    assert equal_scores_mask(scores_B.view(-1, 2)).tolist() == [False, False, True, True]
