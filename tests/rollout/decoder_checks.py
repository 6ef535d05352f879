"""What every ``Decoder`` must do, checked against the model's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rlhf.base.ranks import Ranks
from rlhf.config.choices import When
from rlhf.models.families import find_decoder_modules
from rlhf.options.lora.models import adapter_of
from rlhf.rollout.decoders.decoder import Decoder, PackingDecoder, Texts
from rlhf.rollout.fast import FastRollout, FastSettings, KeptDecoder
from rlhf.rollout.sampling import SamplingSettings, StopTexts
from tests.rounding import terms_of, tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Builds the decoder of a model, with ``rows`` and ``tokens``.
DecoderFactory = Callable[["PreTrainedModel", int, int], Decoder]

VOCABULARY = 61
LENGTHS = (5, 1, 9, 3)
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,  # far from uniform, so that a wrong token shows
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": SMALL | {"ffn_dim": 24},
    "opt-350m": SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "llama": SMALL | {"num_key_value_heads": 2},
    "qwen2": SMALL | {"num_key_value_heads": 2},
    "qwen3": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "starcoder2": SMALL | {"num_key_value_heads": 2},
    "mistral": SMALL | {"num_key_value_heads": 2},
    "gpt_neox": SMALL,
    "gpt2": SMALL | GPT2,
    "bloom": SMALL | {"n_layer": 2, "n_head": 4},
    "gemma": SMALL | {"num_key_value_heads": 1, "head_dim": 8},
    "gemma3_text": SMALL
    | {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 64, "tie_word_embeddings": False},
    "phi": SMALL,
    "falcon": SMALL,
    "falcon-alibi": SMALL | {"alibi": True},
    "mpt": SMALL | {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "gptj": SMALL | GPT2 | {"rotary_dim": 4},
}


def tiny_model(family: str, **fields: Any) -> PreTrainedModel:
    """A random model in fp32 that never ends a response; biases and norms are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    model_type = family.partition("-")[0]
    config = AutoConfig.for_model(model_type, **FAMILIES[family] | special | fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def some_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def padded(prompts: list[list[int]]) -> Texts:
    """Prompts, with a column that is padding in every row."""
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths) + 1
    return Texts(torch.tensor([p + [0] * (width - len(p)) for p in prompts]), lengths)


def fast_rollout(
    sampling: SamplingSettings,
    *,
    stop: StopTexts | None = None,
    ranks: Ranks | None = None,
    kept: KeptDecoder | None = None,
    **settings: Any,
) -> FastRollout:
    """A fast rollout in fp32 without graphs, except as ``settings`` say."""
    plain = {"dtype": torch.float32, "max_rows": None, "gather_weights": When.auto}
    plain |= {"cuda_graphs": False, "mean_tokens": None}
    return FastRollout(
        sampling,
        FastSettings(**plain | settings),
        pad_id=0,
        stop=stop or StopTexts(None, ()),
        find_modules=find_decoder_modules,
        adapter_of=adapter_of,
        ranks=ranks or Ranks(),
        kept=kept,
    )


