"""What is learned of conversations; test_public_templates.py compares ids with transformers' own.

``TEMPLATES`` has some of the ways in which public templates write turns.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf.config.choices import Template, Unpaired
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import UnusableTemplateError
from rlhf.data.records import Dropped, RawDataset, Row, learn_last_answer
from rlhf.data.stored import drop_repeated_examples
from rlhf.data.tokens import Limit, prompt_columns, response_columns, sft_columns
from rlhf.runtime.run_data import load_phase_data
from tests.data.talks import (
    BEGIN,
    CHATML,
    FIVE,
    TALKS,
    answer,
    build_tokenizer,
    compare_with_transformers,
    read,
    to_records,
    user,
)
from tests.plan.planned import run_of

LIMIT = Limit("sft.max_tokens", 10_000)
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
LAST_THOUGHT = THOUGHT.replace("m.reasoning_content %}", "loop.last and m.reasoning_content %}", 1)
NO_HISTORY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
)
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant{% if loop.last and "
    "m.reasoning_content %}<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|><|start|>"
    "assistant{% endif %}<|channel|>final<|message|>{{ m.content }}{{ '<|im_end|>' if loop.last "
    "else '<|end|>' }}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}" + BEGIN + "<|start|>assistant{% endif %}"
)
SYSTEM_IN_USER = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ (first if loop.first else '') + m.content | trim }}<|im_end|>\n{% endfor %}"
    + BEGIN
    + "<|start|>model\n{% endif %}"
)
# What the template writes -> its text.
TEMPLATES = {
    "turns": CHATML,
    "the system in the first turn": SYSTEM_IN_USER,
    "channels": CHANNELS,
    "all thoughts": CHATML.replace("{{ m.content }}", THOUGHT + "{{ m.content }}"),
    "the last thought": CHATML.replace("{{ m.content }}", LAST_THOUGHT + "{{ m.content }}"),
    "a prompt that begins a thought": NO_HISTORY + BEGIN + "<|assistant|><think>\n{% endif %}",
    "a prompt that ends a thought": (
        NO_HISTORY + BEGIN + "<|assistant|><think>\n\n</think>\n\n{% endif %}"
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer([*TEMPLATES.values()])


def learned_texts(columns: dict[str, list[Any]], tokenizer: Any) -> list[list[str]]:
    """The learned parts of each sequence."""
    found = []
    observed = columns.get("observed", [[]] * len(columns["ids"]))
    for ids, start, spans in zip(columns["ids"], columns["prompt_tokens"], observed, strict=True):
        bounds = [start, *(bound for span in spans for bound in span), len(ids)]
        parts = zip(bounds[::2], bounds[1::2], strict=True)
        found.append([tokenizer.decode(ids[begin:end]) for begin, end in parts])
    return found


def test_a_tokenizer_that_marks_the_first_word_gives_the_same_ids() -> None:
    letters = sorted(set("".join(map(str, FIVE)) + CHATML + "\u2581"))
    model = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML.replace("<|im_start|>", "")  # a turn begins with a word
    assert tokenizer("a").input_ids != tokenizer("<|im_end|>a").input_ids[1:]
    for name in ("one", "five", "five_system"):
        encoder = Encoder(tokenizer, Template.chat)
        assert compare_with_transformers(encoder, tokenizer, name) == "equal"


# ------------------------------------------------------------------------------ what is learned


def columns_of(records, tokenizer, template: Template) -> dict[str, list[Any]]:
    columns, left_out = sft_columns(records, Encoder(tokenizer, template), LIMIT)
    assert not any(left_out.values())
    return columns


def test_every_answer_is_learned_once(tokenizer) -> None:
    tokenizer.chat_template = CHATML
    records = read(TALKS["five_system"], TALKS["one"])
    found = learned_texts(columns_of(records, tokenizer, Template.chat), tokenizer)
    assert found == [[f"  def a{n}():\n<|im_end|>" for n in range(5)], ["  def a0():\n<|im_end|>"]]
    found = learned_texts(columns_of(records, tokenizer, Template.plain), tokenizer)
    assert found == [[f"   def a{n}():\n<|im_end|>"] for n in (0, 1, 2, 3, 4, 0)]
    last = [(index, learn_last_answer(record)) for index, record in records]
    found = learned_texts(columns_of(last, tokenizer, Template.chat), tokenizer)
    assert found == [["  def a4():\n<|im_end|>"], ["  def a0():\n<|im_end|>"]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sft.train_on=last"], "learns 7 of 22 answers in 7 conversations"),
        (["sft.loss_on=all"], "learns 7 of 22 answers in 7 conversations"),
    ],
)
def test_the_line_of_the_data_counts_answers(compose, tmp_path, words, line: str) -> None:
    talks = [[*TALKS["five"][2 * n :], *TALKS["one"]] for n in range(5)] + [TALKS["one"]] * 2
    talks = [[user(f"{n}"), *talk[1:]] for n, talk in enumerate(talks)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in talks))
    given = ["phase=sft", "data=local", f"data.path={tmp_path}/t.jsonl", "data.split=[1,0,0]"]
    lines: list[str] = []
    load_phase_data(run_of(compose, *given, *words), lines.append)
    assert line in lines[0]


def test_a_long_conversation_is_learned_as_far_as_it_fits(tokenizer) -> None:
    tokenizer.chat_template = CHATML
    encoder, records = Encoder(tokenizer, Template.chat), read(TALKS["five"])
    ((whole,), _) = (sft_columns(records, encoder, LIMIT)[0][name] for name in ("ids", "row"))
    for tokens, number in ((len(whole), 5), (len(whole) - 1, 4), (len(whole) // 2, 2)):
        columns, left_out = sft_columns(records, encoder, Limit("sft.max_tokens", tokens))
        assert len(learned_texts(columns, tokenizer)[0]) == number
        assert left_out.total() == 5 - number
        assert columns["ids"][0] == whole[: columns["length"][0]]
    columns, left_out = sft_columns(records, encoder, Limit("sft.max_tokens", 5))
    assert not columns["ids"]
    assert left_out["longer than sft.max_tokens=5"] == 1


def test_a_template_that_rewrites_the_history_gives_an_example_per_answer(tokenizer) -> None:
    tokenizer.chat_template = TEMPLATES["the last thought"]
    columns = columns_of(read(TALKS["thoughts"]), tokenizer, Template.chat)
    assert columns["row"] == [0, 0]
    assert learned_texts(columns, tokenizer) == [
        ["<think>\nThey greet.\n</think>\n\nHello.<|im_end|>"],
        ["<think>\nThey ask.\n</think>\n\nWell.<|im_end|>"],
    ]
    assert "They greet" not in tokenizer.decode(columns["ids"][1])


@pytest.mark.parametrize(
    ("talk", "end", "texts"),
    [
        ("inline", "begins", ["They greet.\n</think>\n\nHello."]),
        ("thoughts", "begins", ["They greet.\n</think>\n\nHello.", "They ask.\n</think>\n\nWell."]),
        ("one", "ends", ["  def a0():\n"]),
    ],
)
def test_an_answer_continues_what_its_prompt_has_begun(
    tokenizer, talk: str, end: str, texts: list[str]
) -> None:
    tokenizer.chat_template = TEMPLATES[f"a prompt that {end} a thought"]
    columns = columns_of(read(TALKS[talk]), tokenizer, Template.chat)
    assert learned_texts(columns, tokenizer) == [[f"{text}<|im_end|>"] for text in texts]


def test_messages_of_weight_0_are_read_and_not_learned(tokenizer) -> None:
    tokenizer.chat_template = CHATML
    talk = [*TALKS["five"], user("Bye")]
    for index, key in ((1, "weight"), (5, "train"), (9, "loss_weight")):
        talk[index] = {**talk[index], key: 0}
    columns = columns_of(read(talk), tokenizer, Template.chat)
    assert learned_texts(columns, tokenizer) == [
        ["  def a1():\n<|im_end|>", "  def a3():\n<|im_end|>"]
    ]
    assert tokenizer.decode(columns["ids"][0]).count("<|im_start|>") == 8


def test_only_good_responses_are_learned(tokenizer) -> None:
    (_, record), *_ = read(TALKS["one"])
    graded = [record._replace(grade=grade) for grade in (None, True, False, 0.0, 1.0)]
    columns, left_out = sft_columns(list(enumerate(graded)), Encoder(tokenizer), LIMIT)
    assert columns["row"] == [0, 1]
    counts = {reason: count for reason, count in left_out.items() if count}
    assert list(counts.values()) == [1, 2]
    assert list(counts) == ["response marked as bad", "response with a score, not a good/bad label"]


def test_a_thought_of_a_pair_is_counted_and_that_of_a_completion_learned(tokenizer) -> None:
    tokenizer.chat_template = TEMPLATES["all thoughts"]
    *asked, last = TALKS["thoughts"]
    row = {"prompt": asked, "chosen": [last], "rejected": [answer("No.")]}
    fine = row | {"chosen": [answer("Well.")]}
    rows = [Row("t.jsonl", n, each) for n, each in enumerate([fine, row], 1)]
    converted = to_records(rows, source="t.jsonl")
    assert len(converted.records) == 1
    ((reason, count),) = converted.left_out.items()
    assert (count, "chosen has reasoning_content" in reason) == (1, True)
    scored = [{"messages": [*asked, last], "score": 1.0}, {"messages": TALKS["one"], "score": 2.0}]
    scored.append({"messages": [*asked, answer("No.")], "score": 0.0})
    rows = [Row("t.jsonl", n, each) for n, each in enumerate(scored, 1)]
    converted = to_records(rows, source="t.jsonl")
    assert list(converted.left_out) == ["reasoning_content in an answer of a pair"]
    rows = [Row("t.jsonl", 1, {"prompt": asked, "completion": [last]})]
    records = list(enumerate(to_records(rows, source="t.jsonl").records))
    found = learned_texts(columns_of(records, tokenizer, Template.chat), tokenizer)
    assert found == [["<think>\nThey ask.\n</think>\n\nWell.<|im_end|>"]]
    graded = [(index, record._replace(grade=True)) for index, record in records]
    columns, _ = response_columns(
        graded, Encoder(tokenizer, Template.chat), LIMIT, feedback=Unpaired.marks
    )
    assert learned_texts(columns, tokenizer) == found


def test_examples_that_differ_in_a_thought_are_no_repeats() -> None:
    other = [*TALKS["thoughts"][:-1], answer("Well.", reasoning_content="Again.")]
    records = [record for _, record in read(TALKS["thoughts"], other, other)]
    (found,) = drop_repeated_examples([RawDataset("t", records, None, "", Dropped())])
    assert found.train == records[:2]


@pytest.mark.parametrize("name", ["thoughts", "tools"])
def test_plain_turns_count_what_they_cannot_show(tokenizer, name: str) -> None:
    records = read(TALKS["one"], TALKS["one"], TALKS[name])
    for make in (sft_columns, prompt_columns):
        columns, left_out = make(records, Encoder(tokenizer), LIMIT)
        assert columns["row"] == [0, 1]
        reason = next(reason for reason, count in left_out.items() if count)
        assert reason.startswith("plain turns cannot show ")
        assert reason.endswith("(first: t.jsonl, row 3)")


# ------------------------------------------------------------------------------ texts of messages

WORDS = [
    "\n\nHuman: ",
    "\n\nAssistant:",
    "\n\nSystem:",
    "\nassistant\n",
    " ",
    "\n",
    "a",
    "é",
    "[INST]",
]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|assistant|>", "<|end|>", "<s>", "<|pad|>"]


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(WORDS + SPECIAL), min_size=1, max_size=4).map("".join),
        min_size=2,
        max_size=6,
    ),
    template=st.sampled_from(["turns", "channels", "the system in the first turn"]),
)
def test_no_text_changes_the_number_of_turns(tokenizer, texts: list[str], template: str) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    texts = [f"a{text}" for text in texts[: len(texts) // 2 * 2]]
    talk = [(user, answer)[n % 2](text) for n, text in enumerate(texts)]
    plain = [(user, answer)[n % 2]("a") for n in range(len(texts))]
    encoder = Encoder(tokenizer, Template.chat)
    (_, record), (_, simple) = read(talk, plain)
    expected = encoder.encode_pieces(encoder.render_answers(simple))
    marks = set(tokenizer.convert_tokens_to_ids(SPECIAL))
    if any(word in "".join(texts) for word in SPECIAL):
        for each in (encoder, Encoder(tokenizer)):
            with pytest.raises(UnusableTemplateError, match="a message holds the special token"):
                each.render_answers(record)
        return
    found = encoder.encode_pieces(encoder.render_answers(record))
    assert len(Encoder(tokenizer).render_answers(record)) == len(texts) // 2

    def turns(sequences: Any) -> list[list[int]]:
        pieces = [ids for sequence in sequences for piece in sequence for ids in piece]
        return [[token for token in ids if token in marks] for ids in pieces]

    assert turns(found) == turns(expected)
