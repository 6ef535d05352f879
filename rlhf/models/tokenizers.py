"""Load a tokenizer from a folder or the hub, or train one on the run's own text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import ModelInit
from rlhf.config.schema.model import ModelConfig
from rlhf.models.sources import RUN_FOLDER, build_load_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

END_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
SENTENCE = "A text."  # an intact tokenizer decodes its tokens to the same letters


def load_or_train_tokenizer(
    model: ModelConfig, *, key: str, texts: Iterable[str]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that ``model`` (the value of config key ``key``) uses.

    A model with random weights and no tokenizer gets a tokenizer trained on ``texts``.

    Raises:
        CheckpointError: if there is no tokenizer, or it has no end token.
        ConfigError: if the end token is empty, or the vocabulary is too small.
    """
    if model.end_token is not None and not model.end_token.strip():
        raise ConfigError(
            f"{key}.end_token={model.end_token!r}: must be the text of a token; "
            f"use {key}.end_token=null for the tokenizer's own end token"
        )
    place_key, place = tokenizer_place(model, key=key)
    if place is None:
        return train_tokenizer(
            texts, vocab_size=model.vocab_size, end_token=model.end_token or END_TOKEN
        )
    return load_tokenizer(
        str(expand_user_path(place, key=place_key)),
        key=place_key,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        end_token=model.end_token,
    )


def tokenizer_place(model: ModelConfig, *, key: str) -> tuple[str, str | None]:
    """Return the tokenizer's config key, and its path or hub id: None if it is to be trained."""
    if model.tokenizer is not None or model.init is not ModelInit.pretrained:
        return f"{key}.tokenizer", model.tokenizer
    return f"{key}.path", model.path


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, end_token: str = END_TOKEN
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens; it encodes any text."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level_bpe(texts, vocab_size=vocab_size, end_token=end_token),
        pad_token=PAD_TOKEN,
        eos_token=end_token,
        clean_up_tokenization_spaces=False,
    )


