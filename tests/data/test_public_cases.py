"""Public data files and templates of other projects, invented anew: used right, or refused by name.

The numbers are those of a list of 71 public cases; test_layouts.py has those of layouts.
"""

from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import DataError
from rlhf.config.choices import Template
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import record_of_observation, render_plain_observation
from rlhf.data.reading import describe_dataset
from rlhf.data.tokens import Limit, prompt_columns, sft_columns
from rlhf.rewards.rules import find_last_number

from .row_tables import read, said
from .talks import CHATML
from .test_chat_template import INST, NO_SYSTEM, with_template

ROWS = "rows.jsonl"
LIMIT = Limit("max_tokens", 10_000)


def test_explicit_columns_read_what_detection_refuses(tmp_path: Path) -> None:
    columns = {"prompt": "human(question)", "system": "system", "chosen": "chosen"}
    row = {"system": "Be kind.", "question": "Name a fruit.", "chosen": "fig", "rejected": "drum"}
    raw = read(tmp_path / ROWS, [row | {"id": 7}], columns=columns)  # 4, 5, 20
    assert raw.train[0].prompt == "\n\nSystem: Be kind.\n\nHuman: Name a fruit.\n\nAssistant:"
    assert describe_dataset(raw).endswith("not read: rejected, id")


# -------------------------------------------------------------------------------- chat templates

GEMMA = "{{ bos_token }}" + NO_SYSTEM
STRIPS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
QUOTED = "Who is rude?\n\nHuman: Hi\n\nAssistant: Go away."
TALKS = {
    "quoted": said(f"u{QUOTED}", "aHe is."),
    "system inside": said("uA\n\nSystem: b", "aC\n\nHuman: d", "uE\n\nAssistant:", "aF"),
    "code": said("uWrite code.", "a    return x\n"),
    "spaces": said("u  Hi  ", "a yes"),
}


@pytest.mark.parametrize("template", [CHATML, INST, STRIPS], ids=["ml", "inst", "trim"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, kind) for name in TALKS for kind in ("messages", "completion")), ("quoted", "human")],
)
def test_messages_reach_the_template_as_they_are(
    template: str, name: str, layout: str, tmp_path: Path
) -> None:
    talk = TALKS[name]
    tokenizer = with_template(template)
    row: dict[str, Any] = {"messages": talk}  # 36, 39, 41
    columns = None
    if layout == "completion":
        row = {"prompt": talk[:-1], "completion": talk[-1:]}
    if layout == "human":
        row = {"q": talk[0]["content"], "a": talk[1]}
        columns = {"prompt": "human(q)", "chosen": "a"}
    rows = list(enumerate(read(tmp_path / ROWS, [row], columns=columns).train))
    encoder = Encoder(tokenizer, Template.chat)
    whole = tokenizer.apply_chat_template(talk, tokenize=False).rstrip("\n")
    opening = tokenizer.apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
    (ids,) = sft_columns(rows, encoder, LIMIT)[0]["ids"]
    (asked,) = prompt_columns(rows, encoder, LIMIT)[0]["ids"]
    assert tokenizer.decode(ids) == whole
    assert tokenizer.decode(asked) == opening


def test_an_answer_of_text_keeps_its_indentation(tmp_path: Path) -> None:
    tokenizer = with_template(CHATML)  # 41
    rows = [{"prompt": "Code?", "completion": answer} for answer in ("    x", " x", "x")]
    records = list(enumerate(read(tmp_path / ROWS, rows).train))
    columns, _ = sft_columns(records, Encoder(tokenizer, Template.chat), LIMIT)
    texts = [tokenizer.decode(ids).rpartition("assistant\n")[2] for ids in columns["ids"]]
    assert texts == ["    x<|im_end|>", "x<|im_end|>", "x<|im_end|>"]


def test_rows_that_a_template_cannot_render_are_counted_with_the_first_place(
    tmp_path: Path,
) -> None:
    rows = [{"messages": said("uHi", f"a{n}")} for n in range(8)]  # 37
    rows[3] = rows[6] = {"messages": said("sBe kind.", "uHi", "ayes")}
    encoder = Encoder(with_template(GEMMA), Template.chat)
    records = list(enumerate(read(tmp_path / ROWS, rows).train))
    for make in (sft_columns, prompt_columns):
        columns, left_out = make(records, encoder, LIMIT)
        assert len(columns["ids"]) == 6
        ((reason, count),) = left_out.items()
        assert count == 2
        assert reason.startswith("the chat template fails on messages of system, user (Templat")
        assert reason.endswith(f"(first: {tmp_path / ROWS}, row 4)")
    with pytest.raises(
        DataError, match=r"fails on messages of.*for 2 of 3 examples \(first: .* row"
    ):
        sft_columns([records[3], records[5], records[6]], encoder, LIMIT)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3-5", 5), ("10-4", 4), ("\u22127", -7), ("-7", -7), ("x=-7", -7), ("1.5e3", 1500),
        ("2E-2", 0.02), ("1 000", 0), ("1,2,3", 3), ("1,2", 2), ("1,200", 1200), (".5", 0.5),
        ("$1,200.00", 1200), ("\\boxed{-3}", -3), ("#### 1,200", 1200), ("18.", 18), ("none", None),
        ("12,3456", 3456), ("(-4)", -4), ("-1,234,567.5", -1234567.5),
    ],
)  # fmt: skip
def test_numbers_follow_the_documented_grammar(text: str, number: float | None) -> None:
    assert find_last_number(text) == number  # 67


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_first_observation_is_one_turn(role: str) -> None:
    tokenizer = with_template(CHATML)  # 36, in an environment
    record = record_of_observation(role, QUOTED)
    chat, plain = Encoder(tokenizer, Template.chat), Encoder(tokenizer)
    (ids,) = chat.encode_contexts([chat.render_prompt(record)])
    assert tokenizer.decode(ids).count("<|im_start|>") == 2
    assert plain.render_prompt(record) == record.prompt == render_plain_observation(role, QUOTED)
