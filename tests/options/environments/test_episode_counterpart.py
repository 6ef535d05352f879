"""Episodes of a small policy: token-exact, whoever else is there and however late they are."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from rlhf.base.errors import RolloutError
from rlhf.base.ranks import Ranks
from rlhf.base.types import PromptBatch, Responses, RolloutBackend
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.data.collate import collate_prompts
from rlhf.data.encoding import Encoder
from rlhf.models.build import ModelSource, build_actor
from rlhf.models.language_model import LanguageModel
from rlhf.models.tokenizers import train_tokenizer
from rlhf.options import Backend
from rlhf.options.environments.embedded import NumberGuessing
from rlhf.options.environments.interface import Observation, Reply, Step
from rlhf.options.environments.keys import FailureName
from rlhf.options.environments.process_pool import LocalPool
from rlhf.options.environments.responses import EnvironmentPartner
from rlhf.options.environments.turns import Turns, turns_of
from rlhf.phases.shared.backends import build_rollout_backend
from rlhf.rollout.hf import HfRollout
from tests.architectures import sizes
from tests.conftest import Compose
from tests.plain_engine import PlainEngine

TEXTS = ["\n\nHuman: guess 1 to 10\n\nAssistant: 1 2 3 4 5 6 7 8 9 10\n\nHuman: higher lower right"]
TOKENIZER = train_tokenizer(TEXTS * 20, vocab_size=300)
PROMPT = "\n\nHuman: guess 1 to 10\n\nAssistant:"
ARCHITECTURE = sizes("llama", 32, 48, heads=4, initializer_range=0.3)


class LatePool(LocalPool):
    """Answers in any order, and not when it is asked."""

    random = Random(0)

    def replies(self, *, wait: bool) -> list[Reply]:
        due = self._replies
        self.random.shuffle(due)
        count = self.random.randint(int(wait and bool(due)), len(due))
        found, self._replies = due[:count], due[count:]
        return found


class Told:
    """Tells what it was told, with a number: every token of a turn comes back as text."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        self.turns = seed % 4
        return "guess 1 to 10"

    def step(self, text: str) -> Step:
        self.turns -= 1
        return Step(Observation(f"{text[:5]}|", "tool"), reward=1.0, terminated=self.turns < 0)


def actor_of() -> PlainEngine:
    source = ModelSource(key="model", path=None, architecture=ARCHITECTURE)
    return PlainEngine(LanguageModel(build_actor(source, TOKENIZER, seed=3)))


ACTOR = actor_of()


@pytest.fixture
def config(compose: Compose) -> RunConfig:
    words = ["experiment=number_guessing", "hardware=cpu", "rollout.max_response_tokens=3"]
    return to_run_config(compose([*words, "environment.max_tokens=60", "data.template=plain"]))


def prompts_of(rows: list[int]) -> PromptBatch:
    ids = Encoder(TOKENIZER).encode_prompts([PROMPT])[0]
    draws_BT = torch.rand(64, 12, generator=torch.Generator().manual_seed(5))[rows]
    cpu = torch.device("cpu")
    prompts = collate_prompts(
        [ids] * len(rows), [PROMPT] * len(rows), draws_BT, pad_id=0, device=cpu
    )
    return prompts._replace(seeds=rows, columns=[{} for _ in rows])


def backend_of(config: RunConfig, pool: LocalPool, dtype: Any = "fp32") -> RolloutBackend:
    shared: Any = {"temperature": 1.0, "dtype": dtype, "ranks": Ranks()}
    backend = build_rollout_backend(config, TOKENIZER, **shared)
    return EnvironmentPartner(config, pool).wrap_backend(backend, TOKENIZER, Ranks())


def episodes_of(
    config: RunConfig,
    rows: list[int],
    pool: LocalPool | None = None,
    *,
    dtype: Any = "fp32",
) -> Responses:
    pool = pool or LocalPool(NumberGuessing)
    return backend_of(config, pool, dtype).generate(ACTOR, prompts_of(rows))


