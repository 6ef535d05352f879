"""Rows as people have them become records, or are refused by name: one table of layouts and files.

A number after # is the row's number in a list of 71 public cases. Right values are by hand.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from rlhf.base.errors import DataError
from rlhf.config.choices import Source
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.data import DatasetConfig
from rlhf.data.detect import detect_layout, read_layouts, to_records
from rlhf.data.reading import describe_dataset, load_datasets
from rlhf.data.records import Message, RawDataset, Record, Row, render_prompt

from .test_reading import config_of

Rows = list[dict[str, Any]]
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}
SHAREGPT = {"u": "human", "a": "gpt", "b": "bing", "f": "function_call", "o": "observation"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 6}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def said(*turns: str, **keys: Any) -> Rows:
    """Return messages whose roles are the letters in front of the texts; the last has ``keys``."""
    found = [{"role": ROLES[turn[0]], "content": turn[1:]} for turn in turns]
    return [*found[:-1], found[-1] | keys]


def shared(*turns: str) -> Rows:
    """Return ShareGPT's messages."""
    return [{"from": SHAREGPT[turn[0]], "value": turn[1:]} for turn in turns]


def asked(*turns: str) -> str:
    """Return a prompt of plain turns, whose speakers are the letters in front of the texts."""
    names = {"s": "System", "u": "Human", "a": "Assistant"}
    return "".join(f"\n\n{names[turn[0]]}: {turn[1:]}" for turn in turns) + "\n\nAssistant:"


def pair(prompt: str, chosen: str, rejected: str) -> Record:
    return Record(prompt, f" {chosen}", f" {rejected}")


def answer(prompt: str, chosen: str, grade: bool | float | None = None) -> Record:
    return Record(prompt, f" {chosen}", grade=grade)


class Case(NamedTuple):
    """Rows for each number from 0 to 5, the records made of them, and parts of the line printed."""

    rows: Callable[[int], dict[str, Any] | Rows]
    records: Callable[[int], Record | list[Record]]
    says: Sequence[str] = ()


NUMBERS = range(6)
GOOD = [False, True, True, False, True, False]

