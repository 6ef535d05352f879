"""Render prompts, answers and the observations of episodes as text, and encode them to token ids.

A record is rendered as *sequences* of pieces: a context, and the answer that follows it. With plain
turns and without several answers to learn, that is one piece, prompt and response. Messages reach
the tokenizer's chat template (data.template=chat) as they were read; only a prompt that is text in
its source ("\\n\\nHuman: ..\\n\\nAssistant:") is parsed into messages. Opening tokens then come
from the template, not from the tokenizer. An answer ends with the tokenizer's end token; text that
the template writes after this token belongs to the next context.

The prompt of an answer is what the template renders with add_generation_prompt, and the answer is
what the template adds to it for the conversation with the answer. So prompt and answer together are
the text that transformers' apply_chat_template renders, and both are what the model reads and
writes in a rollout. Where a template writes no thought but its prompt begins one (DeepSeek-R1's),
the answer is what a model writes after that prompt: the rest of its thought, and its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf.base.errors import ConfigError, DataError
from rlhf.base.foreign_errors import translate_errors
from rlhf.config.choices import Template
from rlhf.data.layouts import split_turns
from rlhf.data.records import (
    ASSISTANT_TURN,
    CALLS,
    SPEAKERS,
    TOOL_SPEAKER,
    Message,
    Record,
    find_learned_turns,
    render_prompt,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Asked(NamedTuple):
    """The messages that an answer follows, the tools that it may call, and how it begins."""

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None = None
    begun: str = ""
    text: str | None = None
    """The prompt with plain turns, if it is not what ``render_prompt`` makes of the messages."""


TextPiece = tuple[str, str]  # a context, and the answer that follows it
EncodedPiece = tuple[list[int], list[int]]
PROBE = "probe42"  # a text that is searched for in rendered text
OBSERVERS = {"user": "Human", "tool": TOOL_SPEAKER}  # role of an observation -> its speaker
OPEN_THOUGHT = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
ENDS_OF_THOUGHTS = ("</think>", "<channel|>")  # in a prompt: it has ended the model's thought


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
    found = (prompt.rstrip().endswith(ASSISTANT_TURN) for prompt in prompts)
    return next(found, False) and all(found)


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


def require_plain_turns(prompt: Asked, *more: Message) -> None:
    """Raise UnusableTemplateError if plain turns cannot show a message, or there are tools."""
    messages = (*prompt.messages, *more)
    hidden = [key for message in messages for key in message.shown]
    hidden += ["a turn of a tool" for message in messages if message.role == "tool"]
    hidden += ["tools"] if prompt.tools else []
    if hidden:
        what = ", ".join(dict.fromkeys(hidden))
        raise UnusableTemplateError(f"plain turns cannot show {what}", prompt, Template.plain)


class ChatTemplate:
    """A tokenizer's chat template, which renders prompts and responses and checks the result.

    Every method raises UnusableTemplateError if the template cannot render a turn, does not show
    one, or renders earlier turns differently because of a later turn.
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
        self._hidden: dict[object, str] = {}  # shape of a conversation -> what is not shown of it
        question, answer = Asked((Message("user", "question"),)), Message("assistant", PROBE)
        self._in_parts = False
        self._set_form_of_contents(question, answer)
        answered = self._render(question, answer=answer)
        _, found, self._tail = answered.rpartition(PROBE)
        if not found:
            raise UnusableTemplateError("the chat template drops the response", question)
        self._end = self._cut_after_end_token(self._tail)

    def render_prompt(self, prompt: Asked) -> str:
        """Return the rendered prompt, which ends where the response begins."""
        self._require_shown(prompt)
        return self._render(prompt) + prompt.begun

    def render_answer(self, prompt: Asked, answer: Message, opening: str) -> str:
        """Return the text after the rendered prompt ``opening``, the end token included."""
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
            raise UnusableTemplateError("the chat template drops the thought of an answer", prompt)
        said = OPEN_THOUGHT.sub("", answer.content).strip()
        has_end = whole.endswith(self._tail)
        if not has_end or not following.strip() or said not in following:
            raise UnusableTemplateError(
                "the chat template drops the response, or ends it differently from other responses",
                prompt,
            )
        return following + self._end

    def _complete_begun_answer(
        self, prompt: Asked, answer: Message, opening: str, body: str
    ) -> str:
        """Return what a model writes after a prompt that begins or ends a thought.

        ``body``, the conversation with the answer, lacks what ``opening`` adds for the model, such
        as ``<think>``.
        """
        shown = self._render(prompt, answer=Message("assistant", PROBE))
        pairs = zip(opening, shown, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        common, begun = opening[:same], opening[same:]
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
            problem = "the chat template's prompt begins a thought, and the answer has none"
        raise UnusableTemplateError(problem, prompt)

    def render_observation(self, role: str, text: str) -> str:
        """Return the text between a response's end token and the assistant's next turn."""
        # The answer begins with a thought: some templates drop the thoughts of earlier turns.
        answer = Message("assistant", f"<think>\n{PROBE}\n</think>\n\n{PROBE}")
        said = Asked((Message("user", "question"),))
        before = self._render(said, answer=answer).removesuffix(self._tail) + self._end
        whole = self._render(Asked((*said.messages, answer, Message(role, text))))
        if not whole.startswith(before):
            raise DataError(
                "data.template=chat: the chat template renders earlier messages differently "
                f"when another message follows ({role}), so tokens would change after they were "
                "sampled; use data.template=plain, or a chat_template that keeps every message "
                "as it was said, thoughts included"
            )
        return whole[len(before) :]

    def _set_form_of_contents(self, asked: Asked, answer: Message) -> None:
        """Select contents as text, or as lists of parts if only these are shown.

        Templates of models that read images too, such as SmolVLM's, take lists of parts.
        """
        for self._in_parts in (False, True):
            with suppress(UnusableTemplateError):
                if PROBE in self._render(asked, answer=answer):
                    return
        self._in_parts = False

    def _require_shown(self, asked: Asked) -> None:
        """Raise an error if the template does not show a message, a call or a tool.

        Conversations of one shape, the roles and keys of their messages, are tried once, with words
        of their own instead of their texts.
        """
        if not asked.messages:
            raise UnusableTemplateError("there is no message in a prompt", asked)
        shape = (tuple((each.role, *each.shown) for each in asked.messages), bool(asked.tools))
        if shape not in self._hidden:
            self._hidden[shape] = self._find_hidden(asked)
        if hidden := self._hidden[shape]:
            raise UnusableTemplateError(f"the chat template does not show {hidden}", asked)

    def _find_hidden(self, asked: Asked) -> str:
        """Return what the template does not show of a conversation; "" if it shows all."""
        probes = Probes()
        *before, last = map(probes.replace_texts, asked.messages)
        tools = asked.tools and [probes.rename(tool, "tools") for tool in asked.tools]
        if last.role == "assistant":
            text = self._render(Asked(tuple(before), tools), answer=last)
        else:
            text = self._render(Asked((*before, last), tools))
        return ", ".join(
            dict.fromkeys(what for probe, what in probes.of.items() if probe not in text)
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
        """Begin without words."""
        self.of: dict[str, str] = {}  # word -> what it stands for

    def _add(self, what: str) -> str:
        word = f"{PROBE}x{len(self.of)}x"
        self.of[word] = what
        return word

    def replace_texts(self, message: Message) -> Message:
        """Return the message with words for its text and for the names of its calls."""
        content = self._add(f"a turn of the role {message.role}") if message.content else ""
        more = dict(message.more or {})
        if CALLS in more:
            more[CALLS] = [self.rename(call, CALLS) for call in more[CALLS]]
        return message._replace(content=content, more=more)

    def rename(self, item: Any, what: str) -> Any:
        """Return a tool, or the call of a tool, with a word instead of its name."""
        if not isinstance(item, dict):
            return item
        if isinstance(item.get("function"), dict):
            return {**item, "function": self.rename(item["function"], what)}
        return {**item, "name": self._add(what)} if "name" in item else item


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
        self._tokenizer: Any = tokenizer
        self._chat = ChatTemplate(tokenizer) if template is Template.chat else None
        self.end_id: int = tokenizer.eos_token_id

    def opening_ids(self) -> list[int]:
        """Return the ids that the tokenizer puts before every text: [], or its opening token."""
        return self._encode_with_opening([""])[0]

    def prompt_of(self, record: Record) -> Asked:
        """Return a record's prompt; for a chat template, a text is parsed into messages."""
        text = record.prompt or ""
        if record.messages is not None or self._chat is None:
            return Asked(record.messages or (), record.tools, text=text)
        messages, begun = split_turns(text)
        return Asked(tuple(messages), record.tools, begun, text)

    def render_prompt(self, record: Record) -> str:
        """Return a record's prompt as text; raise UnusableTemplateError if it cannot be shown."""
        return self._render_prompt(self.prompt_of(record))

    def render_response(self, record: Record, response: str) -> TextPiece:
        """Return the prompt and a response, such as ``record.chosen``, as texts."""
        asked, content = self.prompt_of(record), response
        if record.messages is not None:
            content = response.removeprefix(" ")  # layouts put it before the content of a message
        elif not asked.begun and re.match(r" \S", response):
            content = response[1:]
        said = Message("assistant", content)
        if record.seed is None and record.turns and response == record.chosen:
            said = record.turns[find_learned_turns(record.turns)[-1]]  # with its thought and calls
        prompt, answer = self._render_answer(asked, said)
        return prompt, response if self._chat is None else answer

    def render_answers(self, record: Record) -> list[list[TextPiece]]:
        """Return the sequences with all answers of a record that SFT learns.

        An answer continues the sequence of the one before it if its prompt begins with that whole
        sequence. A template that renders earlier turns differently, for instance without their
        thoughts, gives a sequence per answer.
        """
        if not record.turns:
            return [[self.render_response(record, record.chosen or "")]]
        if record.seed is not None:
            return [self._render_episode(record)]
        sequences: list[list[TextPiece]] = []
        written = None
        for index in find_learned_turns(record.turns):
            asked = Asked(record.turns[:index], record.tools)
            prompt, answer = self._render_answer(asked, record.turns[index])
            if written is not None and prompt.startswith(written):
                sequences[-1].append((prompt[len(written) :], answer))
            else:
                sequences.append([(prompt, answer)])
            written = prompt + answer if self._chat else None  # plain answers have no end token
        return sequences

    def encode_prompts(self, prompts: Sequence[str | Asked]) -> list[list[int]]:
        """Return the ids of prompts, with the opening token if there is one."""
        asked = (p if isinstance(p, Asked) else self.prompt_of(Record(p)) for p in prompts)
        return self.encode_contexts([self._render_prompt(each) for each in asked])

    def encode_contexts(
        self, texts: Sequence[str], starts: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Return the ids of rendered texts, which start a sequence or else follow an end token."""
        starts = [True] * len(texts) if starts is None else starts
        encode_first = self._encode_with_opening if self._chat is None else self._encode
        pairs = list(zip(texts, starts, strict=True))
        firsts = iter(encode_first([text for text, is_first in pairs if is_first]))
        later = iter(self._encode_after_end([text for text, is_first in pairs if not is_first]))
        return [next(firsts if is_first else later) for is_first in starts]

    def encode_pieces(self, sequences: Sequence[Sequence[TextPiece]]) -> list[list[EncodedPiece]]:
        """Return the ids of the context and of the answer, end token included, of every piece."""
        starts = [index == 0 for sequence in sequences for index in range(len(sequence))]
        pieces = [piece for sequence in sequences for piece in sequence]
        contexts = self.encode_contexts([context for context, _ in pieces], starts)
        answers = [answer for _, answer in pieces]
        if self._chat is None:
            ids_of_answers = self.encode_texts_with_end(answers)
        else:
            wholes = self.encode_contexts([a + b for a, b in pieces], starts)
            # A sequence must begin with the ids that the prompt has in a rollout. If the tokenizer
            # merges letters of prompt and answer into one token, the answer is encoded separately.
            ids_of_answers = [
                whole[len(context) :] if whole[: len(context)] == context else apart
                for whole, context, apart in zip(
                    wholes, contexts, self._encode(answers), strict=True
                )
            ]
        encoded = zip(contexts, ids_of_answers, strict=True)
        return [[next(encoded) for _ in sequence] for sequence in sequences]

    def encode_observations(self, said: list[tuple[str, str]]) -> list[list[int]]:
        """Return the ids of each observation (role, text), up to where the next response begins."""
        return self._encode_after_end([self._render_observation(*each) for each in said])

    def encode_texts_with_end(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of plain texts, without an opening token and with the end token."""
        return [[*ids, self.end_id] for ids in self._encode(texts)]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """A pattern of the tokenizer's special tokens, which would begin or end a turn."""
        added = self._tokenizer.added_tokens_decoder.values()
        names = sorted((each.content for each in added if each.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _render_prompt(self, asked: Asked, *answer: Message) -> str:
        """Return a prompt as text; raise UnusableTemplateError if it, or its answer, has none."""
        for message in (*asked.messages, *answer) if asked.messages else ():
            for text in (message.content, *map(str, message.shown.values())):
                if found := self._special.search(text):
                    problem = f"a message holds the special token {found.group()} as text"
                    raise UnusableTemplateError(problem, asked)
        if self._chat is not None:
            return self._chat.render_prompt(asked)
        require_plain_turns(asked, *answer)
        return render_prompt(asked.messages) if asked.text is None else asked.text

    def _render_answer(self, asked: Asked, answer: Message) -> TextPiece:
        prompt = self._render_prompt(asked, answer)
        if self._chat is None:
            return prompt, f" {answer.content}"
        return prompt, self._chat.render_answer(asked, answer, prompt)

    def _render_episode(self, record: Record) -> list[TextPiece]:
        """Return the responses of an episode, each after what the environment said before it."""
        pieces: list[TextPiece] = []
        for before, turn in pairwise(record.turns):
            if turn.role == "assistant":
                prompt, answer = self.render_response(record, f" {turn.content}")
                context = self._render_observation(*before[:2]) if pieces else prompt
                pieces.append((context, answer))
        return pieces

    def _render_observation(self, role: str, text: str) -> str:
        render = render_plain_observation if self._chat is None else self._chat.render_observation
        return render(role, text)

    def _encode_after_end(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that follow an end token, which some tokenizers encode apart."""
        if self._chat is None:
            return self._encode(texts)
        return [ids[1:] for ids in self._encode([self._tokenizer.eos_token + t for t in texts])]

    def _encode_with_opening(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._encode(texts, add_special_tokens=True)
        return [ids[:-1] if len(ids) > 1 and ids[-1] == self.end_id else ids for ids in encoded]

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,  # building a mask takes as long as encoding
            return_token_type_ids=False,
        ).input_ids
        return encoded
