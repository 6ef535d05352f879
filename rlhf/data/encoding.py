"""Encode prompts, responses and the observations of episodes to token ids.

With data.template=chat the tokenizer's chat template renders the messages of a prompt. A prompt of
text with turns ("\\n\\nHuman: ..\\n\\nAssistant:") is first parsed into messages. Opening tokens
then come from the template, not from the tokenizer. A response ends with the tokenizer's end token;
text that the template writes after this token is cut off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import ConfigError, DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.config.choices import Template
from rlhf.data.layouts import ASSISTANT_TURN, render_prompt, split_turns
from rlhf.data.records import SPEAKERS, Message, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PromptForm = str | tuple[Message, ...]  # a prompt: text, which may have turns, or messages
PROBE = "probe42"  # a response that is searched for in rendered text
OBSERVERS = {"user": "Human", "tool": "Tool"}  # role of an observation -> speaker in plain text


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
    said = Message("user", text if role == "user" else f"{OBSERVERS[role]}: {text}")
    return Record(render_plain_observation(role, text), messages=(said,))


def all_end_in_assistant(prompts: Iterable[str]) -> bool:
    """Return True if there is a prompt and every prompt ends in "Assistant:"."""
    found = [prompt.rstrip().endswith(ASSISTANT_TURN) for prompt in prompts]
    return bool(found) and all(found)


class UnusableTemplateError(DataError):
    """The error for a chat template that cannot render a prompt; ``problem`` is the reason."""

    def __init__(self, problem: str, prompt: PromptForm) -> None:
        """Build the error message from the problem and the prompt."""
        text = prompt if isinstance(prompt, str) else prompt[-1].content
        super().__init__(
            f"data.template=chat: the chat template {problem}, for the prompt {text[:80]!r}; use "
            "data.template=plain, or fix the tokenizer's chat_template"
        )
        self.problem = problem


class ChatTemplate:
    """A tokenizer's chat template, which renders prompts and responses and checks the result.

    Every method raises a DataError if the template cannot render a turn, or renders earlier turns
    differently because of a later turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Determine how the template ends a response.

        Raises:
            DataError: if there is no template, it fails or drops the response, or it ends a
                response with anything but the tokenizer's end token.
        """
        if not tokenizer.chat_template:
            raise DataError(
                "data.template=chat: the tokenizer has no chat_template; use data.template=plain, "
                "or the tokenizer of a chat model (model.tokenizer=FOLDER_OR_HUB_ID)"
            )
        self._tokenizer: Any = tokenizer
        question = "\n\nHuman: question\n\nAssistant:"
        self._head, found, self._tail = self._text_after_prompt(question, PROBE).rpartition(PROBE)
        if not found:
            raise UnusableTemplateError("drops the response", question)
        self._end = self._cut_after_end_token(self._tail)

    def render_prompt(self, prompt: PromptForm) -> str:
        """Return the rendered prompt, which ends where the response begins."""
        messages, begun = _messages_of(prompt)
        return self._render(messages, prompt, add_generation_prompt=True) + begun

    def render_response(self, prompt: PromptForm, response: str) -> str:
        """Return the text after the rendered ``prompt``, up to and including the end token."""
        following = self._text_after_prompt(prompt, response)
        body = following.removesuffix(self._tail)
        if not following.endswith(self._tail) or not body.removeprefix(self._head).strip():
            raise UnusableTemplateError(
                "drops the response, or ends it differently from other responses", prompt
            )
        return body + self._end

    def render_observation(self, role: str, text: str) -> str:
        """Return the text between a response's end token and the assistant's next turn."""
        question = {"role": "user", "content": "question"}
        # The answer begins with a thought: some templates drop the thoughts of earlier turns.
        answer = {"role": "assistant", "content": f"<think>\n{PROBE}\n</think>\n\n{PROBE}"}
        said, added = [question, answer], {"role": role, "content": text}
        before = self._render(said, PROBE, add_generation_prompt=False)
        before = before.removesuffix(self._tail) + self._end
        whole = self._render([*said, added], PROBE, add_generation_prompt=True)
        if not whole.startswith(before):
            raise DataError(
                "data.template=chat: the chat template renders earlier messages differently "
                f"when another message follows ({role}), so tokens would change after they were "
                "sampled; use data.template=plain, or a chat_template that keeps every message "
                "as it was said, thoughts included"
            )
        return whole[len(before) :]

    def _text_after_prompt(self, prompt: PromptForm, response: str) -> str:
        messages, begun = _messages_of(prompt)
        content = begun + _remove_joining_space(response, prompt, has_begun=bool(begun))
        opening = self.render_prompt(prompt)
        answered = [*messages, {"role": "assistant", "content": content}]
        whole = self._render(answered, prompt, add_generation_prompt=False)
        if not whole.startswith(opening):
            raise UnusableTemplateError("renders a prompt differently if an answer follows", prompt)
        return whole[len(opening) :]

    def _render(
        self, messages: list[dict[str, str]], prompt: PromptForm, *, add_generation_prompt: bool
    ) -> str:
        if not messages:
            raise DataError(f"data.template=chat: there is no message in the prompt {prompt!r}")
        roles = ", ".join(message["role"] for message in messages)
        with translate_errors(
            lambda reason: UnusableTemplateError(f"fails on messages of {roles} ({reason})", prompt)
        ):
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        return rendered

    def _cut_after_end_token(self, tail: str) -> str:
        end: str = self._tokenizer.eos_token
        if end in tail:
            return tail[: tail.index(end) + len(end)]
        if not tail.strip():
            return end
        turn_end = tail.split(maxsplit=1)[0]
        raise DataError(
            f"data.template=chat: the template ends a response with {turn_end!r}, and the "
            f"tokenizer's end token is {end!r}: set model.end_token={turn_end}"
        )


def _messages_of(prompt: PromptForm) -> tuple[list[dict[str, str]], str]:
    messages, begun = split_turns(prompt) if isinstance(prompt, str) else (prompt, "")
    return [message._asdict() for message in messages], begun


def _remove_joining_space(response: str, prompt: PromptForm, *, has_begun: bool) -> str:
    """Return a response without the space that joins it to the prompt."""
    if not isinstance(prompt, str):
        return response.removeprefix(" ")
    is_joined = not has_begun and re.match(r" \S", response)
    return response.rstrip()[1 if is_joined else 0 :]


class Encoder:
    """An encoder of text to ids with one tokenizer, separately for prompts and responses."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Template = Template.plain
    ) -> None:
        """Store the tokenizer; ``template`` selects the format of conversations.

        Raises:
            ConfigError: if ``template`` is auto, which the launcher could not replace.
            DataError: if ``template`` is chat and the tokenizer's chat template cannot be used.
        """
        if template is Template.auto:
            raise ConfigError(
                "data.template=auto: the launcher could not read whether the tokenizer has a chat "
                "template; set data.template=chat or data.template=plain"
            )
        self._tokenizer = tokenizer
        self._chat = ChatTemplate(tokenizer) if template is Template.chat else None
        self.end_id: int = tokenizer.eos_token_id

    def opening_ids(self) -> list[int]:
        """Return the ids that the tokenizer puts before every text: [], or its opening token."""
        return self._encode_with_opening([""])[0]

    def prompt_of(self, record: Record) -> PromptForm:
        """Return a record's prompt in the form that the template needs: messages, or text."""
        if self._chat is None or record.messages is None:
            return record.prompt or ""
        return record.messages

    def find_template_error(self, record: Record, *answers: str) -> UnusableTemplateError | None:
        """Render a record's prompt and its fields ``answers``; return the error, or None."""
        try:
            if self._chat is not None:
                self._chat.render_prompt(self.prompt_of(record))
                for name in answers:
                    self._chat.render_response(self.prompt_of(record), getattr(record, name))
        except UnusableTemplateError as error:
            return error
        return None

    def encode_prompts(self, prompts: Sequence[PromptForm]) -> list[list[int]]:
        """Return the ids of prompts, with the opening token if there is one."""
        if self._chat is None:
            plain = (each if isinstance(each, str) else render_prompt(each) for each in prompts)
            return self._encode_with_opening(list(plain))
        return self._encode([self._chat.render_prompt(prompt) for prompt in prompts])

    def encode_responses(self, prompts: Sequence[PromptForm], texts: list[str]) -> list[list[int]]:
        """Return the ids of the responses ``texts`` to ``prompts``, the end token included."""
        if self._chat is None:
            return self.encode_texts_with_end(texts)
        pairs = list(zip(prompts, texts, strict=True))
        openings = [self._chat.render_prompt(prompt) for prompt in prompts]
        endings = [self._chat.render_response(prompt, text) for prompt, text in pairs]
        wholes = self._encode([a + b for a, b in zip(openings, endings, strict=True)])
        # A sequence must begin with the ids that the prompt has in a rollout. If the tokenizer
        # merges letters of prompt and response into one token, the response is encoded separately.
        return [
            whole[len(opening) :] if whole[: len(opening)] == opening else apart
            for whole, opening, apart in zip(
                wholes, self._encode(openings), self._encode(endings), strict=True
            )
        ]

    def encode_observations(self, said: list[tuple[str, str]]) -> list[list[int]]:
        """Return the ids of each observation (role, text), up to where the next response begins."""
        render = render_plain_observation if self._chat is None else self._chat.render_observation
        return self._encode([render(role, text) for role, text in said])

    def encode_texts_with_end(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of plain texts, without an opening token and with the end token."""
        return [[*ids, self.end_id] for ids in self._encode(texts)]

    def _encode_with_opening(self, texts: list[str]) -> list[list[int]]:
        encoded = self._encode(texts, add_special_tokens=True)
        return [ids[:-1] if len(ids) > 1 and ids[-1] == self.end_id else ids for ids in encoded]

    def _encode(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,  # building a mask takes as long as encoding
            return_token_type_ids=False,
        ).input_ids
        return encoded
