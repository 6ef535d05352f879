"""Choose data.template, the form of a run's conversations, by the tokenizer of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Template
from rlhf.config.schema.model import ModelConfig
from rlhf.data.plain_turns import is_plain_template
from rlhf.models.tokenizers import tokenizer_place

ReadFile = Callable[[str], str | None]


def choose_template(asked: Template, key: str, model: ModelConfig, *, downloads: bool) -> Template:
    """Return chat or plain for data.template=auto; return any other template unchanged.

    The tokenizer of ``model`` (the value of key ``key``) decides. If ``downloads``, the files
    of a hub tokenizer that is not on this machine are downloaded. If they cannot be read, auto is
    returned: the ranks will report the reason when they load the tokenizer.
    """
    if asked is not Template.auto:
        return asked
    place_key, place = tokenizer_place(model, key=key)
    has_template: bool | None = False  # a tokenizer that the run trains has no chat template
    if place is not None:
        folder = expand_user_path(place, key=place_key)
        read = partial(_read_hub_file, place, model.revision, downloads)
        has_template = _has_chat_template(
            partial(_read_local_file, folder) if folder.is_dir() else read
        )
    if has_template is None:
        return Template.auto
    return Template.chat if has_template else Template.plain


def describe_template(chosen: Template, key: str, model: ModelConfig) -> list[str]:
    """Return a line on the template chosen for data.template=auto; [] for a new tokenizer."""
    place = tokenizer_place(model, key=key)[1]
    if place is None:
        return []
    said = {
        Template.chat: "has a chat template, so the model is trained and asked in it "
        "(data.template=plain: with Human: and Assistant:)",
        Template.plain: "has no chat template, so conversations have Human: and Assistant:",
        Template.auto: "is not on this machine; the run decides when it has it",
    }
    return [f"data.template={chosen}: the tokenizer of {place} {said[chosen]}"]


def _has_chat_template(read_file: ReadFile) -> bool | None:
    """Return True if the tokenizer has a chat template of its own, None if it cannot be read."""
    settings = read_file("tokenizer_config.json")
    template = read_file("chat_template.jinja")
    if settings is None and template is None:
        return None
    try:
        template = template or json.loads(settings or "{}").get("chat_template")
    except (ValueError, AttributeError):  # a damaged file
        return None
    # A tokenizer that a plain run saved has a template too, which renders the plain form.
    return bool(template) and not (isinstance(template, str) and is_plain_template(template))


def _read_local_file(folder: Path, name: str) -> str | None:
    path = folder / name
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_hub_file(place: str, revision: str | None, downloads: bool, name: str) -> str | None:
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(place, name, revision=revision, local_files_only=not downloads)
    except (OSError, ValueError):  # no such file, network or access, or an invalid hub id
        return None
    return Path(file).read_text(encoding="utf-8")