def turns_in(responses: Responses) -> Turns:
    turns = turns_of(responses)
    assert turns is not None
    return turns


def row_of(responses: Responses, row: int) -> tuple[Any, ...]:
    """Everything about one episode, without padding."""
    attend_T, turns = responses.attend_BT[row], turns_in(responses)
    columns = (responses.ids_BT, responses.keep_BT, turns.turn_BT, turns.rewards_BT)
    logprobs = (
        None if responses.logprobs_BT is None else responses.logprobs_BT[row][attend_T].tolist()
    )
    return (
        *(each[row][attend_T].tolist() for each in columns),
        logprobs,
        bool(responses.ended_B[row]),
        bool(turns.truncated_B[row]),
        float(turns.success_B[row]),
        turns.messages[row],
        turns.failures[row],
    )


@pytest.mark.parametrize("make", [NumberGuessing, Told])
def test_an_episode_alone_is_the_same_among_others(
    config: RunConfig, make: Callable[[], Any]
) -> None:
    together = episodes_of(config, list(range(64)), LocalPool(make))
    for row in (0, 7, 31, 63):
        alone = episodes_of(config, [row], LocalPool(make))
        assert row_of(alone, 0) == row_of(together, row)


@pytest.mark.parametrize(("make", "max_rows"), [(NumberGuessing, 5), (Told, 1), (Told, 64)])
def test_a_late_environment_changes_no_bit(
    config: RunConfig, make: Callable[[], Any], max_rows: int
) -> None:
    rows = list(range(24))
    prompt = episodes_of(config, rows, LocalPool(make))
    config = replace(config, rollout=replace(config.rollout, max_rows=max_rows))
    late = episodes_of(config, rows, LatePool(make))
    assert [row_of(late, row) for row in rows] == [row_of(prompt, row) for row in rows]


def test_every_backend_has_the_same_episodes(config: RunConfig) -> None:
    rows = list(range(12))
    fast = episodes_of(config, rows)
    slow = replace(
        config, rollout=replace(config.rollout, backend=Backend.hf, reuse_logprobs="never")
    )
    hf = episodes_of(slow, rows)
    assert hf.logprobs_BT is None
    for row in rows:
        expected, found = row_of(fast, row), row_of(hf, row)
        assert expected[:4] + expected[5:] == found[:4] + found[5:]


