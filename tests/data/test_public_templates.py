"""Chat templates that public models have: their ids are transformers' own, or a reason is counted.

The texts are those that TRL's wheel ships (Apache-2.0), read from it and not imported: the
templates of models on the hub, and TRL's changes of these for training (``_training``).
"""

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import DataError
from rlhf.config.choices import Template
from rlhf.data.encoding import Encoder
from tests.data.talks import TALKS, build_tokenizer, compare_with_transformers

FOLDER = Path(str(distribution("trl").locate_file("trl/chat_templates")))
END = "<|im_end|>"
TALKS_WITHOUT_THOUGHT = "one two five system five_system"
# What is begun by the prompt, or counted under a reason; all other conversations are equal.
DROPPED = {"drops the reasoning of answers": "thoughts"}
NO_TOOLS = {"does not show tools": "tools"}
OTHER_END = {"ends it differently from other responses": "tools"}
BEGUN = {"opens a reasoning block, but the answer has none": TALKS_WITHOUT_THOUGHT}
OUTCOMES: list[tuple[dict[str, str], str]] = [
    (
        {},
        "glm4moe lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl muse_glimmer "
        "muse_glimmer_training qwen3 qwen3_5_think qwen3_5_think_training qwen3_6 qwen3_6_training "
        "qwen3_8 qwen3_8_training qwen3_training",
    ),
    (
        DROPPED,
        "lfm2_v2 lfm2_v2_training llama3_1 llama3_2 qwen2_5 qwen2_5_training "
        "qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_vl qwen3_vl_training",
    ),
    (
        DROPPED | NO_TOOLS,
        "cohere cohere2 cohere2_training cohere_training gemma3 gemma3_training idefics3 "
        "idefics3_training llama3 llama3_training llava_next llava_next_training phi3 phi3_5 "
        "phi3_5_training phi3_training qwen2_5_vl qwen2_5_vl_training smolvlm smolvlm_training",
    ),
    (DROPPED | {"does not show tool_calls": "tools"}, "lfm2 lfm2_training"),
    (DROPPED | {"System role not supported": "system five_system tools"}, "gemma gemma_training"),
    (DROPPED | OTHER_END, "gemma4"),
    (
        OTHER_END,
        "diffusion_gemma diffusion_gemma_training gemma4_v5 glm4moe_training gptoss "
        "gptoss_training",
    ),
    (
        {"opens a reasoning block, but the answer has none": f"{TALKS_WITHOUT_THOUGHT} tools"},
        "nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano "
        "nemotron_3_nano_training nemotron_3_super nemotron_3_super_training nemotron_3_ultra "
        "nemotron_3_ultra_training",
    ),
    (
        BEGUN | NO_TOOLS | {"begun": "thoughts inline"},
        "deepseek_r1_distill deepseekv3 deepseekv3_training",
    ),
    (BEGUN | NO_TOOLS | {"begun": "thoughts"}, "deepseek_r1_distill_training"),
    (
        {"renders a prompt differently if an answer follows": "thoughts inline"},
        "qwen3_5_nothink qwen3_5_nothink_training",
    ),
]
LEFT_OUT = "gemma4_v2 gemma4_v3 gemma4_v4"  # between gemma4 and gemma4_v5; slow to compile
IN_PARTS = "idefics3 idefics3_training llava_next llava_next_training smolvlm smolvlm_training"
EXPECTED = {name: outcomes for outcomes, names in OUTCOMES for name in names.split()}
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
    assert len(EXPECTED) == sum(len(names.split()) for _, names in OUTCOMES)
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
