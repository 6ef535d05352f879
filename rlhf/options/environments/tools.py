"""Classes whose methods are tools, in the form of TRL's ``environment_factory``.

``reset(self, **row) -> str | None`` begins an episode with the columns of a row, every other public
method is a tool, and ``get_reward(self) -> float`` is optional. The policy calls a tool with
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as models of Hermes and Qwen do.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlhf.base.errors import ConfigError
from rlhf.options.environments.interface import Observation, Step

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
CALL_START = "<tool_call>"
INSTRUCTIONS = (
    'Call a tool with <tool_call>{"name": NAME, "arguments": {...}}</tool_call>, or answer '
    "without a call. The tools are:\n"
)
NOT_TOOLS = ("reset", "get_reward")
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


class ToolCallError(Exception):
    """A tool call of the policy that is not valid; the policy reads the error's message."""


class ToolEnvironment:
    """An environment made from an object whose public methods are tools.

    The first observation begins with the tools' JSON schemas, so that the chat template need not
    support tools.
    """

    def __init__(self, inner: Any) -> None:
        """Read the tools of ``inner`` from signatures and docstrings, or raise ConfigError."""
        self._inner = inner
        self._methods = _find_tools(inner)
        self.tools = [_build_schema(inner, method) for method in self._methods.values()]
        self._parameters = {
            each["function"]["name"]: each["function"]["parameters"]["properties"]
            for each in self.tools
        }
        self._passes_seed = "seed" in inspect.signature(inner.reset).parameters

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> str:
        """Begin an episode; return the tools' schemas, the row's prompt, and ``inner``'s text."""
        # TRL's ``reset`` has no argument for a seed, so pass the seed only if ``reset`` has one.
        columns = {"seed": seed, **row} if self._passes_seed else row
        text = str(row.get("prompt") or "") + str(self._inner.reset(**columns) or "")
        if not text:
            raise ValueError("reset returned no text, and the row has no prompt")
        return INSTRUCTIONS + "\n".join(map(json.dumps, self.tools)) + "\n\n" + text

    def step(self, text: str) -> Step:
        """Call the tools that the turn names; a turn without a call ends the episode."""
        if CALL_START not in text:
            reward = self._inner.get_reward() if hasattr(self._inner, "get_reward") else 0.0
            return Step("", reward=reward, terminated=True)
        info: dict[str, bool] = {}
        try:
            calls = [self._read_call(each) for each in _find_calls(text)]
            answers = []
            for method, arguments in calls:
                try:
                    answers.append(str(method(**arguments)))
                except Exception as error:  # as in TRL, the policy reads a tool's error
                    info["tool_error"] = True
                    answers.append(f"{type(error).__name__}: {error}")
        except ToolCallError as error:
            return Step(Observation(f"error: {error}", role="tool"), info={"malformed": True})
        return Step(Observation("\n".join(answers), role="tool"), info=info)

    def _read_call(self, content: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the method and the arguments of a call in JSON, or raise ToolCallError."""
        try:
            call = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"the call is not JSON ({error})") from error
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._methods:
            raise ToolCallError(f"no such tool; the tools are {', '.join(self._methods)}")
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ToolCallError("arguments must be a JSON object")
        try:
            inspect.signature(self._methods[name]).bind(**arguments)
        except TypeError as error:
            raise ToolCallError(f"{name}: {error}") from error
        for key, value in arguments.items():
            json_type = self._parameters[name].get(key, {}).get("type")
            if isinstance(json_type, str) and not _has_type(value, json_type):
                raise ToolCallError(f"{name}: {key} must be of type {json_type}")
        return self._methods[name], arguments


def has_tools(user_class: type) -> bool:
    """Return True if the class has ``reset`` and at least one tool."""
    return callable(getattr(user_class, "reset", None)) and any(
        inspect.isfunction(value) and not name.startswith("_") and name not in NOT_TOOLS
        for name, value in inspect.getmembers(user_class)
    )


def _find_tools(inner: Any) -> dict[str, Callable[..., Any]]:
    methods = inspect.getmembers(inner, inspect.ismethod)
    tools: dict[str, Callable[..., Any]] = {
        n: m for n, m in methods if not n.startswith("_") and n not in NOT_TOOLS
    }
    if not callable(getattr(inner, "reset", None)) or not tools:
        raise ConfigError(
            f"environment.target: {type(inner).__name__} must have a method reset(**row), and a "
            "public method for each tool"
        )
    return tools


def _build_schema(inner: Any, method: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(method)
    except Exception as error:  # transformers raises a plain Exception for a wrong docstring
        raise ConfigError(
            f"environment.target: {type(inner).__name__}.{method.__name__} is not a valid tool "
            f"({error}); give it type hints and a docstring that describes each argument below "
            "'Args:', or a name that begins with _"
        ) from error
    return schema


def _find_calls(text: str) -> list[str]:
    calls = CALL.findall(text)
    if len(calls) != text.count(CALL_START):
        raise ToolCallError("a <tool_call> has no </tool_call>")
    return calls


def _has_type(value: Any, json_type: str) -> bool:
    if json_type != "boolean" and isinstance(value, bool):
        return False  # a bool is an int in Python, but not in JSON
    return isinstance(value, PYTHON_TYPES.get(json_type, object))
