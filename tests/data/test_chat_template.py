"""Chat templates: what a prompt and a response become, token by token, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf.base.errors import DataError
from rlhf.config.choices import Phase, Template
from rlhf.data.chat_template import ChatTemplate
from rlhf.data.encoding import Encoder
from rlhf.data.layouts import split_turns
from rlhf.data.plain_turns import (
    Asked,
    all_end_in_assistant,
    build_plain_template,
    record_of_observation,
    render_plain_observation,
)
from rlhf.data.records import Message, Record
from rlhf.data.splits import PhaseData
from rlhf.data.tokens import Limit, prompt_columns, sft_columns, tokenise
from rlhf.models.tokenizers import train_tokenizer
from tests.data.row_tables import ROLES, read, said
from tests.data.talks import CHATML

ONE = "\n\nHuman: say kiwi\n\nAssistant:"
MANY = "\n\nSystem: be kind\n\nHuman: say kiwi\n\nAssistant: kiwi\n\nHuman: and fig\n\nAssistant:"
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}<<SYS>>{{ m.content }}"
    "<</SYS>>{% elif m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}"
    + CHATML
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKS_FIRST = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
DROPS_ANSWER = (
    "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    + CHATML
)


OPENING = "<|im_start|>assistant\n"


def ml(*turns: str) -> str:
    """Return a prompt of ChatML's turns, whose speakers are the letters in front of the texts."""
    parts = (f"<|im_start|>{ROLES[turn[0]]}\n{turn[1:]}<|im_end|>\n" for turn in turns)
    return "".join(parts) + OPENING


def with_template(template: str | None, *, end: str | None = None):
    """Return a tokenizer with this template, and the end token that the template writes."""
    end = end or ("<|im_end|>" if "im_end" in str(template) else "</s>")
    tokenizer = train_tokenizer([ONE, MANY, CHATML], vocab_size=320, end_token=end)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template
    return tokenizer


def encode(encoder: Encoder, prompt: str, response: str) -> list[tuple[list[int], list[int]]]:
    piece = encoder.render_response(Record(prompt=prompt), response)
    return encoder.encode_pieces([[piece]])[0]


def decoded(tokenizer, prompt: str, response: str) -> tuple[str, str]:
    encoder = Encoder(tokenizer, Template.chat)
    (prompt_ids,) = encoder.encode_prompts([prompt])
    ((first_ids, response_ids),) = encode(encoder, prompt, response)
    assert first_ids == prompt_ids
    assert response_ids[-1] == tokenizer.eos_token_id
    assert response_ids.count(tokenizer.eos_token_id) == 1
    return tokenizer.decode(prompt_ids), tokenizer.decode(response_ids)


@pytest.mark.parametrize(
    ("prompt", "roles", "contents", "begun"),
    [
        (ONE, "u", ["say kiwi"], ""),
        (MANY, "suau", ["be kind", "say kiwi", "kiwi", "and fig"], ""),
        ("just a text ", "u", ["just a text"], ""),
        ("what is it?\n\nAssistant:", "u", ["what is it?"], ""),
        ("Human: hi there Assistant:", "u", ["hi there"], ""),
        ("\n\nHuman: hi\n\nAssistant: well, ", "u", ["hi"], "well, "),
        ("\n\nHuman: a\n\nb Human: c\n\nAssistant:", "u", ["a\n\nb Human: c"], ""),
        ("\n\nAssistant:", "", [], ""),
    ],
)
def test_turns_are_read_back(prompt: str, roles: str, contents: list[str], begun: str) -> None:
    messages, rest = split_turns(prompt)
    assert "".join(message.role[0] for message in messages) == roles
    assert [message.content for message in messages] == contents
    assert rest == begun


@pytest.mark.parametrize(
    ("template", "prompt", "asked", "answer"),
    [
        (CHATML, MANY, ml("sbe kind", "usay kiwi", "akiwi", "uand fig"), "plum <|im_end|>"),
        (CHATML, "a bare text", ml("ua bare text"), "plum <|im_end|>"),
        (CHATML, ONE + " a red", ml("usay kiwi") + "a red", " plum <|im_end|>"),
        (DEFAULT_SYSTEM, ONE, ml("sbe brief", "usay kiwi"), "plum <|im_end|>"),
        (NO_END, ONE, "user: say kiwi\nassistant: ", "plum </s>"),
        (
            INST,
            MANY,
            "<s><<SYS>>be kind<</SYS>>[INST] say kiwi [/INST] kiwi </s>[INST] and fig [/INST]",
            " plum </s>",
        ),
    ],
)
def test_a_template_is_followed(template: str, prompt: str, asked: str, answer: str) -> None:
    assert decoded(with_template(template), prompt, " plum ") == (asked, answer)


