"""Hold a conversation with a policy: answer messages, run commands, and fit the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlhf.base.errors import ConfigError, RlhfError
from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.chat.talker import ChatMessage, Talker, WriteText
from rlhf.rollout.sampling import SamplingSettings

COMMANDS: Mapping[str, str] = read_yaml_beside(__file__, "commands.yaml")


@dataclass
class Dialogue:
    """The state of a chat: messages, system message and temperature.

    Answers go to ``write`` in pieces, and notices go to ``say``.

    Raises:
        ConfigError: if the most tokens of an answer are under 1 or fill the model's context.
    """

    talker: Talker
    sampling: SamplingSettings
    write: WriteText
    say: WriteText
    _system: list[ChatMessage] = field(default_factory=list, init=False)
    _messages: list[ChatMessage] = field(default_factory=list, init=False)
    _given_notices: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        positions = self.talker.context_length
        if self.sampling.max_tokens < 1:
            raise ConfigError(f"--max-tokens={self.sampling.max_tokens}: must be at least 1")
        if positions is not None and self.sampling.max_tokens >= positions:
            raise ConfigError(
                f"--max-tokens={self.sampling.max_tokens}: prompt and answer share the model's "
                f"{positions} positions; use less than {positions}"
            )

    def handle_line(self, line: str) -> bool:
        """Answer a message or run a command; return False if the command ends the chat."""
        command, _, text = line.rstrip().partition(" ")
        text = text.strip()
        try:
            if line.startswith("/"):
                if command in ("/quit", "/exit"):
                    return False
                self._run_command(command, text)
            elif line.strip():
                self._answer([*self._messages, _build_message("user", line.strip())])
        except RlhfError as error:
            self.say(f"error: {error}")
        return True

    def _run_command(self, command: str, text: str) -> None:
        match command:
            case "/help":
                width = max(map(len, COMMANDS))
                for name, meaning in COMMANDS.items():
                    self.say(f"{name:<{width}}  {meaning}")
                self.say("A message that begins with / needs a space before it.")
            case "/clear":
                self._messages.clear()
                self._given_notices.clear()
                self.say("The conversation is empty.")
            case "/system":
                self._set_system(text)
            case "/temperature":
                temperature = parse_temperature(text, option="/temperature")
                self.sampling = replace(self.sampling, temperature=temperature)
                self.say(f"The temperature is {temperature:g}.")
            case "/regenerate":
                if not self._messages:
                    raise ConfigError("/regenerate: there is no answer yet")
                self._answer(self._messages[:-1])
            case _:
                self.say(f"{command}: no such command; /help lists them")

    def _answer(self, asked: list[ChatMessage]) -> None:
        """Answer the last message of ``asked``; make ``asked`` and the answer the conversation."""
        ids = self._drop_oldest_turns(asked)
        answer = self.talker.answer(ids, self.sampling, self.write)
        self.write("\n")
        match answer.ending:
            case "cut":
                self._say_once(
                    f"Answers are cut at {self.sampling.max_tokens} tokens: --max-tokens sets "
                    "the limit."
                )
            case "stopped":
                self.say("(stopped)")
        if answer.text:
            self._messages = [*asked, _build_message("assistant", answer.text)]

    def _drop_oldest_turns(self, asked: list[ChatMessage]) -> list[int]:
        """Drop the oldest turns from ``asked`` until the prompt fits; return its token ids.

        Raises:
            ConfigError: if the last message is too long by itself.
        """
        talker = self.talker
        while True:
            ids = talker.encode_prompt([*self._system, *asked])
            if talker.context_length is None:
                return ids
            most = talker.context_length - self.sampling.max_tokens
            if len(ids) <= most:
                return ids
            if len(asked) == 1:
                raise ConfigError(
                    f"the message takes {len(ids)} tokens, and the context of "
                    f"{talker.context_length} tokens leaves room for {most} besides the answer; "
                    "shorten it"
                    + (", or remove the system message with /system" if self._system else "")
                )
            del asked[:2]
            self._say_once(
                f"The conversation is longer than the context of {talker.context_length} tokens: "
                "the oldest messages are dropped from here on."
            )

    def _set_system(self, text: str) -> None:
        if not self.talker.expects_conversations:
            self.say("The model was trained on plain prompts, which have no system message.")
            return
        self._system = [_build_message("system", text)] if text else []
        self.say("The system message is set." if text else "There is no system message.")

    def _say_once(self, notice: str) -> None:
        if notice not in self._given_notices:
            self._given_notices.add(notice)
            self.say(notice)


def parse_temperature(text: str, *, option: str) -> float:
    """Parse ``text``, the value of ``option``, as a finite temperature of at least 0."""
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"{option} {text}: must be a finite number of at least 0")
    return temperature


def _build_message(role: str, content: str) -> ChatMessage:
    return {"role": role, "content": content}