class AttentionByTorch:
    """What the Triton kernel computes, which the emulated GPU does not run; with a fault or not."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        memory: Tensor,
        pages: Tensor,
        at: Tensor,
        columns: int,
    ) -> Tensor:
        if self._fault == "launch":
            raise RuntimeError("out of resource: shared memory, Required: 300000")
        size, rows = memory.shape[3], torch.arange(len(at), device=at.device)
        for kept, newest in zip(memory, (key, value), strict=True):
            place = at - int(self._fault == "place")
            kept[pages[rows, place // size], :, place % size] = newest
        place = torch.arange(columns, device=at.device)
        is_seen = place <= at[:, None] if self._fault != "mask" else place <= at.max()
        if self._fault == "last row":
            pages = torch.cat([pages[:-1], pages[:1]])
        if self._fault == "pages":
            pages = pages[:, :1].expand_as(pages)
        keys, values = memory[:, pages].transpose(2, 3).flatten(3, 4)[:, :, :, :columns]
        shown = is_seen[:, None, None] if is_seen.ndim > 1 else is_seen
        return functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, shown, enable_gqa=True
        )[:, :, 0]


class Rows:
    """A decoder, the tokens that each of its rows should remember, and the logits it gave last."""

    def __init__(self, model: PreTrainedModel, decoder: Decoder) -> None:
        self.model, self.decoder = model, decoder
        self.sequences: list[list[int]] = []
        self.logits: list[Tensor] = []

    def join(self, prompts: list[list[int]]) -> None:
        """Prompts go into the rows behind those that there are."""
        logits_NV = self.decoder.prefill(padded(prompts), first_row=len(self.sequences))
        assert logits_NV.shape == (len(prompts), VOCABULARY)
        self.sequences += [list(prompt) for prompt in prompts]
        self.logits += list(logits_NV)

    def grow_and_join(self, tokens: list[int], prompts: list[list[int]]) -> None:
        """Every row takes a token, prompts go into the rows behind; in one pass where it can."""
        if not isinstance(self.decoder, PackingDecoder):
            self.grow(tokens)
            self.join(prompts)
            return
        positions = [len(sequence) for sequence in self.sequences]
        self.sequences = [[*s, t] for s, t in zip(self.sequences, tokens, strict=True)]
        self.sequences += [list(prompt) for prompt in prompts]
        newest = torch.tensor(tokens)
        logits_BV = self.decoder.decode_and_prefill(newest, positions, padded(prompts))
        assert logits_BV.shape == (len(self.sequences), VOCABULARY)
        self.logits = list(logits_BV)

    def grow(self, tokens: list[int]) -> None:
        """Every row takes a token."""
        positions = [len(sequence) for sequence in self.sequences]
        logits_BV = self.decoder.decode(torch.tensor(tokens), positions)
        assert logits_BV.shape == (len(tokens), VOCABULARY)
        self.logits = list(logits_BV)
        for sequence, token in zip(self.sequences, tokens, strict=True):
            sequence.append(token)

    def grow_greedily(self) -> None:
        """Every row takes its likeliest token."""
        self.grow([int(logits_V.argmax()) for logits_V in self.logits])

    def copy_last(self) -> None:
        """One more row, with what the last one remembers."""
        num_rows = len(self.sequences)
        columns = len(self.sequences[-1])
        self.decoder.copy_row(num_rows - 1, num_rows, columns=columns)
        self.sequences.append(list(self.sequences[-1]))
        self.logits.append(self.logits[-1])

    def park(self, row: int, place: int) -> list[int]:
        """A row moves to ``place`` behind all others; return what it holds."""
        parked = self.sequences[row]
        self.decoder.move_row(row, place, columns=len(parked))
        self.leave(row)
        return parked

    def resume(self, parked: list[tuple[int, list[int]]], texts: list[list[int]]) -> None:
        """Rows come back from their places, each with a text behind what it holds."""
        together = len(texts) if self.decoder.extends_together else 1
        for begin in range(0, len(texts), together):
            rows = slice(begin, begin + together)
            first, held = len(self.sequences), [len(tokens) for _, tokens in parked[rows]]
            for row, ((place, _), length) in enumerate(zip(parked[rows], held, strict=True)):
                self.decoder.move_row(place, first + row, columns=length)
            added = padded(texts[rows])._replace(starts=held)
            logits_NV = self.decoder.prefill(added, first_row=first)
            pairs = zip(parked[rows], texts[rows], strict=True)
            self.sequences += [tokens + text for (_, tokens), text in pairs]
            self.logits += list(logits_NV)

    def leave(self, row: int) -> None:
        """A row leaves; the last one takes its place."""
        last = len(self.sequences) - 1
        if row < last:
            self.decoder.move_row(last, row, columns=len(self.sequences[last]))
        self.sequences[row], self.logits[row] = self.sequences[last], self.logits[last]
        del self.sequences[last], self.logits[last]

    def check(self, half: float | None = None) -> None:
        """The log-probabilities are those of each row's sequence alone; ``half``: up to this."""
        for sequence, logits_V in zip(self.sequences, self.logits, strict=True):
            expected_V = self.model(torch.tensor([sequence])).logits[0, -1].log_softmax(-1)
            got_V = logits_V.log_softmax(-1)
            terms = terms_of(self.model, len(sequence)) + VOCABULARY
            allowed = tolerance(expected_V, terms=terms) if half is None else half
            torch.testing.assert_close(got_V, expected_V, atol=allowed, rtol=0)


