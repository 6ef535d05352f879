"""Encode text to token ids: prompts, responses, and the observations of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf.base.errors import ConfigError
from rlhf.config.choices import Template
from rlhf.data.chat import ChatTemplate, plain_observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Encoder:
    """An encoder of text to ids with one tokenizer, separately for prompts and responses."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: Template = Template.plain
    ) -> None:
        """Store the tokenizer; ``template`` selects the format of conversations.

        Raises:
            ConfigError: if ``template`` is auto, which the launcher replaces where it can.
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
        """Return the ids that the tokenizer puts before every text: none, or its opening token."""
        return self._encode_with_opening([""])[0]

    def prompts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts that begin a sequence, with the opening token if there is one."""
        if self._chat is None:
            return self._encode_with_opening(texts)
        return self._encode([self._chat.render_prompt(text) for text in texts])

    def responses(self, prompts: list[str], texts: list[str]) -> list[list[int]]:
        """Return the ids of the responses ``texts`` to ``prompts``, the end token included."""
        if self._chat is None:
            return self.texts_with_end(texts)
        pairs = list(zip(prompts, texts, strict=True))
        openings = [self._chat.render_prompt(prompt) for prompt in prompts]
        endings = [self._chat.render_response(prompt, text) for prompt, text in pairs]
        wholes = self._encode([a + b for a, b in zip(openings, endings, strict=True)])
        # A sequence must begin with the ids of the prompt in a rollout. If the tokenizer merges
        # letters of prompt and response into one token, the response is encoded separately.
        return [
            whole[len(opening) :] if whole[: len(opening)] == opening else apart
            for whole, opening, apart in zip(
                wholes, self._encode(openings), self._encode(endings), strict=True
            )
        ]

    def observations(self, said: list[tuple[str, str]]) -> list[list[int]]:
        """Return the ids between a response's end token and the next turn, for (role, text)."""
        render = plain_observation if self._chat is None else self._chat.observation
        return self._encode([render(role, text) for role, text in said])

    def texts_with_end(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of plain texts, without an opening token and with the end token."""
        return [[*ids, self.end_id] for ids in self._encode(texts)]

    def _encode_with_opening(self, texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = self._tokenizer(texts).input_ids if texts else []
        return [ids[:-1] if len(ids) > 1 and ids[-1] == self.end_id else ids for ids in encoded]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(texts, add_special_tokens=False).input_ids
        return encoded
