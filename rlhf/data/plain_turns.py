"""Render prompts, answers and the observations of episodes as plain turns.

"\\n\\nHuman: ..\\n\\nAssistant:" is a prompt, and what follows it is the answer. The tokenizer's
opening and end tokens are added to ids, not to this text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rlhf.base.errors import DataError
from rlhf.config.choices import Template
from rlhf.data.records import ASSISTANT_TURN, SPEAKERS, TOOL_SPEAKER, Message, Record, render_prompt

TextPiece = tuple[str, str]  # a context, and the answer that follows it
OBSERVERS = {"user": "Human", "tool": TOOL_SPEAKER}  # role of an observation -> its speaker


class Asked(NamedTuple):
    """The messages that an answer follows, the tools that it may call, and how it begins."""

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None = None
    begun: str = ""
    text: str | None = None
    """The prompt with plain turns, if it differs from ``render_prompt(messages)``."""


def build_plain_template(opening: str) -> str:
    """Return the Jinja template that renders messages as data.template=plain does.

    ``opening`` is the text of the tokens that the tokenizer puts in front of a prompt. If the last
    message is an answer, the end token follows it, as in training.
    """
    names = "{" + ", ".join(f"{role!r}: {name!r}" for role, name in SPEAKERS.items()) + "}"
    return (
        f"{{{{- {opening!r} }}}}"
        f"{{%- set names = {names} %}}"
        "{%- for message in messages %}"
        "{{- '\n\n' + names[message['role']] + ': ' + message['content'] }}"
        "{%- if loop.last and message['role'] == 'assistant' %}{{- eos_token }}{%- endif %}"
        "{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{- {ASSISTANT_TURN!r} }}}}{{%- endif %}}"
    )


def is_plain_template(template: str) -> bool:
    """Return True if ``build_plain_template`` returned ``template``, for any opening."""
    return template.endswith(build_plain_template("").removeprefix("{{- '' }}"))


def render_plain_observation(role: str, text: str) -> str:
    """Return an observation of an episode as plain text, up to where the next response begins."""
    return f"\n\n{OBSERVERS[role]}: {text}{ASSISTANT_TURN}"


def record_of_observation(role: str, text: str) -> Record:
    """Return a record whose prompt is the first observation of an environment."""
    message = Message("user", text if role == "user" else f"{OBSERVERS[role]}: {text}")
    return Record(render_plain_observation(role, text), messages=(message,))


def all_end_in_assistant(prompts: Iterable[str]) -> bool:
    """Return True if there is a prompt and every prompt ends in "Assistant:"."""
    are_ends = (prompt.rstrip().endswith(ASSISTANT_TURN) for prompt in prompts)
    return next(are_ends, False) and all(are_ends)


class UnusableTemplateError(DataError):
    """The error for messages that a template cannot show; ``problem`` is the counted reason."""

    def __init__(self, problem: str, asked: Asked, template: Template = Template.chat) -> None:
        """Build the error message from the problem and the prompt."""
        text = asked.messages[-1].text if asked.messages else ""
        fix = "use data.template=plain, or fix the tokenizer's chat_template"
        if template is Template.plain:
            fix = "use the tokenizer of a chat model with data.template=chat"
        where = f"for the prompt {text[:80]!r}"
        super().__init__(f"data.template={template}: {problem}, {where}; {fix}")
        self.problem = problem


class PlainTurns:
    """The rendering of prompts and responses as data.template=plain does it."""

    def render_prompt(self, asked: Asked, *answer: Message) -> str:
        """Return the prompt as text.

        Raises:
            UnusableTemplateError: if plain turns cannot show a message, the answer or the tools.
        """
        messages = (*asked.messages, *answer)
        hidden = [key for message in messages for key in message.shown]
        hidden += ["a tool turn" for message in messages if message.role == "tool"]
        hidden += ["tools"] if asked.tools else []
        if hidden:
            names = ", ".join(dict.fromkeys(hidden))
            raise UnusableTemplateError(f"plain turns cannot show {names}", asked, Template.plain)
        return render_prompt(asked.messages) if asked.text is None else asked.text

    def render_piece(self, asked: Asked, answer: Message) -> TextPiece:
        """Return as texts the prompt, and the answer with a space before it."""
        return self.render_prompt(asked, answer), f" {answer.content}"

    render_observation = staticmethod(render_plain_observation)
