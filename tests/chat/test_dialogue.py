"""A chat keeps its history within the context and follows commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf.base.errors import DataError
from rlhf.chat.__main__ import greeting_lines
from rlhf.chat.dialogue import COMMANDS, Dialogue
from rlhf.chat.run_policy import RunPolicy
from rlhf.chat.talker import SampledAnswer, Talker
from rlhf.config.choices import Template
from rlhf.data.encoding import Encoder
from rlhf.data.plain_turns import build_plain_template
from rlhf.rollout.sampling import SamplingSettings
from tests.chat.small_run import POSITIONS, save_run
from tests.conftest import Compose

SAMPLING = SamplingSettings(max_tokens=12, temperature=1.0, top_k=0, top_p=1.0)
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def run_dir(compose: Compose, tmp_path: Path) -> Path:
    return save_run(tmp_path / "run", compose)


class Screen:
    """A dialogue in this process, and all that it wrote and said."""

    def __init__(self, run_dir: Path) -> None:
        self.written, self.said = "", list[str]()
        self.policy = RunPolicy(run_dir, None)
        talker = self.policy.talker
        self.dialogue = Dialogue(talker, SAMPLING, write=self.write, say=self.said.append)

    def write(self, text: str) -> None:
        self.written += text

    def type(self, *lines: str) -> Screen:
        for line in lines:
            assert self.dialogue.handle_line(line)
        return self


class Script:
    """Answers of a script in the place of a model's, and the prompts that they were given for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        self.prompts: list[str] = []
        self.temperatures: list[float] = []
        left = list(answers)

        def answer(
            talker: Talker, ids: list[int], sampling: SamplingSettings, write: Callable[..., None]
        ) -> SampledAnswer:
            self.prompts.append(talker.tokenizer.decode(ids))
            self.temperatures.append(sampling.temperature)
            text = left.pop(0)
            write(text)
            return SampledAnswer(text, talker.tokenizer(text).input_ids, "ended")

        monkeypatch.setattr(Talker, "answer", answer)


@pytest.mark.parametrize(
    ("template", "form"), [(None, Template.plain), (CHATML, Template.chat)], ids=["plain", "chat"]
)
def test_prompts_are_those_of_training(template: str | None, form: Template, run_dir: Path) -> None:
    talker = RunPolicy(run_dir, None).talker
    opening = "<|pad|>"
    tokenizer: Any = talker.tokenizer
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{opening} $A", special_tokens=[(opening, tokenizer.pad_token_id)]
    )
    assert tokenizer("a").input_ids[0] == tokenizer.pad_token_id
    tokenizer.chat_template = template or build_plain_template(opening)
    roles = ("system", "user", "assistant", "user")
    texts = ("Be good.", "hello", "And a good day.", "What is that?")
    asked = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    names = ("System", "Human", "Assistant", "Human")
    record = "".join(f"\n\n{n}: {t}" for n, t in zip(names, texts, strict=True)) + "\n\nAssistant:"
    trained_on = Encoder(talker.tokenizer, form).encode_prompts([record])[0]
    assert talker.encode_prompt(asked) == trained_on


def test_turns_are_kept(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, "One.", "Two.")
    screen = Screen(run_dir).type("hello", "", "  /and that? ")
    assert screen.written == "One.\nTwo.\n"
    assert script.prompts[1] == (
        "\n\nHuman: hello\n\nAssistant: One.\n\nHuman: /and that?\n\nAssistant:"
    )


def test_prompts_without_turns_stand_alone(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, "One.", "Two.")
    screen = Screen(save_run(tmp_path / "raw", compose, expects_conversations=False))
    screen.type("hello there", "/system Be good.", "and more")
    assert script.prompts == ["hello there", "and more"]
    assert "plain prompts" in screen.said[0]
    greeting = greeting_lines(screen.policy, replace(SAMPLING, temperature=0.0))
    assert greeting[1].startswith("temperature 0, always the likeliest token;")
    assert "each line is a prompt" in greeting[-1]


def test_commands_change_the_conversation(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, *(f"Answer {i}." for i in range(5)))
    screen = Screen(run_dir).type("hello", "/system Be good.", "/temperature 0.5", "/regenerate")
    assert script.prompts[1] == "\n\nSystem: Be good.\n\nHuman: hello\n\nAssistant:"
    assert script.temperatures == [1.0, 0.5]
    screen.type("more")
    assert "Assistant: Answer 1.\n\nHuman: more" in script.prompts[2]
    assert "Answer 0" not in script.prompts[2]
    screen.type("/clear", "hi", "/system", "/clear", "hi")
    assert script.prompts[3] == "\n\nSystem: Be good.\n\nHuman: hi\n\nAssistant:"
    assert script.prompts[4] == "\n\nHuman: hi\n\nAssistant:"


def test_help_lists_each_command_and_each_is_known(run_dir: Path) -> None:
    screen = Screen(run_dir).type("/help")
    assert [line.split()[0] for line in screen.said[: len(COMMANDS)]] == [
        name.split()[0] for name in COMMANDS
    ]
    for name in COMMANDS:
        command = name.split()[0]
        screen.said.clear()
        assert screen.dialogue.handle_line(command) is (command != "/quit")
        assert not any("no such command" in text for text in screen.said)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sing", "/sing: no such command; /help lists them"),
        ("/temperature warm", "/temperature warm: must be a finite number of at least 0"),
        ("/regenerate", "there is no answer yet"),
        ("what " * 200, rf"takes \d+ tokens.*leaves room for {POSITIONS - 12}"),
    ],
)
def test_a_mistake_is_explained_and_changes_nothing(
    line: str, words: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, "Yes.")
    screen = Screen(run_dir).type(line)
    assert re.search(words, screen.said[0])
    screen.type("hello")
    assert script.prompts == ["\n\nHuman: hello\n\nAssistant:"]
    assert script.temperatures == [1.0]


def test_a_template_that_fails_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talker = RunPolicy(run_dir, None).talker
    talker.tokenizer.chat_template = "{{ raise_exception('no system message here') }}"
    with pytest.raises(DataError, match=r"messages system, user: no system message here"):
        talker.encode_prompt([{"role": r, "content": "a"} for r in ("system", "user")])


def test_the_oldest_turns_leave_the_context(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, *["and a good day to you."] * 8)
    screen = Screen(run_dir).type("/system One.", *(f"{i} hello there" for i in range(8)))
    last = script.prompts[-1]
    assert last.startswith("\n\nSystem: One.\n\nHuman: ")
    assert "0 hello" not in last
    assert "6 hello there\n\nAssistant: and a good day to you.\n\nHuman: 7 hello" in last
    tokenizer = screen.policy.talker.tokenizer
    lengths = [len(tokenizer(prompt).input_ids) for prompt in script.prompts]
    assert max(lengths) <= POSITIONS - 12
    assert len([text for text in screen.said if "oldest messages" in text]) == 1
