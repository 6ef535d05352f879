"""Conversations for chat templates, and the comparison of their ids with transformers' own."""

import re
from functools import partial
from typing import Any

from rlhf.data.column_rules import NONE_WANTED, Converted, Wanted
from rlhf.data.detect import detect_layout
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import UnusableTemplateError
from rlhf.data.records import Record, Row
from rlhf.models.tokenizers import train_tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


KIND = {"role": "system", "content": "Be kind."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
FIVE = [turn for n in range(5) for turn in (user(f"Q{n}?"), answer(f"  def a{n}():\n"))]
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": FIVE[:2],
    "two": FIVE[:4],
    "five": FIVE,
    "system": [KIND, *FIVE[:2]],
    "five_system": [KIND, *FIVE],
    "thoughts": [
        user("Hi"),
        answer("Hello.", reasoning_content="They greet."),
        user("And?"),
        answer("Well.", reasoning_content="They ask."),
    ],
    "inline": [user("Hi"), answer("<think>\nThey greet.\n</think>\n\nHello.")],
    "tools": [
        KIND,
        user("1+1?"),
        answer(None, tool_calls=[CALL]),
        {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": '{"sum": "2"}'},
        answer("It is 2."),
    ],
}
BEGIN = "{% if add_generation_prompt %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + BEGIN
    + "<|im_start|>assistant\n{% endif %}"
)
BARS = "[|\uff5c]"  # the second is DeepSeek's
MARKS = re.compile(rf"<{BARS}[^|>\s]+{BARS}>|<(?:start|end)_of_turn>|</?s>|<[be]os>|<turn\|>")


def build_tokenizer(texts: list[str]) -> Any:
    """A tokenizer whose special tokens are the marks of the templates ``texts``."""
    marks = {mark for text in texts for mark in MARKS.findall(text)}
    tokenizer = train_tokenizer(["def a(): They greet."], vocab_size=280, end_token="<|im_end|>")
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "additional_special_tokens": sorted(marks - {"<|im_end|>"})}
    )
    return tokenizer


def to_records(rows: list[Row], *, source: str, keep: Wanted = NONE_WANTED) -> Converted:
    return detect_layout(rows, source=source, keep=keep).convert(rows, source=source, keep=keep)


def read(*talks: list[dict[str, Any]], **columns: Any) -> list[tuple[int, Record]]:
    rows = [Row("t.jsonl", n, {"messages": t, **columns}) for n, t in enumerate(talks, 1)]
    return list(enumerate(to_records(rows, source="t.jsonl").records))


def compare_with_transformers(
    encoder: Encoder, tokenizer: Any, name: str, *, in_parts: bool = False
) -> str:
    """Check each answer of the conversation ``name``; return "equal", "begun", or the reason.

    "begun": the prompt begins or ends a thought, which transformers' conversation with the answer
    lacks; only the prompt is compared then. ``in_parts``: the template takes lists of parts.
    """
    talk, tools = TALKS[name], [ADD] if name == "tools" else None
    ((_, record),) = read(talk, **({"tools": tools} if tools else {}))
    try:
        sequences = encoder.encode_pieces(encoder.render_answers(record))
    except UnusableTemplateError as error:
        return error.problem
    found = []
    for sequence in sequences:
        before: list[int] = []
        for context, ids in sequence:
            found.append((before + context, ids))
            before = before + context + ids
    asked = [index for index, turn in enumerate(talk) if turn["role"] == "assistant"]
    if in_parts:
        talk = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in talk]
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=True, return_dict=False)
    openings = render([talk[:index] for index in asked], add_generation_prompt=True)
    wholes = render([talk[: index + 1] for index in asked])
    begun = False
    for opening, whole, (prompt, ids) in zip(openings, wholes, found, strict=True):
        assert prompt == opening
        assert ids[-1] == tokenizer.eos_token_id
        if whole[: len(opening)] != opening:
            begun = True
            continue
        *written, end = prompt + ids
        assert written == whole[: len(written)]
        rest = whole[len(written) :]
        assert rest[:1] == [end] or not tokenizer.decode(rest).strip()
    return "begun" if begun else "equal"
