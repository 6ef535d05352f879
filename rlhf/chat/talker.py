"""Load a policy on this machine's best device, and sample its answers as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf.base.decoder_modules import end_token_ids
from rlhf.base.errors import CheckpointError, DataError
from rlhf.config.choices import Dtype
from rlhf.data.encoding import Encoder
from rlhf.engine.devices import TORCH_DTYPES, best_device, resolve_dtype
from rlhf.models.build import build_actor
from rlhf.models.sources import ModelSource
from rlhf.rollout.hf import replace_generation_config
from rlhf.rollout.sampling import SamplingSettings, StopTexts

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

ChatMessage = Mapping[str, str]
WriteText = Callable[[str], None]


class SampledAnswer(NamedTuple):
    """An answer as text and token ids; ``ending`` is ended, cut (too long) or stopped (Ctrl-C)."""

    text: str
    ids: list[int]
    ending: str


class Talker:
    """A language model with its tokenizer, which answers conversations or raw prompts.

    A run's tokenizer has a chat template if and only if the training prompts were conversations.
    """

    def __init__(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        dtype: Dtype,
        *,
        stop: Sequence[str] = (),
    ) -> None:
        """Load the language model of ``source``; ``dtype`` is fp32 or auto.

        An answer ends with an end token of the model, or with a text in ``stop``.
        """
        model: Any = build_actor(source, tokenizer, seed=0)
        device = best_device()
        target, precision = torch.device(device.value), TORCH_DTYPES[resolve_dtype(dtype, device)]
        # Buffers keep their precision, as in training: in bf16 the rotary angles would be wrong.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(target, precision)
        model.to(target).eval()
        self.tokenizer = tokenizer
        self._model = model
        self._stop = stop
        self._end_ids = list(end_token_ids(model))

    @property
    def expects_conversations(self) -> bool:
        """Return True if prompts are conversations, False if each prompt is one plain text."""
        return self.tokenizer.chat_template is not None

    @property
    def context_length(self) -> int | None:
        """Return the most tokens of prompt and answer together; None if there is no limit."""
        limit: int | None = getattr(self._model.config, "max_position_embeddings", None)
        return limit

    def encode_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of a conversation up to the answer, formatted as in training.

        Raises:
            DataError: if the chat template cannot render the conversation.
        """
        from jinja2 import TemplateError

        if not self.expects_conversations:
            return Encoder(self.tokenizer).encode_prompts([messages[-1]["content"]])[0]
        tokenizer: Any = self.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template fails on the messages {roles}: {error}") from error
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def answer(
        self, prompt_ids: list[int], sampling: SamplingSettings, write: WriteText
    ) -> SampledAnswer:
        """Sample an answer and pass its text to ``write`` as it grows; Ctrl-C stops it.

        At temperature 0, each token is the likeliest one.
        """
        streamer = _build_streamer(self.tokenizer, write)
        stop = StopTexts(self.tokenizer, self._stop)

        def has_stop_text(ids_1S: Tensor, *_: object, **__: object) -> Tensor:
            ids = ids_1S[0, len(prompt_ids) :].tolist()
            return torch.tensor([stop.completes_stop_text(ids)], device=ids_1S.device)

        def refuse_nan(_: Tensor, logits_1V: Tensor) -> Tensor:
            if logits_1V.isnan().any():
                raise CheckpointError(
                    f"{self._model.name_or_path or 'the model'}: its logits are NaN, so its "
                    "weights are damaged or its training diverged; choose another model, such as "
                    "--model sft of a run"
                )
            return logits_1V

        ids_1P = torch.tensor([prompt_ids], device=self._model.device)
        settings = self._generation_config(sampling)
        try:
            with torch.no_grad(), replace_generation_config(settings, self._model):
                self._model.generate(
                    input_ids=ids_1P,
                    attention_mask=torch.ones_like(ids_1P),
                    generation_config=settings,
                    streamer=streamer,
                    stopping_criteria=[has_stop_text] if stop else None,
                    logits_processor=[refuse_nan],
                )
            ended = streamer.ids[-1] in self._end_ids or stop.completes_stop_text(streamer.ids)
            ending = "ended" if ended else "cut"
        except KeyboardInterrupt:
            ending = "stopped"
            streamer.end()
        return SampledAnswer(streamer.text.strip(), streamer.ids, ending)

    def _generation_config(self, sampling: SamplingSettings) -> GenerationConfig:
        from transformers import GenerationConfig

        sampled = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
        return GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            min_new_tokens=sampling.min_tokens or None,
            eos_token_id=self._end_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            **(sampled if sampling.temperature else {"do_sample": False}),
        )


def _build_streamer(tokenizer: PreTrainedTokenizerBase, write: WriteText) -> Any:
    """Return a streamer for ``generate`` that keeps ``ids`` and ``text``, and writes the text."""
    from transformers import TextStreamer

    class Stream(TextStreamer):  # type: ignore[misc]  # transformers is untyped
        """A streamer that stores the answer, and writes whole words without a leading space."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.ids: list[int] = []
            self.text = ""

        def put(self, value: Tensor) -> None:
            """Receive the prompt's ids, then each new token."""
            if not self.next_tokens_are_prompt:
                self.ids += value.flatten().tolist()
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
            """Store and write the next words."""
            text = text if self.text else text.lstrip()
            self.text += text
            write(text)

    return Stream()
