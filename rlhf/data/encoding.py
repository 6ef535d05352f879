"""Encode prompts, answers and the observations of episodes to token ids.

A record is rendered as *sequences* of *pieces*; a piece is a context and the answer that follows
it. A record with one answer is one piece: prompt and response. Plain turns are rendered by
``plain_turns.py``. A chat template (``chat_template.py``) gets messages as they were read; only a
prompt that is text in its source ("\\n\\nHuman: ..\\n\\nAssistant:") is parsed into messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Template
from rlhf.data.chat_template import ChatTemplate
from rlhf.data.layouts import split_turns
from rlhf.data.plain_turns import Asked, PlainTurns, TextPiece, UnusableTemplateError
from rlhf.data.records import Message, Record, find_learned_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EncodedPiece = tuple[list[int], list[int]]


class Encoder:
    """A renderer of records, which encodes prompts and responses separately with one tokenizer."""

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
        self._is_chat = template is Template.chat
        self._template: ChatTemplate | PlainTurns
        self._template = ChatTemplate(tokenizer) if self._is_chat else PlainTurns()
        self.end_id: int = tokenizer.eos_token_id

    def opening_ids(self) -> list[int]:
        """Return the ids that the tokenizer puts before every text: [], or its opening token."""
        return self._encode_with_opening([""])[0]

    def render_prompt(self, record: Record) -> str:
        """Return a record's prompt as text; raise UnusableTemplateError if it cannot be shown."""
        asked = self._prompt_of(record)
        self._refuse_special_tokens(asked)
        return self._template.render_prompt(asked)

    def render_response(self, record: Record, response: str) -> TextPiece:
        """Return the prompt and a response, such as ``record.chosen``, as texts."""
        asked, content = self._prompt_of(record), response
        if record.messages is not None:
            content = response.removeprefix(" ")  # layouts put a space before it
        elif not asked.begun and re.match(r" \S", response):
            content = response[1:]
        turn = Message("assistant", content)
        if record.seed is None and record.turns and response == record.chosen:
            turn = record.turns[find_learned_turns(record.turns)[-1]]  # with its thought and calls
        prompt, answer = self._render_piece(asked, turn)
        return prompt, answer if self._is_chat else response

    def render_answers(self, record: Record) -> list[list[TextPiece]]:
        """Return the sequences with all answers of a record that SFT learns.

        An answer is added to the sequence of the answer before it if its rendered prompt begins
        with that whole sequence. Otherwise, for example if the template drops the thoughts of
        earlier turns, it begins a new sequence.
        """
        if not record.turns:
            return [[self.render_response(record, record.chosen or "")]]
        if record.seed is not None:
            return [self._render_episode(record)]
        sequences: list[list[TextPiece]] = []
        written = None
        for index in find_learned_turns(record.turns):
            asked = Asked(record.turns[:index], record.tools)
            prompt, answer = self._render_piece(asked, record.turns[index])
            if written is not None and prompt.startswith(written):
                sequences[-1].append((prompt[len(written) :], answer))
            else:
                sequences.append([(prompt, answer)])
            written = prompt + answer if self._is_chat else None  # plain answers have no end token
        return sequences

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the ids of prompts, with the opening token if there is one."""
        return self.encode_contexts([self.render_prompt(Record(prompt)) for prompt in prompts])

    def encode_contexts(
        self, texts: Sequence[str], starts: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Return the ids of rendered contexts; those with ``starts`` False follow an end token."""
        starts = [True] * len(texts) if starts is None else starts
        encode_first = self._encode if self._is_chat else self._encode_with_opening
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
        if not self._is_chat:
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

    def encode_observations(self, turns: list[tuple[str, str]]) -> list[list[int]]:
        """Return the ids of each observation (role, text), up to where the next response begins."""
        return self._encode_after_end([self._template.render_observation(*turn) for turn in turns])

    def encode_texts_with_end(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of plain texts, without an opening token and with the end token."""
        return [[*ids, self.end_id] for ids in self._encode(texts)]

    def _prompt_of(self, record: Record) -> Asked:
        """Return a record's prompt; for a chat template, a text is parsed into messages."""
        text = record.prompt or ""
        if record.messages is not None or not self._is_chat:
            return Asked(record.messages or (), record.tools, text=text)
        messages, begun = split_turns(text)
        return Asked(tuple(messages), record.tools, begun, text)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Return a pattern of the tokenizer's special tokens, which would begin or end a turn."""
        added = self._tokenizer.added_tokens_decoder.values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _refuse_special_tokens(self, asked: Asked, *answer: Message) -> None:
        """Raise UnusableTemplateError if a message holds a special token as text."""
        for message in (*asked.messages, *answer) if asked.messages else ():
            for text in (message.content, *map(str, message.shown.values())):
                if match := self._special.search(text):
                    problem = f"a message holds the special token {match.group()} as text"
                    raise UnusableTemplateError(problem, asked)

    def _render_piece(self, asked: Asked, answer: Message) -> TextPiece:
        self._refuse_special_tokens(asked, answer)
        return self._template.render_piece(asked, answer)

    def _render_episode(self, record: Record) -> list[TextPiece]:
        """Return the responses of an episode, each with the prompt or observation before it."""
        pieces: list[TextPiece] = []
        for before, turn in pairwise(record.turns):
            if turn.role == "assistant":
                prompt, answer = self.render_response(record, f" {turn.content}")
                context = self._template.render_observation(*before[:2]) if pieces else prompt
                pieces.append((context, answer))
        return pieces

    def _encode_after_end(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts after an end token, which changes how some tokenizers encode."""
        if not self._is_chat:
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
