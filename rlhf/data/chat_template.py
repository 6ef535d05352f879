"""Render messages by a tokenizer's chat template, and check that it shows all of them.

Messages reach the template (data.template=chat) as they were read. The opening tokens come from the
template, not from the tokenizer. An answer ends with the tokenizer's end token; text that the
template writes after this token belongs to the next context.

The prompt of an answer is what the template renders with add_generation_prompt, and the answer is
what the template adds to it for the conversation with the answer. So prompt and answer together are
the text that transformers' apply_chat_template renders, and both are what the model reads and
writes in a rollout. If a template drops thoughts but its prompt begins one (as DeepSeek-R1's does),
the answer is what a model writes after that prompt: the rest of the thought, and the text.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.data.plain_turns import Asked, TextPiece, UnusableTemplateError
from rlhf.data.records import CALLS, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "probe42"  # a text that is searched for in rendered text
OPEN_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
ENDS_OF_THOUGHTS = ("</think>", "<channel|>")  # one of these in a prompt ends the model's thought


class ChatTemplate:
    """A tokenizer's chat template, which renders prompts and responses and checks the result.

    Methods raise UnusableTemplateError if the template cannot render a turn, does not show it, or
    renders a prompt differently if an answer follows (DataError from ``render_observation``).
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
        self._hidden: dict[object, str] = {}  # shape of a conversation -> its parts not shown
        question, answer = Asked((Message("user", "question"),)), Message("assistant", PROBE)
        self._in_parts = False
        self._set_form_of_contents(question, answer)
        answered = self._render(question, answer=answer)
        _, probe, self._tail = answered.rpartition(PROBE)
        if not probe:
            raise UnusableTemplateError("the chat template drops the response", question)
        self._end = self._cut_after_end_token(self._tail)

    def render_prompt(self, prompt: Asked) -> str:
        """Return the rendered prompt, which ends where the response begins."""
        self._require_shown(prompt)
        return self._render(prompt) + prompt.begun

    def render_piece(self, prompt: Asked, answer: Message) -> TextPiece:
        """Return the rendered prompt, and the answer with the end token that follows it."""
        opening = self.render_prompt(prompt)
        if answer.shown:
            self._require_shown(prompt._replace(messages=(*prompt.messages, answer)))
        whole = self._render(prompt, answer=answer)
        thought = answer.thought or "".join(OPEN_THOUGHT.findall(answer.content)[:1])
        body = whole.removesuffix(self._tail)
        if whole.startswith(opening):
            following = body[len(opening) :]
        else:
            following = self._complete_begun_answer(prompt, answer, opening, body)
        if thought.strip() not in following:
            raise UnusableTemplateError("the chat template drops the reasoning of answers", prompt)
        content = OPEN_THOUGHT.sub("", answer.content).strip()
        has_end = whole.endswith(self._tail)
        if not has_end or not following.strip() or content not in following:
            raise UnusableTemplateError(
                "the chat template drops the response, or ends it differently from other responses",
                prompt,
            )
        return opening, following + self._end

    def _complete_begun_answer(
        self, prompt: Asked, answer: Message, opening: str, body: str
    ) -> str:
        """Return what a model writes after a prompt that begins or ends a thought.

        ``body``, the conversation with the answer, lacks what ``opening`` adds for the model, such
        as ``<think>``.
        """
        shown = self._render(prompt, answer=Message("assistant", PROBE))
        pairs = zip(opening, shown, strict=False)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        common, begun = opening[:num_common], opening[num_common:]
        text = answer.content
        if answer.thought:
            text = f"<think>\n{answer.thought.strip()}\n</think>\n\n{text}"
        thinks = OPEN_THOUGHT.match(text)
        if any(mark in begun for mark in ENDS_OF_THOUGHTS):  # the model's thought is over
            if body.startswith(common) and not thinks:
                return body[len(common) :]
        elif begun.strip() == "<think>" and thinks and CALLS not in answer.shown:
            begun = begun if text.lstrip().startswith(begun) else begun.strip()
            return text.lstrip().removeprefix(begun)
        problem = "the chat template renders a prompt differently if an answer follows"
        if opening.rstrip().endswith("<think>") and not thinks:
            problem = "the chat template's prompt opens a reasoning block, but the answer has none"
        raise UnusableTemplateError(problem, prompt)

    def render_observation(self, role: str, text: str) -> str:
        """Return the text between a response's end token and the assistant's next turn."""
        # Test with a thought in the answer: some templates drop the thoughts of earlier turns.
        answer = Message("assistant", f"<think>\n{PROBE}\n</think>\n\n{PROBE}")
        asked = Asked((Message("user", "question"),))
        before = self._render(asked, answer=answer).removesuffix(self._tail) + self._end
        whole = self._render(Asked((*asked.messages, answer, Message(role, text))))
        if not whole.startswith(before):
            raise DataError(
                "data.template=chat: the chat template renders earlier messages differently when "
                f"another message follows ({role}), so tokens would change after they were "
                "sampled; use data.template=plain, or a chat_template that keeps every message "
                "unchanged, reasoning included"
            )
        return whole[len(before) :]

    def _set_form_of_contents(self, asked: Asked, answer: Message) -> None:
        """Choose the form of contents: text, or lists of parts if the template shows only these.

        Templates of models that read images too, such as SmolVLM's, take lists of parts.
        """
        for self._in_parts in (False, True):
            with suppress(UnusableTemplateError):
                if PROBE in self._render(asked, answer=answer):
                    return
        self._in_parts = False

    def _require_shown(self, asked: Asked) -> None:
        """Raise an error if the template does not show a message, a call or a tool.

        Each shape of a conversation (the roles and keys of its messages) is rendered once for this,
        with probe words in place of the texts.
        """
        if not asked.messages:
            raise UnusableTemplateError("there is no message in a prompt", asked)
        shape = (tuple((turn.role, *turn.shown) for turn in asked.messages), bool(asked.tools))
        if shape not in self._hidden:
            self._hidden[shape] = self._find_hidden(asked)
        if hidden := self._hidden[shape]:
            raise UnusableTemplateError(f"the chat template does not show {hidden}", asked)

    def _find_hidden(self, asked: Asked) -> str:
        """Return the parts of a conversation that the template does not show, joined by commas."""
        probes = Probes()
        *before, last = map(probes.replace_texts, asked.messages)
        tools = asked.tools and [probes.rename(tool, "tools") for tool in asked.tools]
        if last.role == "assistant":
            text = self._render(Asked(tuple(before), tools), answer=last)
        else:
            text = self._render(Asked((*before, last), tools))
        return ", ".join(
            dict.fromkeys(part for probe, part in probes.meanings.items() if probe not in text)
        )

    def _render(self, asked: Asked, *, answer: Message | None = None) -> str:
        """Return the rendered conversation up to where an answer begins, or with the ``answer``."""
        messages = [self._to_dict(message) for message in asked.messages]
        if answer is not None:
            messages.append(self._to_dict(answer._replace(content=asked.begun + answer.content)))
        roles = ", ".join(message["role"] for message in messages)
        with translate_errors(
            lambda reason: UnusableTemplateError(
                f"the chat template fails on messages of {roles} ({reason})", asked
            )
        ):
            rendered: str = self._tokenizer.apply_chat_template(
                messages, tools=asked.tools, tokenize=False, add_generation_prompt=answer is None
            )
        return rendered

    def _to_dict(self, message: Message) -> dict[str, Any]:
        text = message.content
        content = [{"type": "text", "text": text}] if self._in_parts else text
        return {"role": message.role, "content": content, **message.shown}

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


class Probes:
    """Words that stand for the texts of a conversation, to see which of them a template shows."""

    def __init__(self) -> None:
        """Start with no words."""
        self.meanings: dict[str, str] = {}  # word -> the part that it stands for

    def _add(self, meaning: str) -> str:
        word = f"{PROBE}x{len(self.meanings)}x"
        self.meanings[word] = meaning
        return word

    def replace_texts(self, message: Message) -> Message:
        """Return the message with words for its text and for the names of its calls."""
        content = self._add(f"a turn with the role {message.role}") if message.content else ""
        more = dict(message.more or {})
        if CALLS in more:
            more[CALLS] = [self.rename(call, CALLS) for call in more[CALLS]]
        return message._replace(content=content, more=more)

    def rename(self, item: Any, meaning: str) -> Any:
        """Return a tool, or the call of a tool, with a word instead of its name."""
        if not isinstance(item, dict):
            return item
        if isinstance(item.get("function"), dict):
            return {**item, "function": self.rename(item["function"], meaning)}
        return {**item, "name": self._add(meaning)} if "name" in item else item
