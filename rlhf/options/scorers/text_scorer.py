"""Score prompts and responses as texts by frozen sequence-classification models.

Shapes: B = sequences, L = labels of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rlhf.base.errors import ConfigError, RewardError
from rlhf.base.foreign_errors import translate_errors
from rlhf.base.heartbeat import beat
from rlhf.base.types import copy_to_device, pad_rows
from rlhf.base.user_paths import expand_user_path
from rlhf.config.roles import Role
from rlhf.config.schema.model import ModelConfig
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.data.layouts import split_turns
from rlhf.data.records import Message
from rlhf.engine.select import AnyEngine, build_engine
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.models.pretrained import check_classifier, load_classifier
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.options.scorers.costs import list_scorers
from rlhf.options.scorers.keys import ScorerTemplate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Encoded = Mapping[str, list[int]]  # input_ids and, for some models, token_type_ids
DEFAULT_NAMES = ["LABEL_0", "LABEL_1"]  # transformers' names of two labels


class ScorerForm:
    """The form in which a scorer reads texts: its tokenizer, template, most tokens and label."""

    def __init__(self, key: str, part: RewardTerm, model: ModelConfig) -> None:
        """Read the files of ``model``, the scorer of the part ``key``, without its weights.

        Raises:
            CheckpointError: if there is no such model or tokenizer.
            ConfigError: if the template or the label cannot be used.
        """
        self.key, self.source = key, ModelSource.from_config(model, key=key)
        weightless = check_classifier(self.source)
        self._tokenizer: Any = load_tokenizer(
            str(self.source.path),
            key=self.source.key,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            needs_end=False,
        )
        self._template = self._choose_template(part)
        self._end = self._tokenizer.eos_token if part.add_end else ""
        self.label = self._find_label(part.label, weightless.config)
        config = weightless.config.get_text_config()
        self._vocab_size = config.vocab_size
        self.has_no_padding = config.pad_token_id not in range(config.vocab_size)
        positions = getattr(config, "max_position_embeddings", None)
        self.limit = int(min(self._tokenizer.model_max_length, positions or float("inf")))
        read = signature(weightless.forward).parameters.keys()
        self._inputs = {"input_ids", "token_type_ids"} & read

    def _choose_template(self, part: RewardTerm) -> ScorerTemplate:
        tokenizer, template = self._tokenizer, part.template
        if template is ScorerTemplate.auto and tokenizer.chat_template:
            template = ScorerTemplate.chat
        elif template is ScorerTemplate.auto:
            has_pairs = tokenizer.cls_token is not None and tokenizer.sep_token is not None
            template = ScorerTemplate.pair if has_pairs else ScorerTemplate.plain
        if template is ScorerTemplate.chat and not tokenizer.chat_template:
            raise ConfigError(
                f"{self.key}.template=chat: the tokenizer of {self.source.path} has no chat "
                "template; use template: plain, or pair"
            )
        if part.add_end and (template is not ScorerTemplate.plain or not tokenizer.eos_token):
            raise ConfigError(
                f"{self.key}.add_end=true: needs template=plain (here it is {template}) and a "
                "tokenizer with an end token; remove add_end"
            )
        return template

    def _find_label(self, label: str | None, config: PreTrainedConfig) -> int:
        names = [str(config.id2label[number]) for number in range(config.num_labels)]
        if label is None and (len(names) == 1 or names == DEFAULT_NAMES):
            return len(names) - 1
        if label in names:
            return names.index(label)
        if label is not None and label.isdecimal() and int(label) < len(names):
            return int(label)
        raise ConfigError(
            f"{self.key}.label={label or 'null'}: {self.source.path} has {len(names)} labels; must "
            f"be the label whose probability is the score: {' or '.join(names[:10])}"
        )

    def encode(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Encoded]:
        """Return the model's inputs for each prompt with its response, without padding.

        Raises:
            RewardError: if the chat template cannot show a prompt, or the model lacks a token.
        """
        is_plain = self._template is ScorerTemplate.plain
        is_chat = self._template is ScorerTemplate.chat  # which writes the special tokens itself
        first, second = [], []
        for prompt, response in zip(prompts, responses, strict=True):
            turns, begun = split_turns(prompt)
            answer = begun + response if begun else response.removeprefix(" ")
            if is_plain:
                first.append(f"{prompt}{response}{self._end}")
            elif is_chat:
                first.append(self._render([*turns, Message("assistant", answer)]))
            else:
                is_question = [turn.role for turn in turns] == ["user"]
                first.append(turns[0].content if is_question else prompt.strip())
                second.append(answer)
        encoded = self._tokenizer(
            first, second or None, add_special_tokens=not is_chat, verbose=False
        )
        largest = max(id_ for ids in encoded["input_ids"] for id_ in ids)
        if largest >= self._vocab_size:
            raise RewardError(
                f"{self.key}.path={self.source.path}: the tokenizer writes the token id {largest}, "
                f"but the model has {self._vocab_size} embeddings; use the tokenizer of this model"
            )
        names = [name for name in encoded if name in self._inputs]
        return [{name: encoded[name][row] for name in names} for row in range(len(first))]

    def _render(self, turns: Sequence[Message]) -> str:
        def build_error(reason: str) -> RewardError:
            return RewardError(
                f"{self.key}.template=chat: the chat template of {self.source.path} fails on "
                f"messages of {', '.join(turn.role for turn in turns)} ({reason}); use "
                "template: plain"
            )

        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        with translate_errors(build_error):
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))

    def check_prompts(self, prompts: Iterable[str]) -> None:
        """Raise RewardError if a prompt of each order of roles cannot be encoded."""
        prompt_of_roles = {tuple(turn.role for turn in split_turns(p)[0]): p for p in prompts}
        self.encode([*prompt_of_roles.values()], ["answer"] * len(prompt_of_roles))

    def cut(self, rows: Iterable[Encoded]) -> int:
        """Keep the opening token and the end of rows that are too long; return their number."""
        count = 0
        for row in rows:
            ids = row["input_ids"]
            opening, surplus = int(ids[0] in self._tokenizer.all_special_ids), len(ids) - self.limit
            if surplus > 0:
                count += 1
                for each in row.values():
                    del each[opening : opening + surplus]
        return count


@dataclass
class TextScorer:
    """A function from prompts and responses to scores (B,), by a model in its engine.

    ``micro`` rows of similar length are scored together; each has the score that the model gives to
    this row alone. ``say`` prints a warning the first time that texts are too long.
    """

    form: ScorerForm
    engine: AnyEngine
    device: torch.device
    micro: int
    say: Callable[[str], None]
    _has_warned: bool = False

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Tensor:
        """Return the scores (B,) of the responses; all ranks must score equally many."""
        rows = self.form.encode(prompts, responses)
        if (count := self.form.cut(rows)) and not self._has_warned:
            self._has_warned = True
            self.say(
                f"warning: {self.form.key} reads {self.form.limit} tokens: the beginning of "
                f"{count} of {len(rows)} texts is cut off; later cuts are not printed"
            )
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row]["input_ids"]))
        parts = [order[start : start + self.micro] for start in range(0, len(rows), self.micro)]
        with self.engine.evaluating():
            scores_B = torch.cat([self._score([rows[row] for row in part]) for part in parts])
        return scores_B[torch.tensor(order, device=self.device).argsort()]

    def _score(self, rows: Sequence[Encoded]) -> Tensor:
        """Return the scores (B,) of ``rows``, in one forward pass over right-padded rows.

        A decoder returns the logits of the last token that is no padding or, if its config has no
        padding, of the last token. Such a model pads with an id that no row has.
        """
        beat()
        config = cast("PreTrainedModel", self.engine.module).config.get_text_config()
        pad_id = config.pad_token_id
        if self.form.has_no_padding:
            used = {id_ for row in rows for id_ in row["input_ids"]}
            pad_id = config.pad_token_id = next(i for i in range(len(used) + 1) if i not in used)
        padded = {
            name: pad_rows([row[name] for row in rows], pad_id=pad_id if name == "input_ids" else 0)
            for name in rows[0]
        }
        inputs = {name: copy_to_device(ids_BS, self.device) for name, (ids_BS, _) in padded.items()}
        attend_BS = copy_to_device(padded["input_ids"][1].long(), self.device)
        logits_BL: Tensor = self.engine(**inputs, attention_mask=attend_BS).logits.float()
        chosen_B, is_pair = logits_BL[:, self.form.label], logits_BL.shape[1] == len(DEFAULT_NAMES)
        return chosen_B - logits_BL[:, 1 - self.form.label] if is_pair else chosen_B


def read_scorer_forms(config: RunConfig, *, downloads: bool = True) -> list[ScorerForm]:
    """Return the forms of the run's scorers; unless ``downloads``, of those in local folders.

    Raises:
        CheckpointError, ConfigError: if a scorer cannot be used.
    """
    return [
        ScorerForm(key, config.rewards[key.partition(".")[2]], model)
        for key, model in list_scorers(config).items()
        if downloads or expand_user_path(str(model.path), key=f"{key}.path").is_dir()
    ]


def build_text_scorers(
    config: RunConfig, say: Callable[[str], None], engines: Mapping[str, Any]
) -> dict[str, TextScorer]:
    """Return the run's scorers by the names of their parts, each in its own engine.

    ``engines`` are the arguments that all engines have in common: settings, plan and ranks.
    """
    scorers, device, micro = {}, engines["ranks"].device, engines["plan"].micro
    for form in read_scorer_forms(config):
        model = load_classifier(form.source, build_parameter_placer(Role.reward, **engines))
        engine = build_engine(model, role=Role.reward, **engines)
        scorers[form.key.partition(".")[2]] = TextScorer(form, engine, device, micro, say)
    return scorers
