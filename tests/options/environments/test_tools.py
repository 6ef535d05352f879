"""Both forms of an environment in a few lines, and calls of tools that cannot be made."""

import json
from typing import Any

import pytest

from rlhf.base.errors import ConfigError
from rlhf.options.environments.interface import Observation, Step
from rlhf.options.environments.tools import ToolEnvironment


class Counter:
    """The form of TRL, as its documentation shows it."""

    def reset(self, **row) -> str | None:
        self.count = row.get("start", 0)
        return f"\nThe counter is at {self.count}."

    def increment(self, step: int, times: float = 1.0) -> int:
        """
        Increment the counter.

        Args:
            step: The value to add.
            times: How often.

        Returns:
            The new value.
        """
        if step == 0:
            raise ValueError("0 changes nothing")
        self.count += int(step * times)
        return self.count

    def get_reward(self) -> float:
        return float(self.count == 5)


def call(name: Any, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def counter() -> ToolEnvironment:
    env = ToolEnvironment(Counter())
    first = env.reset(seed=0, row={"prompt": "Reach 5.", "start": 1})
    assert first.startswith("Call a tool with <tool_call>")
    assert first.partition("\n\n")[2] == ("Reach 5.\nThe counter is at 1.")
    return env


def test_a_class_of_tools_is_an_environment(counter: ToolEnvironment) -> None:
    assert [each["function"]["name"] for each in counter.tools] == ["increment"]
    assert counter.tools[0]["function"]["parameters"]["required"] == ["step"]
    step = counter.step(f"I add. {call('increment', step=1)}")
    assert step == Step(Observation("2", role="tool"))
    step = counter.step(call("increment", step=1) + call("increment", step=1, times=2))
    assert step.observation == Observation("3\n5", role="tool")
    assert counter.step("Done.")[1:3] == (1.0, True)


def test_a_tool_that_raises_is_answered_as_in_trl(counter: ToolEnvironment) -> None:
    step = counter.step(call("increment", step=0))
    assert step.observation == Observation("ValueError: 0 changes nothing", role="tool")
    assert step.info == {"tool_error": True}
    assert not step.terminated


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<tool_call>{increment}</tool_call>", "the call is not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
        ("<tool_call>{}", "has no </tool_call>"),
        ("<tool_call>3</tool_call>", "no such tool; the tools are increment"),
        (call("decrement"), "no such tool"),
        (call("reset"), "no such tool"),
        (call("get_reward"), "no such tool"),
        (call(["increment"]), "no such tool"),
        (call("increment"), "increment: missing a required argument: 'step'"),
        (call("increment", step=1, by=2), "unexpected keyword argument 'by'"),
        (call("increment", step="1"), "step must be of type integer"),
        (call("increment", step=True), "step must be of type integer"),
        (call("increment", step=1.5), "step must be of type integer"),
        ('<tool_call>{"name": "increment", "arguments": [1]}</tool_call>', "must be a JSON object"),
        (call("increment", step=1) + call("increment"), "missing a required argument"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered(
    text: str, answer: str, counter: ToolEnvironment
) -> None:
    step = counter.step(text)
    assert step.observation.role == "tool"
    assert answer in step.observation.text
    assert (step.info, step.terminated) == ({"malformed": True}, False)
    assert counter.step(call("increment", step=1)).observation.text == "2", "no call was made"


class Seeded:
    def reset(self, seed, **row):
        self.seed = seed

    def look(self) -> str:
        """Look."""
        return str(self.seed)


def test_a_class_that_names_the_seed_gets_it_and_texts_must_be_there() -> None:
    env = ToolEnvironment(Seeded())
    assert env.reset(seed=7, row={"prompt": "Look."}).endswith("\n\nLook.")
    assert env.step(call("look")).observation.text == "7"
    assert env.step("7")[1:3] == (0.0, True), "no get_reward"
    with pytest.raises(ValueError, match="reset returned no text"):
        env.reset(seed=7, row={})


class NoTools:
    def reset(self, **row): ...

    def get_reward(self): ...


class NoDocstring:
    def reset(self, **row): ...

    def look(self, place: str) -> str: ...


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NoTools, "NoTools must have a method reset"),
        (NoDocstring, r"NoDocstring\.look is not a valid tool .*no docstring"),
    ],
)
def test_what_is_no_class_of_tools_is_refused(kind: type, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ToolEnvironment(kind())
