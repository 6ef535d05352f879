"""Chat templates that public models have: their ids are transformers' own, or a reason is counted.

The texts are those that TRL's wheel ships (Apache-2.0), read from it and not imported: the
templates of models on the hub, and TRL's changes of these for training (``_training``).
"""

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import DataError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config.choices import Template
from rlhf.data.encoding import Encoder
from tests.data.talks import TALKS, build_tokenizer, compare_with_transformers

FOLDER = Path(str(distribution("trl").locate_file("trl/chat_templates")))
END = "<|im_end|>"
OUTCOMES = read_yaml_beside(__file__, "public_templates.yaml")
LEFT_OUT = "gemma4_v2 gemma4_v3 gemma4_v4"  # between gemma4 and gemma4_v5; slow to compile
IN_PARTS = "idefics3 idefics3_training llava_next llava_next_training smolvlm smolvlm_training"
EXPECTED = {name: row["outcome"] for row in OUTCOMES for name in row["templates"].split()}
pytestmark = pytest.mark.slow


def read_text(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer([read_text(name) for name in EXPECTED])


def build_encoder(tokenizer: Any, template: str) -> Encoder:
    """An encoder with the template, and with the end token that its refusal tells users to set."""
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"eos_token": END})
    try:
        return Encoder(tokenizer, Template.chat)
    except DataError as error:
        _, found, end = str(error).partition("set model.end_token=")
        if not found:
            raise
    tokenizer.add_special_tokens({"eos_token": end})
    return Encoder(tokenizer, Template.chat)


def test_every_template_of_the_wheel_is_in_the_table() -> None:
    assert len(EXPECTED) == sum(len(row["templates"].split()) for row in OUTCOMES)
    assert {*EXPECTED, *LEFT_OUT.split()} == {path.stem for path in FOLDER.glob("*.jinja")}
    assert len({read_text(name) for name in EXPECTED}) == len(EXPECTED) >= 50


@pytest.mark.parametrize("name", EXPECTED)
def test_ids_are_those_of_transformers_or_a_reason_is_counted(tokenizer: Any, name: str) -> None:
    encoder = build_encoder(tokenizer, read_text(name))
    in_parts = name in IN_PARTS.split()
    found = {
        talk: compare_with_transformers(encoder, tokenizer, talk, in_parts=in_parts)
        for talk in TALKS
    }
    expected = dict.fromkeys(TALKS, "equal")
    for outcome, talks in EXPECTED[name].items():
        expected |= dict.fromkeys(talks.split(), outcome)
    differing = {talk: got for talk, got in found.items() if expected[talk] not in got}
    assert not differing