def test_the_template_alone_opens_a_sequence() -> None:
    tokenizer = with_template(INST)
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", end)]
    )
    for template in (Template.plain, Template.chat):
        encoder = Encoder(tokenizer, template)
        assert encoder.opening_ids() == [bos]
        (prompt,), ((_, response),) = encoder.encode_prompts([ONE]), encode(encoder, ONE, " kiwi")
        assert (prompt[0], prompt.count(bos), prompt.count(end)) == (bos, 1, 0)
        assert (response[-1], response.count(bos), response.count(end)) == (end, 0, 1)


def test_a_sequence_begins_with_the_ids_that_a_rollout_is_given() -> None:
    tokenizer = with_template(NO_END)
    whole = tokenizer("assistant: kiwi").input_ids
    opening = tokenizer("assistant: ").input_ids
    assert whole[: len(opening)] != opening, "this tokenizer joins the space with the response"
    encoder = Encoder(tokenizer, Template.chat)
    ((_, response),) = encode(encoder, ONE, "kiwi")
    assert response == [*tokenizer("kiwi").input_ids, tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("template", "prompt", "message"),
    [
        (None, ONE, r"no chat_template; use data\.template=plain"),
        (THINKS_FIRST, ONE, "prompt opens a reasoning block, but the answer has none"),
        (DROPS_ANSWER, ONE, "drops the response"),
        (NO_SYSTEM, MANY, r"fails on messages of system, user.*no system turns"),
        (CHATML.replace("s %}", "s if m.role != 'system' %}", 1), MANY, "with the role system"),
        (CHATML + "{{ 1 + 'a' }}", ONE, "fails on messages of user"),
        (CHATML + "{{ 1 / 0 }}", ONE, "fails on messages of user.*ZeroDivision"),
        (CHATML + "{{ messages[0].content.x.y() }}", ONE, "fails on messages of user"),
        (CHATML + "{{ '{:d}'.format('b') }}", ONE, "fails on messages of user"),
        (CHATML, "\n\nAssistant:", "there is no message in a prompt"),
    ],
)
def test_what_cannot_be_used_is_refused(template: str | None, prompt: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decoded(with_template(template), prompt, " kiwi")


def test_another_end_token_is_refused() -> None:
    message = r"ends a response with '<\|im_end\|>'.*set model\.end_token=<\|im_end"
    with pytest.raises(DataError, match=message):
        Encoder(with_template(CHATML, end="</s>"), Template.chat)


@pytest.mark.parametrize("before", ["", "<answer>"])
def test_a_response_that_the_template_drops_is_refused(before: str) -> None:
    answer = "{% if m.role == 'assistant' %}" + before + "{% endif %}"
    cut = CHATML.replace("{{ m.content }}", answer + "{{ m.content.split('</think>')[-1] }}")
    chat, asked = ChatTemplate(with_template(cut)), Asked((Message("user", "say kiwi"),))
    _, answer = chat.render_piece(asked, Message("assistant", "kiwi"))
    assert answer == before + "kiwi<|im_end|>"
    for answer, what in (("<think>hm</think>kiwi", "reasoning"), ("</think>", "response")):
        with pytest.raises(DataError, match=f"drops the {what}"):
            chat.render_piece(asked, Message("assistant", answer))


DROPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


NO_TOOLS = (
    "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHATML
)


def test_an_observation_is_what_the_template_writes_between_turns() -> None:
    tokenizer = with_template(CHATML)
    (ids,) = Encoder(tokenizer, Template.chat).encode_observations([("tool", "42")])
    assert tokenizer.decode(ids) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = Encoder(tokenizer).encode_observations([("tool", "42")])
    assert tokenizer.decode(ids) == "\n\nTool: 42\n\nAssistant:"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (DROPS_THOUGHTS, "renders earlier messages differently when another message follows"),
        (NO_TOOLS, "no tools"),
    ],
)
def test_a_template_that_rewrites_history_or_has_no_tools_is_refused(
    template: str, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        Encoder(with_template(template), Template.chat).encode_observations([("tool", "42")])


def test_all_phases_see_the_template(tmp_path) -> None:
    tokenizer = with_template(CHATML)
    records = [Record(text="plain text"), Record(prompt=MANY, chosen=" kiwi", rejected=" fig")]
    part, limit = PhaseData(records, []), Limit("max_tokens", 200)
    sft, reward, ppo, dpo = (
        tokenise(
            part, phase, tokenizer, limit=limit, cache_dir=tmp_path, template=Template.chat
        ).train[:]
        for phase in Phase
    )
    assert tokenizer.decode(sft["ids"][0]) == "plain text<|im_end|>"
    assert sft["row"] == [0, 1]
    assert sft["prompt_tokens"] == [0, len(ppo["ids"][0])]
    assert sft["ids"][1] == reward["chosen_ids"][0] == dpo["chosen_ids"][0]
    assert tokenizer.decode(ppo["ids"][0]).endswith("and fig<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(reward["rejected_ids"][0]).endswith("assistant\nfig<|im_end|>")


@pytest.mark.parametrize("opening", ["", "<s>"])
@pytest.mark.parametrize("prompt", [ONE, MANY])
def test_the_plain_template_renders_what_plain_training_sees(prompt: str, opening: str) -> None:
    tokenizer = with_template(build_plain_template(opening))
    if opening:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    plain, chat = Encoder(tokenizer), Encoder(tokenizer, Template.chat)
    assert plain.opening_ids() == [tokenizer.bos_token_id] * bool(opening)
    assert chat.encode_prompts([prompt]) == plain.encode_prompts([prompt])
    assert encode(chat, prompt, " kiwi") == encode(plain, prompt, " kiwi")


def test_prompts_without_turns_have_no_template() -> None:
    assert all_end_in_assistant([ONE, MANY])
    assert not all_end_in_assistant([ONE, "The film was"])
    assert not all_end_in_assistant([])


# ----------------------------------------------------------------- messages, as they are in files

LIMIT = Limit("max_tokens", 10_000)
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
    rows = list(enumerate(read(tmp_path / "rows.jsonl", [row], columns=columns).train))
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
    records = list(enumerate(read(tmp_path / "rows.jsonl", rows).train))
    columns, _ = sft_columns(records, Encoder(tokenizer, Template.chat), LIMIT)
    texts = [tokenizer.decode(ids).rpartition("assistant\n")[2] for ids in columns["ids"]]
    assert texts == ["    x<|im_end|>", "x<|im_end|>", "x<|im_end|>"]


def test_rows_that_a_template_cannot_render_are_counted_with_the_first_place(
    tmp_path: Path,
) -> None:
    rows = [{"messages": said("uHi", f"a{n}")} for n in range(8)]  # 37
    rows[3] = rows[6] = {"messages": said("sBe kind.", "uHi", "ayes")}
    encoder = Encoder(with_template("{{ bos_token }}" + NO_SYSTEM), Template.chat)
    records = list(enumerate(read(tmp_path / "rows.jsonl", rows).train))
    for make in (sft_columns, prompt_columns):
        columns, left_out = make(records, encoder, LIMIT)
        assert len(columns["ids"]) == 6
        ((reason, count),) = left_out.items()
        assert count == 2
        assert reason.startswith("the chat template fails on messages of system, user (Templat")
        assert reason.endswith(f"(first: {tmp_path}/rows.jsonl, row 4)")
    with pytest.raises(
        DataError, match=r"fails on messages of.*for 2 of 3 examples \(first: .* row"
    ):
        sft_columns([records[3], records[5], records[6]], encoder, LIMIT)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_first_observation_is_one_turn(role: str) -> None:
    tokenizer = with_template(CHATML)  # 36, in an environment
    record = record_of_observation(role, QUOTED)
    chat, plain = Encoder(tokenizer, Template.chat), Encoder(tokenizer)
    (ids,) = chat.encode_contexts([chat.render_prompt(record)])
    assert tokenizer.decode(ids).count("<|im_start|>") == 2
    assert plain.render_prompt(record) == record.prompt == render_plain_observation(role, QUOTED)