def train_byte_level_bpe(
    texts: Iterable[str], *, vocab_size: int, end_token: str = END_TOKEN
) -> Tokenizer:
    """Train the same tokenizer as ``train_tokenizer``; return it without transformers' wrapper.

    Raises:
        ConfigError: if ``vocab_size`` is too small for all bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [PAD_TOKEN, end_token]
    if vocab_size < len(alphabet) + len(special):
        raise ConfigError(
            f"model.vocab_size={vocab_size} is too small: a byte-level tokenizer needs at least "
            f"{len(alphabet) + len(special)} tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(
    place: str | Path,
    *,
    key: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    end_token: str | None = None,
    needs_end: bool = True,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id, with an end and a padding token.

    ``end_token`` replaces the tokenizer's own end token; if it is new to the vocabulary, it is
    added as a single token.

    A tokenizer without a padding token pads with its unknown token or, if that is missing too, with
    its end token. Padding is never mistaken for an end, because batches carry explicit lengths.

    Raises:
        CheckpointError: if there is no tokenizer, it has no end token although ``needs_end``, or
            it does not decode a sentence that it has encoded.
    """
    from transformers import AutoTokenizer

    build_error = partial(build_load_error, place, key=key, what="a tokenizer")
    with translate_errors(build_error):
        tokenizer = AutoTokenizer.from_pretrained(
            str(place), revision=revision, trust_remote_code=trust_remote_code
        )
        if end_token is not None:
            tokenizer.add_special_tokens({"eos_token": end_token})
        # This raises an error for damaged files. If files are missing, the tokenizer is empty.
        decoded = tokenizer.decode(tokenizer(SENTENCE, add_special_tokens=False).input_ids)
    if _keep_letters(decoded) != _keep_letters(SENTENCE):
        reason = f"it reads {SENTENCE!r} as {decoded!r}: files are missing, or of another model"
        raise build_error(reason)
    if needs_end and tokenizer.eos_token_id is None and key == RUN_FOLDER:
        raise build_error("it has no end token")
    if needs_end and tokenizer.eos_token_id is None:
        raise CheckpointError(
            f"{key}: the tokenizer of {place} has no end token (eos_token); "
            f"set {key.partition('.')[0]}.end_token=TEXT"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
    return tokenizer


def _keep_letters(text: str) -> str:
    """Return the letters in lower case: tokenizers may change case, spaces and punctuation."""
    return "".join(filter(str.isalpha, text.casefold()))


def with_separate_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return ``tokenizer``, or a copy that pads with another special token than its end token.

    transformers reads a score at the last token that is no padding. A tokenizer whose only special
    token is the end token gets no padding, so that transformers refuses a batch of several texts.
    """
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return tokenizer
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    others = [text for text in special if text != tokenizer.eos_token]
    changed = copy.deepcopy(tokenizer)
    changed.pad_token = min(others, key=lambda text: "pad" not in text.lower(), default=None)
    return changed


class Tokens(NamedTuple):
    """The tokens of a tokenizer: their ids, and the texts of the end and the padding token."""

    ids: Mapping[str, int]
    end: str
    pad: str | None

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Return the tokens of a loaded tokenizer."""
        return cls(tokenizer.get_vocab(), str(tokenizer.eos_token), tokenizer.pad_token)

    @property
    def last_id(self) -> int:
        """Return the largest id that a policy may write; it writes no separate padding token."""
        return max(i for text, i in self.ids.items() if text == self.end or text != self.pad)


def read_tokens(model: ModelConfig, *, key: str) -> Tokens | None:
    """Return the tokens of ``model``, the value of ``key``, without importing transformers.

    Returns None if no local folder has them, for example if the run trains the tokenizer.
    """
    folder = Path(str(tokenizer_place(model, key=key)[1])).expanduser()
    try:
        stored, settings = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("tokenizer.json", "tokenizer_config.json")
        )
        ids = stored["model"]["vocab"]
        ids = dict(ids) if isinstance(ids, dict) else {each[0]: i for i, each in enumerate(ids)}
        ids |= {each["content"]: each["id"] for each in stored["added_tokens"]}
        added = settings.get("added_tokens_decoder") or {}
        ids |= {each["content"]: int(number) for number, each in added.items()}
        named = (settings.get(key) for key in ("eos_token", "pad_token"))
        end, pad = (each["content"] if isinstance(each, dict) else each for each in named)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # older formats
        return None
    end = model.end_token or end
    return Tokens(ids, end, pad) if isinstance(end, str) else None


def check_same_tokens(
    actor: Tokens,
    other: Tokens,
    *,
    place: str | Path,
    name: str = "reward_model",
    way_out: str = ", train a reward model with phase=pipeline, or let this one read text with its "
    "own tokenizer: replace reward_model.path with 'rewards.NAME={{kind: scorer, path: {place}}}' "
    "(docs/rewards.md)",
) -> None:
    """Raise ConfigError unless ``other``, of config key ``name``, reads what ``actor`` writes.

    Each token must have the same id, except a separate padding token; ``other`` may have more.
    """
    texts = {number: text for text, number in other.ids.items()}
    wrong = [
        text
        for text, number in actor.ids.items()
        if texts.get(number) != text and (text in other.ids or text != actor.pad)
    ]
    if wrong:
        raise ConfigError(
            f"{name} ({place}) and model have different tokenizers: {len(wrong)} of the "
            f"{len(actor.ids)} tokens of model, such as {wrong[0]!r}, have another id or none: "
            f"{name} would read different text from what the actor writes. Use a model of the same "
            f"family{way_out.format(place=place)}"
        )
    if actor.end != other.end:
        advice = ", or if it was trained with both: reward_model.tokenizer=FOLDER_OF_MODEL"
        raise ConfigError(
            f"{name} ({place}) has the end token {other.end!r}, but model has {actor.end!r}, where "
            f"scores are read: use model.end_token={other.end!r}{advice * (name == 'reward_model')}"
        )