USED: dict[str, Case] = {
    # ----------------------------------------------------------------------- TRL's types, messages
    "text": Case(lambda n: {"text": f"Text {n}"}, lambda n: Record(text=f"Text {n}")),
    "messages, several turns #14": Case(
        lambda n: {"messages": said("uHi", "aone", "uagain", f"a{n}")},
        lambda n: answer(asked("uHi", "aone", "uagain"), f"{n}"),
        ["learns 12 answers of 6 conversations"],
    ),
    "messages, two of the user in a row #15": Case(
        lambda n: {"messages": said("uHi", "uHello?", f"a{n}")},
        lambda n: answer(asked("uHi", "uHello?"), f"{n}"),
    ),
    "messages that end with the user #19": Case(
        lambda n: {"messages": said("sBe kind.", f"u{n}")},
        lambda n: Record(asked("sBe kind.", f"u{n}")),
    ),
    "messages whose last turns have no answer": Case(
        lambda n: {"messages": said(f"u{n}", "aYes", "uMore?")},
        lambda n: answer(asked(f"u{n}"), "Yes"),
        [
            "6 skipped (6 turns after the last answer of a conversation that ends with the user or "
            "a tool (first: "
        ],
    ),
    "messages beside their prompt (UltraChat)": Case(
        lambda n: {"prompt": "Hi", "prompt_id": "x", "messages": said("uHi", f"a{n}")},
        lambda n: answer(asked("uHi"), f"{n}"),
        ["not read: prompt, prompt_id"],
    ),
    "messages with a system column #4": Case(
        lambda n: {"system": "Be kind.", "messages": said("uHi", f"a{n}")},
        lambda n: answer(asked("sBe kind.", "uHi"), f"{n}"),
    ),
    "prompts": Case(lambda n: {"prompt": f"Hi {n}"}, lambda n: Record(f"Hi {n}")),
    "prompts of messages": Case(
        lambda n: {"prompt": said("uHi", "aYes?", f"u{n}")},
        lambda n: Record(asked("uHi", "aYes?", f"u{n}")),
    ),
    "prompts with a number #23": Case(
        lambda n: {"prompt": f"Hi {n}", "label": n, "tags": ["x"]},
        lambda n: Record(f"Hi {n}"),
        ["not read: label, tags"],
    ),
    "completions": Case(
        lambda n: {"prompt": f"Q{n}:", "completion": "Yes"}, lambda n: answer(f"Q{n}:", "Yes")
    ),
    "completions of messages": Case(
        lambda n: {"prompt": said("uHi"), "completion": said(f"a{n}")},
        lambda n: answer(asked("uHi"), f"{n}"),
    ),
    "text and messages": Case(
        lambda n: {"prompt": f"Q{n}:", "completion": said("aYes")},
        lambda n: answer(f"Q{n}:", "Yes"),
    ),
    "messages and text": Case(
        lambda n: {"prompt": said("uHi"), "response": f"{n}"},
        lambda n: answer(asked("uHi"), f"{n}"),
    ),
    "completions with a system column #4": Case(
        lambda n: {"system": "Be kind.", "prompt": f"Q{n}", "completion": "Yes"},
        lambda n: answer(asked("sBe kind.", f"uQ{n}"), "Yes"),
    ),
    "unpaired preference #2": Case(
        lambda n: {"prompt": f"Q{n}:", "completion": "Yes", "label": GOOD[n]},
        lambda n: answer(f"Q{n}:", "Yes", GOOD[n]),
        ["prompt-completion, 6 examples", "reads prompt, completion, label"],
    ),
    "unpaired preference of messages #1": Case(
        lambda n: {"messages": said("uHi", f"a{n}"), "label": GOOD[n]},
        lambda n: answer(asked("uHi"), f"{n}", GOOD[n]),
        ["reads messages, label"],
    ),
    "marks as texts of a CSV file": Case(
        lambda n: {"prompt": f"Q{n}:", "response": "Yes", "is_good": str(GOOD[n])},
        lambda n: answer(f"Q{n}:", "Yes", GOOD[n]),
    ),
    "marks named label as texts of a CSV file": Case(
        lambda n: {"prompt": f"Q{n}:", "completion": "Yes", "label": str(GOOD[n])},
        lambda n: answer(f"Q{n}:", "Yes", GOOD[n]),
        ["prompt-completion, 6 examples"],
    ),
    "a score each": Case(
        lambda n: {"prompt": f"Q{n}:", "response": "Yes", "score": n / 2},
        lambda n: answer(f"Q{n}:", "Yes", n / 2),
    ),
    "a rank each, without rivals": Case(
        lambda n: {"messages": said(f"u{n}", "aYes"), "rank": n},
        lambda n: answer(asked(f"u{n}"), "Yes", -float(n)),
    ),
    "preference": Case(
        lambda n: {"prompt": f"Q{n}:", "chosen": "Yes", "rejected": "No"},
        lambda n: pair(f"Q{n}:", "Yes", "No"),
    ),
    "preference of messages": Case(
        lambda n: {"prompt": said("uHi"), "chosen": said(f"a{n}"), "rejected": said("aNo")},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "preference of messages and texts": Case(
        lambda n: {"prompt": said("uHi"), "chosen": f"{n}", "rejected": "No"},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "preference of whole conversations (UltraFeedback, binarized)": Case(
        lambda n: {
            "prompt": "Hi",
            "chosen": said("uHi", f"a{n}"),
            "rejected": said("uHi", "aNo"),
            "messages": said("uHi", f"a{n}"),
            "score_chosen": 7.5,
        },
        lambda n: pair(asked("uHi"), f"{n}", "No"),
        ["not read: messages, score_chosen"],
    ),
    "preference with a system column #4": Case(
        lambda n: {"system": "Be kind.", "prompt": f"Q{n}", "chosen": "Yes", "rejected": "No"},
        lambda n: pair(asked("sBe kind.", f"uQ{n}"), "Yes", "No"),
    ),
    "preference without some responses #31": Case(
        lambda n: {
            "prompt": f"Q{n}:",
            "chosen": [None, "", "Yes", "Yes", "Yes", "Yes"][n],
            "rejected": [None, "No", None, float("nan"), " ", "No"][n],
        },
        lambda n: [
            [Record(f"Q{n}:")],
            [],
            [answer(f"Q{n}:", "Yes")],
            [answer(f"Q{n}:", "Yes")],
            [],
            [pair(f"Q{n}:", "Yes", "No")],
        ][n],
        ["1 without chosen, 3 without rejected, 2 skipped (1 chosen is empty (first: "],
    ),
    "implicit prompt (Anthropic's HH)": Case(
        lambda n: {
            "chosen": f"{asked('uHi', f'u{n}')} Yes",
            "rejected": f"{asked('uHi', f'u{n}')}No",
        },
        lambda n: pair(asked("uHi", f"u{n}"), "Yes", "No"),
    ),
    "implicit prompt with a system column #4": Case(
        lambda n: {
            "system": "Be kind." if n else " ",
            "chosen": f"{asked(f'u{n}')} Yes",
            "rejected": f"{asked(f'u{n}')} No",
        },
        lambda n: pair(asked(*(["sBe kind."] if n else []), f"u{n}"), "Yes", "No"),
    ),
    "texts that look like missing values #32": Case(
        lambda n: {"prompt": f"é\u2028{n}", "completion": ["None", "nan", "null"][n % 3]},
        lambda n: answer(f"é\u2028{n}", ["None", "nan", "null"][n % 3]),
    ),
    "implicit prompt of messages": Case(
        lambda n: {"chosen": said("uHi", f"a{n}"), "rejected": said("uHi", "aNo")},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "messages whose last answer calls a tool #10": Case(
        lambda n: {"messages": said(f"u{n}", "a", tool_calls=[CALL]), "tools": [TOOL]},
        lambda n: answer(asked(f"u{n}"), json.dumps([CALL]))._replace(tools=[TOOL]),
        ["reads messages, tools"],
    ),
    "messages with a tool's result #10": Case(
        lambda n: {"messages": [*said(f"u{n}"), CALLED, *said("t42", "aIt is 42.")]},
        lambda n: answer(
            f"\n\nHuman: {n}\n\nAssistant: {json.dumps([CALL])}\n\nTool: 42\n\nAssistant:",
            "It is 42.",
        ),
        ["learns 12 answers of 6 conversations"],
    ),
    "messages with a thought, and a key that is not read": Case(
        lambda n: {"messages": said(f"u{n}", "aok", reasoning_content="hm", weight=1, mood="x")},
        lambda n: answer(asked(f"u{n}"), "ok"),
        ["0 skipped", "not read: messages[].mood"],
    ),
    "messages whose answer is not to be learned": Case(
        lambda n: {"messages": said(f"u{n}", "aok", train=n > 0)},
        lambda n: answer(asked(f"u{n}"), "ok") if n else [],
        ["1 skipped (1 no answer may be learned"],
    ),
    "messages of parts #11": Case(
        lambda n: {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"{n}"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "ok"}]},
            ]
        },
        lambda n: answer(asked(f"u{n}"), "ok"),
    ),
    "OpenAI's role developer #34": Case(
        lambda n: {"messages": said("dBe kind.", f"u{n}", "aok")},
        lambda n: answer(asked("sBe kind.", f"u{n}"), "ok"),
    ),
    # -------------------------------------------------------------------- Alpaca and LLaMA-Factory
    "LLaMA-Factory's tools #9": Case(
        lambda n: {
            "conversations": shared(
                f"u{n}", f"f{json.dumps(CALL['function'])}", "o42", "aIt is 42."
            ),
            "tools": json.dumps([TOOL]),
        },
        lambda n: answer(
            f"\n\nHuman: {n}\n\nAssistant: {json.dumps([CALL])}\n\nTool: 42\n\nAssistant:",
            "It is 42.",
        )._replace(tools=[TOOL]),
        ["reads conversations, tools", "learns 12 answers of 6 conversations"],
    ),
    "ShareGPT's other roles #34": Case(
        lambda n: {"conversations": shared(f"u{n}", "bok")},
        lambda n: answer(asked(f"u{n}"), "ok"),
    ),
    "Alpaca #8": Case(
        lambda n: {
            "instruction": f"Do {n}.",
            "input": "it" if n % 2 else "",
            "output": "ok",
            "text": "...",
        },
        lambda n: answer(asked(f"uDo {n}.\nit" if n % 2 else f"uDo {n}."), "ok"),
        ["Alpaca, 6 examples", "reads instruction, input, output; not read: text"],
    ),
    "Alpaca with a history": Case(
        lambda n: {"instruction": f"{n}", "output": "ok", "history": [["a", "b"]], "system": "S"},
        lambda n: answer(asked("sS", "ua", "ab", f"u{n}"), "ok"),
    ),
    "Alpaca for KTO": Case(
        lambda n: {"instruction": f"{n}", "input": "", "output": "ok", "kto_tag": GOOD[n]},
        lambda n: answer(asked(f"u{n}"), "ok", GOOD[n]),
    ),
    "Alpaca, preference #6": Case(
        lambda n: {"instruction": f"{n}", "input": "x", "chosen": "Yes", "rejected": "No"},
        lambda n: pair(asked(f"u{n}\nx"), "Yes", "No"),
    ),
    "ShareGPT #7": Case(
        lambda n: {"conversations": shared("uHi", "aone", "uagain", f"a{n}"), "id": "x"},
        lambda n: answer(asked("uHi", "aone", "uagain"), f"{n}"),
        ["not read: id"],
    ),
    "ShareGPT for KTO": Case(
        lambda n: {"conversations": shared("uHi", f"a{n}"), "kto_tag": GOOD[n]},
        lambda n: answer(asked("uHi"), f"{n}", GOOD[n]),
    ),
    "ShareGPT, preference #7": Case(
        lambda n: {
            "conversations": shared("uHi"),
            "chosen": shared(f"a{n}")[0],
            "rejected": shared("aNo")[0],
        },
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "ShareGPT, preference of texts #16": Case(
        lambda n: {"conversations": shared("uHi"), "chosen": f"{n}", "rejected": "No"},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "ShareGPT, preference of whole conversations": Case(
        lambda n: {
            "conversations": said("uHi"),
            "chosen": said("uHi", f"a{n}"),
            "rejected": said("uHi", "aNo"),
        },
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "LLaMA-Factory's chosen_messages #12": Case(
        lambda n: {
            "chosen_messages": said("uHi", f"a{n}"),
            "rejected_messages": said("uHi", "aNo"),
        },
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    # ------------------------------------------------------------- ms-swift, OpenRLHF, OpenAI, verl
    "ms-swift's query #17": Case(
        lambda n: {
            "system": "S",
            "query": f"{n}",
            "response": "ok",
            "history": [["a", "b"], ["c", "d"]],
        },
        lambda n: answer(asked("sS", "ua", "ab", "uc", "ad", f"u{n}"), "ok"),
    ),
    "ms-swift's query without history": Case(
        lambda n: {"query": f"{n}", "response": "ok", "history": []},
        lambda n: answer(asked(f"u{n}"), "ok"),
    ),
    "ms-swift's query, preference": Case(
        lambda n: {
            "query": f"{n}",
            "response": "Yes",
            "rejected_response": "No",
            "history": [["a", "b"]],
        },
        lambda n: pair(asked("ua", "ab", f"u{n}"), "Yes", "No"),
    ),
    "ms-swift's rejected_response #18": Case(
        lambda n: {"messages": said("uHi", f"a{n}"), "rejected_response": "No"},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "ms-swift's rejected_messages #18": Case(
        lambda n: {"messages": said("uHi", f"a{n}"), "rejected_messages": said("uHi", "aNo")},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "ms-swift's conversation #17": Case(
        lambda n: {
            "conversation": [{"human": "a", "assistant": "b"}, {"human": f"{n}", "assistant": "ok"}]
        },
        lambda n: answer(asked("ua", "ab", f"u{n}"), "ok"),
    ),
    "OpenRLHF's context_messages, preference #24": Case(
        lambda n: {"context_messages": said("uHi"), "chosen": f"{n}", "rejected": "No"},
        lambda n: pair(asked("uHi"), f"{n}", "No"),
    ),
    "OpenRLHF's context_messages, response": Case(
        lambda n: {"context_messages": said("uHi"), "response": f"{n}"},
        lambda n: answer(asked("uHi"), f"{n}"),
    ),
    "OpenRLHF's context_messages": Case(
        lambda n: {"context_messages": said(f"u{n}"), "label": "42"},
        lambda n: Record(asked(f"u{n}")),
    ),
    "OpenAI's preference #24": Case(
        lambda n: {
            "input": {"messages": said("uHi"), "tools": [TOOL] if n else []},
            "preferred_output": said(f"a{n}"),
            "non_preferred_output": said("aNo"),
        },
        lambda n: pair(asked("uHi"), f"{n}", "No")._replace(tools=[TOOL] if n else None),
    ),
    "verl #21": Case(
        lambda n: {
            "data_source": "openai/gsm8k",
            "prompt": said(f"u{n}"),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": n},
        },
        lambda n: Record(asked(f"u{n}")),
        ["not read: data_source, ability, reward_model, extra_info"],
    ),
    # ---------------------------------------------------------------- several responses to a prompt
    "ranking, best first": Case(
        lambda n: {"prompt": f"Q{n}:", "responses": ["a", " b", "c"]},
        lambda n: [pair(f"Q{n}:", *two) for two in (("a", "b"), ("a", "c"), ("b", "c"))],
    ),
    "ranking of one": Case(
        lambda n: {"prompt": f"Q{n}:", "responses": ["a", ""]},
        lambda n: answer(f"Q{n}:", "a"),
        ["6 skipped (6 responses without text or score (first: "],
    ),
    "scored responses": Case(
        lambda n: {
            "prompt": f"Q{n}:",
            "responses": ["a", "b", "c", "d"],
            "scores": [1, 2.5, 1, None],
        },
        lambda n: [pair(f"Q{n}:", "b", "a"), pair(f"Q{n}:", "b", "c")],
        ["6 pairs of responses with equal scores", "6 responses without text or score"],
    ),
    "one scored response": Case(
        lambda n: {"prompt": f"Q{n}:", "responses": ["a"], "scores": [n]},
        lambda n: answer(f"Q{n}:", "a", float(n)),
    ),
    "scores over several rows": Case(
        lambda n: [
            {"prompt": f"Q{n}:", "response": text, "rating": score}
            for text, score in (("a", 1), ("b", 3), ("c", 3))
        ],
        lambda n: [pair(f"Q{n}:", "b", "a"), pair(f"Q{n}:", "c", "a")],
        ["6 skipped (6 pairs of responses with equal scores (first: "],
    ),
    "UltraFeedback": Case(
        lambda n: {
            "instruction": f"{n}",
            "models": ["x", "y"],
            "completions": [
                {"response": "a", "overall_score": 8.5, "fine-grained_score": 2.0},
                {"response": "b", "overall_score": 7.0, "fine-grained_score": 4.0},
                {"response": "c", "overall_score": None, "fine-grained_score": 3.5},
            ],
        },
        lambda n: [pair(asked(f"u{n}"), *two) for two in (("b", "a"), ("c", "a"), ("b", "c"))],
        ["not read: models"],
    ),
    "HelpSteer 2 #3": Case(
        lambda n: [
            {"prompt": f"{n}", "response": "a", "helpfulness": n, "verbosity": 4},
            {"prompt": f"{n}", "response": "b", "helpfulness": 2, "verbosity": 0},
        ],
        lambda n: [] if n == 2 else pair(asked(f"u{n}"), *(("a", "b") if n > 2 else ("b", "a"))),
        ["5 examples", "1 pairs of responses with equal", "not read: verbosity"],
    ),
    "HelpSteer 2, several turns": Case(
        lambda n: {
            "prompt": f"Hi\n<extra_id_1>Assistant\nYes?\n<extra_id_1>User\nWhy: {n}",
            "response": "a",
            "helpfulness": 4,
        },
        lambda n: answer(asked("uHi", "aYes?", f"uWhy: {n}"), "a", 4.0),
    ),
    "HelpSteer, one response each": Case(
        lambda n: {"prompt": f"{n}", "response": "a", "helpfulness": 4 - n % 2},
        lambda n: answer(asked(f"u{n}"), "a", 4.0 - n % 2),
    ),
    "HelpSteer 3": Case(
        lambda n: {
            "domain": "x",
            "context": said("uHi", "aYes?", f"u{n}"),
            "response1": "a",
            "response2": "b",
            "overall_preference": n - 3,
        },
        lambda n: (
            []
            if n == 3
            else pair(asked("uHi", "aYes?", f"u{n}"), *(("a", "b") if n < 3 else ("b", "a")))
        ),
        ["1 pairs of responses with equal scores", "not read: domain"],
    ),
    "HelpSteer 2, preferences": Case(
        lambda n: {
            "prompt": f"{n}",
            "response_1": "a",
            "response_2": "b",
            "preference_strength": [-3, -1, 0, 1, 2, 3][n],
        },
        lambda n: [] if n == 2 else pair(asked(f"u{n}"), *(("a", "b") if n < 2 else ("b", "a"))),
        ["1 skipped (1 pairs of responses with equal scores (first: "],
    ),
    "AlpacaFarm": Case(
        lambda n: {
            "instruction": f"{n}",
            "input": "x" if n else "",
            "output_1": "a",
            "output_2": "b",
            "preference": 1 + n % 2,
        },
        lambda n: pair(asked(f"u{n}\nx" if n else "u0"), *(("b", "a") if n % 2 else ("a", "b"))),
    ),
    "TL;DR, graded summaries": Case(
        lambda n: {
            "info": {"title": "T", "post": f"{n}"},
            "summary": {"text": "short", "axes": {"overall": n + 1, "accuracy": 7}},
        },
        lambda n: answer(asked(f"uT\n{n}\nTL;DR:"), "short", n + 1.0),
    ),
    "UltraInteract": Case(
        lambda n: {"trajectory": shared(f"u{n}"), "chosen": "Yes", "rejected": "No"},
        lambda n: pair(asked(f"u{n}"), "Yes", "No"),
    ),
    "Nectar #23": Case(
        lambda n: {
            "prompt": f"\n\nHuman: {n}\n\nAssistant: ",
            "answers": [
                {"answer": "a", "rank": 2.0},
                {"answer": "b", "rank": 1.0},
                {"answer": "c", "rank": 3.0},
            ],
        },
        lambda n: [pair(asked(f"u{n}"), *two) for two in (("b", "a"), ("a", "c"), ("b", "c"))],
    ),
    "NeMo-RL's preference #24": Case(
        lambda n: {
            "context": said(f"u{n}"),
            "completions": [
                {"rank": 1, "completion": said("ab")},
                {"rank": 0, "completion": said("aa")},
            ],
        },
        lambda n: pair(asked(f"u{n}"), "a", "b"),
    ),
    "SHP": Case(
        lambda n: {
            "history": f"{n}",
            "human_ref_A": "a",
            "human_ref_B": "b",
            "labels": n % 2,
            "score_A": 3,
        },
        lambda n: pair(asked(f"u{n}"), *(("a", "b") if n % 2 else ("b", "a"))),
        ["not read: score_A"],
    ),
    "PKU-SafeRLHF #23": Case(
        lambda n: {
            "prompt": f"{n}",
            "response_0": "a",
            "response_1": "b",
            "better_response_id": n % 2,
            "safer_response_id": 0,
        },
        lambda n: pair(asked(f"u{n}"), *(("b", "a") if n % 2 else ("a", "b"))),
        ["not read: safer_response_id"],
    ),
    "Arena's battles #24": Case(
        lambda n: {
            "conversation_a": said(f"u{n}", "aa"),
            "conversation_b": said(f"u{n}", "ab"),
            "winner": ["model_a", "model_b", "tie", "tie (bothbad)", "model_a", "model_b"][n],
        },
        lambda n: (
            []
            if n in (2, 3)
            else pair(asked(f"u{n}"), *(("b", "a") if n in (1, 5) else ("a", "b")))
        ),
        ["2 pairs of responses with equal scores"],
    ),
    "WebGPT": Case(
        lambda n: {
            "question": {"full_text": f"{n}"},
            "answer_0": "a",
            "answer_1": "b",
            "score_0": 0.5,
            "score_1": n - 1.0,
        },
        lambda n: pair(asked(f"u{n}"), *(("b", "a") if n > 1 else ("a", "b"))),
    ),
    "Stack Exchange": Case(
        lambda n: {
            "question": f"{n}",
            "answers": [{"text": "a", "pm_score": 0}, {"text": "b", "pm_score": 4}],
        },
        lambda n: pair(asked(f"u{n}"), "b", "a"),
    ),
    "generations and ratings": Case(
        lambda n: {
            "instruction": f"{n}",
            "generations": ["a", "b", "c"],
            "ratings": ["3", "5", "N/A"],
        },
        lambda n: pair(asked(f"u{n}"), "b", "a"),
    ),
    "TL;DR comparisons #24": Case(
        lambda n: {
            "info": {"title": "T", "post": f"{n}", "article": None},
            "summaries": [{"text": "a"}, {"text": "b"}],
            "choice": n % 2,
            "worker": "x",
        },
        lambda n: pair(asked(f"uT\n{n}\nTL;DR:"), *(("b", "a") if n % 2 else ("a", "b"))),
        ["not read: worker"],
    ),
    "oasst's trees #25": Case(
        lambda n: {
            "message_tree_id": "x",
            "prompt": {
                "text": f"{n}",
                "role": "prompter",
                "replies": [
                    {
                        "text": "b",
                        "role": "assistant",
                        "rank": 1,
                        "replies": [
                            {
                                "text": "more",
                                "role": "prompter",
                                "replies": [{"text": "c", "role": "assistant"}],
                            },
                        ],
                    },
                    {"text": "a", "role": "assistant", "rank": 0, "replies": []},
                ],
            },
        },
        lambda n: [pair(asked(f"u{n}"), "a", "b"), answer(asked(f"u{n}", "ab", "umore"), "c")],
    ),
    "oasst's messages #25": Case(
        lambda n: [
            {
                "message_id": f"{n}",
                "parent_id": None,
                "text": f"{n}",
                "role": "prompter",
                "rank": None,
                "lang": "en",
            },
            {
                "message_id": f"{n}b",
                "parent_id": f"{n}",
                "text": "b",
                "role": "assistant",
                "rank": 1.0,
                "lang": "en",
            },
            {
                "message_id": f"{n}a",
                "parent_id": f"{n}",
                "text": "a",
                "role": "assistant",
                "rank": 0.0,
                "lang": "en",
            },
        ],
        lambda n: pair(asked(f"u{n}"), "a", "b"),
        ["not read: lang"],
    ),
    # --------------------------------------------------------------------------- sets of the field
    "Intel's orca_dpo_pairs #5": Case(
        lambda n: {"system": "S", "question": f"{n}", "chosen": "Yes", "rejected": "No"},
        lambda n: pair(asked("sS", f"u{n}"), "Yes", "No"),
    ),
    "argilla's orca pairs #5": Case(
        lambda n: {
            "system": "",
            "input": f"{n}",
            "chosen": "Yes",
            "rejected": "No",
            "generations": ["a", "b"],
        },
        lambda n: pair(asked(f"u{n}"), "Yes", "No"),
        ["not read: generations"],
    ),
    "argilla's UltraFeedback": Case(
        lambda n: {"instruction": f"{n}", "chosen_response": "Yes", "rejected_response": "No"},
        lambda n: pair(asked(f"u{n}"), "Yes", "No"),
    ),
    "TL;DR summaries #23": Case(
        lambda n: {"prompt": f"Text {n} TL;DR:", "label": "short"},
        lambda n: answer(f"Text {n} TL;DR:", "short"),
    ),
    "GSM8K #20": Case(
        lambda n: {"question": f"{n}", "answer": "6 * 7. #### 42"},
        lambda n: answer(asked(f"u{n}"), "6 * 7. #### 42"),
    ),
    "MATH": Case(
        lambda n: {"problem": f"{n}", "solution": "42", "level": "5"},
        lambda n: answer(asked(f"u{n}"), "42"),
    ),
    "HumanEval #41": Case(
        lambda n: {
            "prompt": f"def f{n}():\n",
            "canonical_solution": "    return 1\n",
            "test": "assert f()",
        },
        lambda n: Record(f"def f{n}():\n", "    return 1\n"),
        ["not read: test"],
    ),
    "MBPP": Case(
        lambda n: {"text": f"Write {n}.", "code": "x = 1", "test_list": ["assert x"]},
        lambda n: answer(asked(f"uWrite {n}."), "x = 1"),
        ["not read: test_list"],
    ),
    "MBPP, sanitized": Case(
        lambda n: {"prompt": f"Write {n}.", "code": "x = 1"},
        lambda n: answer(asked(f"uWrite {n}."), "x = 1"),
    ),
    "Dolly": Case(
        lambda n: {"instruction": f"{n}", "context": "C", "response": "ok"},
        lambda n: answer(asked(f"u{n}\nC"), "ok"),
    ),
    "OpenOrca": Case(
        lambda n: {"system_prompt": "S", "question": f"{n}", "response": "ok"},
        lambda n: answer(asked("sS", f"u{n}"), "ok"),
    ),
    "input and output": Case(
        lambda n: {"input": f"{n}", "output": "ok"}, lambda n: answer(asked(f"u{n}"), "ok")
    ),
    "Aya": Case(
        lambda n: {"inputs": f"{n}", "targets": "ok"}, lambda n: answer(asked(f"u{n}"), "ok")
    ),
    "LMSYS-Chat": Case(
        lambda n: {"conversation": said(f"u{n}", "aok"), "model": "x"},
        lambda n: answer(asked(f"u{n}"), "ok"),
    ),
    "Capybara": Case(
        lambda n: {"conversation": [{"input": f"{n}", "output": "ok"}]},
        lambda n: answer(asked(f"u{n}"), "ok"),
    ),
}


# Columns of a row that is refused, and parts of the message.
TALK, WAY_OUT = said("uHi", "aone"), "data.sets.mine={path: "
TWO = {"chosen": "fig", "rejected": "drum"}
REFUSED: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "TRL's stepwise supervision": (
        {"prompt": "Hi", "completions": ["a", "b"], "labels": [True, False]},
        ["'TRL's stepwise supervision' cannot be used: it grades the steps", WAY_OUT],
    ),
    "images #13": (
        {"messages": TALK, "images": ["a.png"]},
        ["'images' is a part", "messages: mess"],
    ),
    "an image in a message #11": (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]},
        ["row 1: messages[0] has a part of type image; must be text", "data.sets.NAME.colu"],
    ),
    "the call of a tool that is not JSON #9": (
        {"conversations": shared("uHi", "fadd(1)", "o2", "a2")},
        ["row 1: messages[1] has the role 'function_call'; must be JSON", "data.sets.NAME.colu"],
    ),
    "a weight between 0 and 1": (
        {"messages": said("uHi", "aYes", weight=0.5)},
        ["row 1: messages[1] has weight=0.5; must be 0"],
    ),
    "audio": (
        {"prompt": "Hi", "completion": "a", "audio": "a.wav"},
        ["'audio' is a part", WAY_OUT],
    ),
    "system of a text": (
        {"text": "Hi", "system": "S"},
        ["'system' is a part", "'language modelling'"],
    ),
    "several answers to a prompt #23": (
        {"prompt": "Hi", "answers": ["a", "b"]},
        ["'answers' is a part", "the layout 'prompt-only' does not read it"],
    ),
    "a rejected answer alone": ({"prompt": "Hi", "rejected": "a"}, ["'rejected' is a part"]),
    "two responses without a grade": (
        {"prompt": "Hi", "response_0": "a", "response_1": "b"},
        ["'response_0' is a part", "{prompt: 'human(prompt)', chosen: response_0}"],
    ),
    "two grades #3": (
        {"prompt": "Hi", "response": "no", "quality": 0, "rating": 4.5},
        ["the columns quality and rating grade the same", "chosen: response, grade: quality}"],
    ),
    "a grade of another kind": (
        {"prompt": "Hi", "response": "no", "rating": "good"},
        ["row 1: the grade is 'good'; must be true, false or a number"],
    ),
    "a prompt of another name": (
        {"topic": "Hi", "chosen": "a", "rejected": "b"},
        ["5 chosen and rejected share no prompt", "data.sets.NAME.columns says which"],
    ),
    "scores of other responses": (
        {"prompt": "Hi", "responses": ["a", "b"], "scores": [1]},
        ["row 1: scores has 1 values for 2 responses"],
    ),
    "unknown columns #24": (
        {"question": "Hi", "reply": "Yes"},
        ["no known layout has the columns question, reply.", "(no answers)", "chosen: reply}"],
    ),
    "a question with a context": (
        {"question": "Hi", "context": "C", "answer": "Yes"},
        ["'context' is a part", "{prompt: 'human(question)', chosen: answer}"],
    ),
    "a battle without its winner #24": (
        {"conversation_a": TALK, "conversation_b": TALK},
        ["nearest is Arena's battles: conversation_a, conversation_b, winner (no winner)"],
    ),
    "two tables #30": ({"train": [{"text": "a"}], "test": []}, ["no known layout", "train, test"]),
    "columns first #30": (
        {"prompt": {"0": "a"}, "chosen": {"0": "b"}},
        ["has the keys ['0']", "'role'"],
    ),
    "rows of the hub's viewer #30": (
        {"features": [], "rows": [{"row_idx": 0, "row": {"prompt": "Hi"}}], "partial": False},
        ["no known layout has the columns features, rows, partial", WAY_OUT],
    ),
    "an input of another type": (
        {"instruction": "Do.", "input": 5, "output": "ok"},
        ["row 1: messages of the layout Alpaca: ", "lines(), invalid type for value: 5"],
    ),
    "SQuAD #30": ({"data": {"0": "a"}, "version": "1"}, ["no known layout", WAY_OUT]),
    "a prompt of another type": ({"prompt": 5}, ["'prompt' holds a value of type int; must be"]),
    "responses of another type": (
        {"prompt": "Hi", "responses": "Yes"},
        ["column 'responses' holds a value of type str; must be a list"],
    ),
    "one response of another type": (
        {"prompt": "Hi", "responses": ["Yes", 5]},
        ["column 'chosen' holds a value of type int; must be text"],
    ),
    "messages of another type": ({"messages": "Hi"}, ["type str; must be a list of messages"]),
    "messages without content": ({"messages": [{"from": "gpt"}]}, ["messages[0] has the keys"]),
}


def write(file: Path, rows: Rows) -> None:
    """Write rows in the form of the file's name."""
    if file.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix in (".csv", ".tsv"):
        with file.open("w", newline="") as stream:
            mark = "\t" if file.suffix == ".tsv" else ","
            lines = csv.DictWriter(stream, list(rows[0]), delimiter=mark)
            lines.writeheader()
            lines.writerows(rows)
    elif file.suffix == ".json":
        file.write_text(json.dumps({"data": rows} if file.stem == "one" else rows, indent=1))
    elif not file.suffix:
        datasets.Dataset.from_list(rows).save_to_disk(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(file: Path, **entry: Any) -> RawDataset:
    named = {"mine": DatasetConfig(path=str(file), **entry)}
    (found,) = load_datasets(config_of(None, sets=named, source=Source.local), seed=0)
    return found


def flat(found: Callable[[int], Any]) -> list[Any]:
    """Return what ``found`` gives for each number, in one list."""
    each = [found(n) for n in NUMBERS]
    return [item for part in each for item in (part if isinstance(part, list) else [part])]


def bare(records: Sequence[Record]) -> list[Record]:
    """Return the records without their places, columns, and messages, which their prompts show."""
    return [each._replace(place=None, messages=None, columns=None, turns=()) for each in records]


@pytest.mark.parametrize("name", USED)
def test_rows_are_used_right(name: str, tmp_path: Path) -> None:
    case, file = USED[name], tmp_path / "rows.jsonl"
    write(file, flat(case.rows))
    found = read(file)
    assert sorted(bare(found.train), key=str) == sorted(flat(case.records), key=str)
    line = describe_dataset(found)
    assert [part for part in case.says if part not in line] == [], line


def test_the_table_has_every_layout(tmp_path: Path) -> None:
    # A test per layout that none of the rows above has would not be missed.
    unseen = {layout.name for layout in read_layouts() if not layout.refuse}
    for case in USED.values():
        rows = [Row("f", n, row) for n, row in enumerate(flat(case.rows))]
        unseen.discard(detect_layout(rows, source="f").name)
    assert not unseen


# Files; of the same rows where their form allows it. Another form is another row.
NESTED = ("messages, several turns #14", "UltraFeedback", "ShareGPT, preference #7", "verl #21")
FLAT = ("texts that look like missing values #32", "Alpaca #8", "SHP", "HelpSteer 2 #3")
FORMS = {
    "rows.jsonl": NESTED + FLAT,
    "rows.json": NESTED + FLAT,
    "one.json": NESTED + FLAT,
    "rows.parquet": NESTED + FLAT,
    "saved": NESTED + FLAT,
    "rows.csv": FLAT,
    "rows.tsv": FLAT,
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_every_form_have_the_same_rows(form: str, tmp_path: Path) -> None:
    for number, name in enumerate(FORMS[form]):
        file = tmp_path / str(number) / form
        file.parent.mkdir()
        write(file, flat(USED[name].rows))
        found = read(file)
        assert sorted(bare(found.train), key=str) == sorted(flat(USED[name].records), key=str)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    row, parts = REFUSED[name]
    write(tmp_path / "rows.jsonl", [row] * 5)
    with pytest.raises(DataError) as refused:
        read(tmp_path / "rows.jsonl")
    assert [part for part in parts if part not in str(refused.value)] == [], refused.value


def test_the_advised_line_reads_the_rows(
    compose: Callable[[list[str]], Any], tmp_path: Path
) -> None:
    file = tmp_path / "my rows.jsonl"
    write(file, [{"question": f"{n}", "reply": "Yes"} for n in NUMBERS])
    with pytest.raises(DataError) as refused:
        read(file)
    line = shlex.split(str(refused.value).rpartition(": data.path=null ")[2])
    config = to_run_config(
        compose(["data=local", "data.path=null", *(f"+{each}" for each in line)])
    )
    (found,) = load_datasets(config.data, seed=0)
    assert bare(found.train) == [answer(asked(f"u{n}"), "Yes") for n in NUMBERS]


# ---------------------------------------------------------------------------- rows that are counted

PROMPT = asked("uHi")
ASK, YES, NO = said("uHi"), said("aYes"), said("aNo")
USABLE: Rows = [
    {"prompt": PROMPT, "chosen": " Yes", "rejected": " No"},
    {"chosen": f"{PROMPT} Yes", "rejected": f"{PROMPT} No"},
    {"chosen": ASK + YES, "rejected": ASK + NO},
    {"prompt": PROMPT, "responses": ["Yes", "No"]},
    {"prompt": PROMPT, "completion": "Yes"},
    {"prompt": PROMPT, "completion": "Yes", "label": True},
    {"messages": ASK + YES},
    {"prompt": ASK},
    {"text": "Yes"},
]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "prompt is null"),
        ({"prompt": " ", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ({"prompt": PROMPT, "chosen": "a", "rejected": "\n"}, "rejected is empty"),
        ({"prompt": PROMPT, "chosen": "a", "rejected": " a"}, "chosen equals rejected"),
        ({"prompt": PROMPT, "responses": []}, "responses is empty"),
        ({"prompt": PROMPT, "responses": ["a", "b", " a"]}, "responses has the same text twice"),
        ({"prompt": PROMPT, "completion": "a", "label": None}, "grade is null"),
        ({"text": "\n"}, "text is empty"),
        ({"chosen": f"{PROMPT} a", "rejected": f"{PROMPT} a"}, "chosen equals rejected"),
        ({"chosen": PROMPT, "rejected": f"{PROMPT} a"}, "chosen is empty"),
        ({"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "prompt is empty"),
        ({"chosen": f"x{PROMPT} a", "rejected": f"y{PROMPT} b"}, "share no prompt"),
        # the answers hold turns of their own: learning them would teach to speak for the human
        ({"chosen": f"{PROMPT} a{PROMPT} b", "rejected": f"{PROMPT} a"}, "share no prompt"),
        ({"chosen": f"{PROMPT} a{PROMPT} b", "rejected": f"{PROMPT} c{PROMPT} d"}, "share no"),
        ({"prompt": [{"role": "user", "content": " "}]}, "prompt is empty"),
        ({"prompt": ASK + YES}, "prompt ends in an assistant turn"),
        ({"chosen": ASK + YES, "rejected": []}, "rejected is empty"),
        ({"messages": YES}, "prompt is empty"),
        ({"messages": [*ASK, *said("a")]}, "messages ends in an empty turn"),
        ({"prompt": ASK, "completion": YES + ASK + YES}, "does not end in one assistant turn"),
        ({"prompt": ASK, "completion": ASK}, "does not end in one assistant turn"),
        ({"prompt": ASK, "chosen": YES, "rejected": YES}, "chosen equals rejected"),
        ({"chosen": ASK + YES, "rejected": [*ASK, *ASK, *NO]}, "share no prompt"),
        ({"chosen": YES, "rejected": NO}, "prompt is empty"),
    ],
)
def test_unusable_row_is_counted(row: dict[str, Any], reason: str) -> None:
    usable = next(each for each in USABLE if each.keys() == row.keys())
    rows = [Row("a.jsonl", n, each) for n, each in enumerate([usable, row, usable, row], 1)]
    converted = to_records(rows, source="a.jsonl")
    assert len(converted.records) == 2
    assert list(converted.left_out.values()) == [2]
    ((found, places),) = converted.left_out.places.items()
    assert reason in found
    assert places == [("a.jsonl", 2), ("a.jsonl", 4)]


# --------------------------------------------------------------------------- columns, marks, spaces


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ("prompt chosen rejected completion text", "preference"),
        ("prompt completion chosen", "preference"),
        ("prompt completion responses", "ranking"),
        ("prompt response chosen rejected", "preference"),
        ("chosen rejected text", "implicit-prompt preference"),
        ("prompt text", "prompt-only"),
        ("instruction output prompt text", "Alpaca"),
        ("prompt chosen", "preference"),
        ("problem solution messages", "language modelling, messages"),
    ],
)
def test_the_most_specific_layout_wins(columns: str, name: str) -> None:
    values = {column: ["x"] if column == "responses" else "x" for column in columns.split()}
    row = Row("data.jsonl", 1, values)
    assert detect_layout([row], source="data.jsonl").name == name


def test_columns_are_those_of_all_rows() -> None:
    rows = [{"prompt": None, "chosen": YES}, {"prompt": ASK, "chosen": YES, "rejected": NO}]
    converted = to_records([Row("f", n, row) for n, row in enumerate(rows)], source="f")
    assert bare(converted.records) == [pair(PROMPT, "Yes", "No")]
    assert converted.left_out == {"prompt is null": 1}


def test_scored_pairs_have_margins_and_scores_as_columns() -> None:
    keep = {"margin": "reward.margin_column", "rejected_score": "reward.score_columns"}
    scored = {"prompt": "Q:", "responses": ["a", "b"], "scores": [0.5, 3]}
    rows = [{"prompt": "Q:", "response": text, "rating": n} for n, text in enumerate("abc")]
    for given, margins in (([scored], [2.5]), (rows, [1.0, 2.0, 1.0])):
        found = [Row("f", n, row) for n, row in enumerate(given)]
        columns = [each.columns or {} for each in to_records(found, source="f", keep=keep).records]
        assert [each["margin"] for each in columns] == margins
        assert all(each.keys() == keep.keys() for each in columns)


def test_rewards_read_columns_and_their_fields() -> None:
    row = {"prompt": "Hi", "answer": "#### 42", "reward_model": {"ground_truth": "42"}}
    key = "rewards.right.columns"
    keep = {"answer": key, "reward_model.ground_truth": key}
    (record,) = to_records([Row("f", 1, row)], source="f", keep=keep).records  # 20, 21
    assert record.columns == {"answer": "#### 42", "reward_model.ground_truth": "42"}
    with pytest.raises(
        DataError, match=r"row 1: column 'reward_model\.x' is missing, which rewards"
    ):
        to_records([Row("f", 1, row)], source="f", keep={"reward_model.x": key})
    marked = {"prompt": "Hi", "completion": "Yes", "label": "42"}  # a reward reads it: no grade
    (record,) = to_records([Row("f", 1, marked)], source="f", keep={"label": key}).records
    assert (record.grade, record.columns) == (None, {"label": "42"})


@pytest.mark.parametrize(
    ("prompt", "response", "joined"),
    [
        ("Human: a Assistant:", "b", "Human: a Assistant: b"),  # DeepSpeed-Chat's local json
        ("Human: a Assistant:", " b", "Human: a Assistant: b"),
        ("Human: a Assistant: ", "b", "Human: a Assistant: b"),
        ("Q: a\n", "b", "Q: a\nb"),
    ],
)
def test_one_space_where_there_is_none(prompt: str, response: str, joined: str) -> None:
    row = {"prompt": prompt, "chosen": response, "rejected": f"{response}!"}
    (record,) = to_records([Row("f", 1, row)], source="f").records
    assert (record.prompt, record.rejected) == (prompt, f"{record.chosen}!")
    assert f"{prompt}{record.chosen}" == joined


def test_conversation_is_rendered_as_turns() -> None:
    messages = [
        Message(turn["role"], turn["content"]) for turn in said("sBe.", "uHi", "aYes?", "uBye")
    ]
    assert render_prompt(messages) == asked("sBe.", "uHi", "aYes?", "uBye")


def test_white_space_of_messages_is_kept_but_blank_turns_are_not_shown() -> None:
    row = {"messages": said("s ", "u Hi\n", "a    Yes ")}
    (record,) = to_records([Row("f", 1, row)], source="f").records
    assert bare([record]) == [answer(asked("u Hi\n"), "    Yes ")]


def test_a_row_with_an_odd_message_is_counted_with_its_place() -> None:
    odd = {"messages": [*ASK, {"role": "critic", "content": "x"}]}
    given = [{"messages": ASK + YES}, odd, {"messages": ASK + YES}, odd]
    converted = to_records([Row("f", n, row) for n, row in enumerate(given, 1)], source="f")
    assert len(converted.records) == 2
    ((reason, count),) = converted.left_out.items()
    assert count == 2
    assert reason.startswith("messages[] has the role 'critic'")
    assert converted.left_out.places[reason] == [("f", 2), ("f", 4)]