def test_later_turns_say_that_they_continue(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server then keeps its weights and its prefix cache."""
    said: list[bool] = []
    generate = HfRollout.generate

    def listen(backend: HfRollout, actor: Any, prompts: PromptBatch) -> Responses:
        said.append(prompts.keeps_weights)
        return generate(backend, actor, prompts)

    monkeypatch.setattr(HfRollout, "generate", listen)
    rollout = replace(config.rollout, backend=Backend.hf, reuse_logprobs="never")
    turns = turns_in(episodes_of(replace(config, rollout=rollout), [1, 2])).turn_BT
    assert said == [False] + [True] * int(turns.max())
    assert len(said) > 1


def test_no_text_is_encoded_again(config: RunConfig) -> None:
    """The ids are the policy's own, an end token where it drew one, and each observation's."""
    responses = episodes_of(config, list(range(32)), LocalPool(Told))
    encoder = Encoder(TOKENIZER)
    for row in range(32):
        ids, keep, turn, rewards, logprobs, *_, messages, failures = row_of(responses, row)
        said = [(m.role, m.text) for m in messages if m.role != "assistant"]
        observed = [i for i, own in zip(ids, keep, strict=True) if not own]
        expected = []
        for number, added in enumerate(encoder.encode_observations(said)):
            own = [i for i, each in zip(ids, turn, strict=True) if each == number]
            expected += (
                added if own[-1] == TOKENIZER.eos_token_id else [TOKENIZER.eos_token_id, *added]
            )
            assert len(own) <= 3
        assert observed == expected
        assert all((logprob == 0) == (not own) for logprob, own in zip(logprobs, keep, strict=True))
        ends = [len(turn) - 1 - turn[::-1].index(number) for number in range(max(turn) + 1)]
        assert [place for place, reward in enumerate(rewards) if reward > 0] == ends
        assert failures.count(FailureName.cut_turn) <= max(turn) + 1


def test_each_turn_has_random_numbers_of_its_own(config: RunConfig) -> None:
    rows, found = list(range(32)), []
    backend = backend_of(config, LocalPool(Told))
    for sign in (0, 1):  # other numbers from the second turn of three tokens on
        prompts = prompts_of(rows)
        draws_BT = torch.cat([prompts.draws_BT[:, :3], (sign - prompts.draws_BT[:, 3:]).abs()], 1)
        responses = backend.generate(ACTOR, prompts._replace(draws_BT=draws_BT))
        said = [
            [m.text for m in each if m.role == "assistant"] for each in turns_in(responses).messages
        ]
        found.append(said)
    assert [each[0] for each in found[0]] == [each[0] for each in found[1]]
    assert [each[1:2] for each in found[0]] != [each[1:2] for each in found[1]]


def test_limits_cut_an_episode(config: RunConfig) -> None:
    environment = replace(config.environment, max_turns=2)
    short = episodes_of(replace(config, environment=environment), list(range(16)))
    assert int(turns_in(short).turn_BT.max()) == 1
    assert torch.equal(turns_in(short).truncated_B, ~short.ended_B)
    environment = replace(config.environment, max_tokens=20)
    tight = episodes_of(replace(config, environment=environment), list(range(16)))
    assert tight.ids_BT.shape[1] <= 20
    too_long = [FailureName.too_long in failures for failures in turns_in(tight).failures]
    assert any(too_long)
    assert turns_in(tight).truncated_B.tolist() == too_long
    prices = replace(environment.failure_rewards, too_long=environment.failure_rewards.too_long - 8)
    environment = replace(environment, failure_rewards=prices)
    priced = episodes_of(replace(config, environment=environment), list(range(16)))
    less_BT = turns_in(tight).rewards_BT - turns_in(priced).rewards_BT
    assert less_BT.sum(dim=1).tolist() == [8.0 * each for each in too_long]


class Broken:
    """Fails as the seed says."""

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        self.seed = seed
        if seed % 4 == 1:
            raise ValueError("no")
        return "guess 1 to 10"

    def step(self, text: str) -> Step:
        if self.seed % 4 == 2:
            return Step("x", reward=float("nan"))
        return Step("higher", terminated=True, reward=0.5, info={"malformed": self.seed % 4 == 3})


def test_failures_are_counted_and_priced(config: RunConfig) -> None:
    prices = replace(
        config.environment.failure_rewards, exception=-1.0, malformed=-0.25, cut_turn=0.0
    )
    environment = replace(config.environment, failure_rewards=prices)
    responses = episodes_of(
        replace(config, environment=environment), list(range(16)), LocalPool(Broken)
    )
    names = [[n for n in found if n != "cut_turn"] for found in turns_in(responses).failures]
    assert names == [[], ["exception"], ["invalid"], ["malformed"]] * 4
    assert turns_in(responses).rewards_BT.sum(dim=1).tolist() == [0.5, -1.0, 0.0, 0.25] * 4
    assert responses.ended_B.tolist() == [True, False, False, True] * 4
    assert not turns_in(responses).truncated_B.any(), "a fault of the environment promises nothing"
    environment = replace(config.environment, max_failures=7)
    with pytest.raises(RolloutError, match=r"8 episodes \(.*\), more than .*max_failures=7"):
        episodes_of(replace(config, environment=environment), list(range(16)), LocalPool(Broken))


class Unsteady(Broken):
    """Begins otherwise each time."""

    begun = 0

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        Unsteady.begun += 1
        return f"guess {self.begun}"


def test_an_environment_must_begin_as_its_prompt_says(config: RunConfig) -> None:
    with pytest.raises(RolloutError, match="take all randomness from the seed"):
        episodes_of(config, [0, 1], LocalPool(Unsteady))