@torch.no_grad()
def check_logprobs(model: PreTrainedModel, make: DecoderFactory) -> None:
    """Log-probabilities are those of a full forward pass, of ragged rows and of even ones."""
    for lengths in (LENGTHS, (4, 4, 4), (6,)):
        rows = Rows(model, make(model, 4, 24))
        rows.join(some_prompts(lengths))
        rows.check()
        for _ in range(3):
            rows.grow_greedily()
            rows.check()


@torch.no_grad()
def check_rows_are_independent(model: PreTrainedModel, make: DecoderFactory) -> None:
    """Rows that join late, are copied and leave change nothing for the others."""
    first, second, third, fourth = some_prompts((5, 12, 9, 3))
    rows = Rows(model, make(model, 4, 24))
    rows.join([first, second])
    rows.grow([7, 8])
    rows.join([third])
    rows.check()
    rows.copy_last()
    rows.check()
    rows.grow([11, 12, 13, 14])  # the copy goes its own way
    rows.check()
    rows.leave(1)  # the longest
    rows.grow([21, 22, 23])
    rows.check()
    rows.join([fourth])  # in memory that was used
    rows.grow([31, 32, 33, 34])
    rows.check()
    rows.leave(3)
    rows.leave(0)
    for _ in range(4):
        rows.grow_greedily()
        rows.check()


@torch.no_grad()
def check_prompts_join_a_step(model: PreTrainedModel, make: DecoderFactory) -> None:
    """Prompts beside the newest tokens of others, in a memory that others have used."""
    first, second, third, fourth = some_prompts((5, 12, 9, 3))
    rows = Rows(model, make(model, 4, 24))
    rows.join([second])
    rows.grow_and_join([7], [first])
    rows.check()
    rows.leave(0)
    rows.grow_and_join([8], [third, fourth])
    rows.check()
    rows.grow([21, 22, 23])
    rows.check()


@torch.no_grad()
def check_rows_are_extended(model: PreTrainedModel, make: DecoderFactory) -> None:
    """Rows wait while others decode, and then go on with several tokens at once."""
    first, second, third, fourth = some_prompts((5, 9, 3, 4))
    rows = Rows(model, make(model, 8, 24))
    rows.join([first, second, third, fourth])
    rows.grow([7, 8, 9, 10])
    parked = [(4, rows.park(1, 4)), (6, rows.park(0, 6))]
    rows.grow_greedily()
    rows.check()
    rows.resume(parked, some_prompts((2, 6)))
    rows.check()
    rows.grow_greedily()
    rows.check()
    if isinstance(rows.decoder, PackingDecoder):  # beside the newest tokens of the others
        held = rows.park(0, 5)
        rows.decoder.move_row(5, 3, columns=len(held))
        added = padded([[11, 12, 13]])._replace(starts=[len(held)])
        positions = [len(sequence) for sequence in rows.sequences]
        rows.logits = list(
            rows.decoder.decode_and_prefill(torch.tensor([1, 2, 3]), positions, added)
        )
        rows.sequences = [[*s, t] for s, t in zip(rows.sequences, [1, 2, 3], strict=True)]
        rows.sequences.append([*held, 11, 12, 13])
        rows.check()


CHECKS = (
    check_rows_are_extended,
    check_logprobs,
    check_rows_are_independent,
    check_prompts_join_a_step,
)
