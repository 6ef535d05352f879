"""Chat with a model of a run.

    python -m rlhf.chat RUN_DIR [--model NAME|FOLDER]

Each line is a message. Answers go to stdout and everything else to stderr, so that
`echo hello | python -m rlhf.chat RUN_DIR` prints only the answer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from rlhf.base.command import build_command_parser, run_to_exit_code
from rlhf.base.errors import ConfigError
from rlhf.base.safe_text import sanitize_for_terminal, strip_control_characters
from rlhf.config.run_dir import find_run_dir
from rlhf.run.policies import folders_by_policy_name

if TYPE_CHECKING:
    from rlhf.chat.run_policy import RunPolicy
    from rlhf.rollout.sampling import SamplingSettings


def run_chat_loop(read_line: Callable[[], str], handle_line: Callable[[str], bool]) -> None:
    """Read and handle lines until ``handle_line`` returns False.

    The end of the input, or Ctrl-C at the prompt, ends the loop too.
    """
    while True:
        try:
            line = read_line()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if not handle_line(line):
                return
        except KeyboardInterrupt:  # Ctrl-C before the answer begins: read the next line
            continue


def greeting_lines(policy: RunPolicy, sampling: SamplingSettings) -> list[str]:
    """Return the first lines of a chat: model, temperature, /help, and a note on plain prompts."""
    greedy = "" if sampling.temperature else ", always the likeliest token"
    lines = [
        str(policy.folder),
        f"temperature {sampling.temperature:g}{greedy}; /temperature X changes it",
        "/help lists the commands.",
    ]
    if not policy.talker.expects_conversations:
        lines.append("Trained on plain prompts, not conversations: each line is a prompt.")
    return lines


def apply_sampling_options(run: SamplingSettings, options: argparse.Namespace) -> SamplingSettings:
    """Return the sampling settings of a run, changed by the options of the command."""
    from rlhf.chat.dialogue import parse_temperature

    text = str(run.temperature if options.temperature is None else options.temperature)
    temperature = parse_temperature(text, option="--temperature")
    max_tokens = run.max_tokens if options.max_tokens is None else options.max_tokens
    return replace(run, temperature=temperature, max_tokens=max_tokens)


def chat(options: argparse.Namespace, out: TextIO, notices: TextIO) -> None:
    """Load the chosen model and chat with it or, with --environment, let it play an episode."""
    import torch
    import transformers

    from rlhf.chat.dialogue import Dialogue
    from rlhf.chat.run_policy import RunPolicy

    def write(text: str) -> None:
        out.write(strip_control_characters(text))
        out.flush()

    def say(text: str) -> None:
        notices.write(sanitize_for_terminal(text) + "\n")

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise ConfigError(f"--seed {options.seed}: must be 0 or more, and below 2**63")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    else:
        torch.seed()
    run_dir = find_run_dir(options.run_dir)
    policy = RunPolicy(run_dir, options.model, trusts_run=options.trust_run)
    sampling = apply_sampling_options(policy.sampling_settings, options)
    if options.environment:
        from rlhf.config.consent import require_consent
        from rlhf.options.environments.chat import play_episode

        require_consent(run_dir, is_given=options.trust_run)
        play_episode(run_dir, policy.talker, sampling, seed=options.seed or 0, write=write)
        return
    dialogue = Dialogue(policy.talker, sampling, write=write, say=say)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - line editing and history for input()

        for line in greeting_lines(policy, sampling):
            say(line)
    run_chat_loop(lambda: input("> " if is_terminal else ""), dialogue.handle_line)
    if is_terminal:
        say("")


def main(arguments: Sequence[str]) -> int:
    """Chat with the model that the command names; return the exit code."""
    parser = build_command_parser("rlhf.chat", __doc__, uses_run=True)
    parser.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="default: runs/latest")
    parser.add_argument(
        "--model", help=f"{', '.join(folders_by_policy_name())} or FOLDER; default: the newest"
    )
    parser.add_argument("--temperature", metavar="X", help="default: the run's temperature")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="default: the run's limit")
    parser.add_argument("--seed", type=int, help="random seed; the same seed repeats the answers")
    parser.add_argument("--environment", action="store_true", help="let the model play an episode")
    options = parser.parse_args(arguments)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    answers, notices = sys.stdout, sys.stderr  # run_to_exit_code replaces these streams
    try:
        return run_to_exit_code(lambda: chat(options, answers, notices))
    except BrokenPipeError:  # a program that read the answers, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
