"""Functions that misbehave while they score: each part must fail in words, or do no harm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.base.types import PromptBatch, Responses
from rlhf.config.choices import RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.ppo.reward_mix import RewardMix
from tests.fuzz.case import Case

SECONDS = 0.4  # of a part that never answers
ROWS = 3
# What a function returns, or does before it returns: True if it must be refused.
RESULTS = {
    "None": True,
    "{number}": True,
    "'{number}'": True,
    "b'abc'": True,
    "{{r: 1.0 for r in responses}}": True,
    "{{1.0, 2.0, 3.0}}": True,
    "['{number}'] * 3": True,
    "[None, 1.0, 2.0]": True,
    "[[{number}]] * 3": True,
    "[1j, 2.0, 3.0]": True,
    "[{number}] * {count}": True,
    "[1.0, float('{bad}'), {number}]": True,
    "[1.0, {huge}, {number}]": True,
    "itertools.repeat({number})": True,
    "iter([])": True,
    "range(3)": False,
    "(x for x in [{number}] * 3)": False,
    "[{number}] * 3": False,
    "[True, False, True]": False,
    "fractions_and_decimals()": False,
}
DEEDS = {
    "raise {error}('{text}')": True,
    "sys.exit({code})": True,
    "os._exit({code})": True,
    "time.sleep(60)": True,
    "while True: pass": True,
    "os.kill(os.getpid(), signal.{signal})": True,
    "os.kill(os.getppid(), signal.{signal})": False,  # it may answer before it ends
    "os.closerange(3, 99)": True,
    "f = lambda: f(); f()": True,
    "sys.setrecursionlimit(50); json.dumps(responses)": False,
    "print('{text}' * {flood}); sys.stdout.flush()": False,
    "os.write(1, b'\\x1b]0;x\\x07' * {flood})": False,
    "sys.stdout.close()": False,
    "threading.Thread(target=time.sleep, args=[60]).start()": False,
    "os.fork()": False,
    "os.fork() or (os.setsid(), os.fork(), time.sleep(60))": False,
    "subprocess.Popen(['sleep', '60'], start_new_session=True)": False,
    "os.chdir('/')": False,
    "os.rmdir(tempfile.mkdtemp())": False,
    "shutil.rmtree(os.getcwd())": False,
    "responses.clear(); prompts.clear()": False,
    "builtins.float = None": True,
    "json.dumps = None": True,
    "os.environ.clear()": False,
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": False,
    "os.setsid() if os.getpid() != os.getsid(0) else 0": False,
}
IMPORTS = (
    "import builtins, decimal, fractions, itertools, json, os, shutil, signal, subprocess, sys\n"
    "import tempfile, threading, time\n"
    "def fractions_and_decimals():\n"
    "    return [fractions.Fraction(1, 3), decimal.Decimal('1.5'), 2]\n"
)
MODULES = (
    "{deed}\ndef f(prompts, responses): return [{number}] * 3\n",
    "def f(prompts, responses): return [{number}] * 3\n{deed}\n",
    "def f(prompts): return [{number}] * 3\n",
    "def f(prompts, responses, *, {name}): return [{number}] * 3\n",
    "f = {number}\n",
    "def g(prompts, responses): return [{number}] * 3\n",
    "def f(prompts, responses)\n",
    "import {name}\n",
    "\\0\n",
)
BROKEN = frozenset(MODULES[2:])


def cases(draw: Random, folder: Path) -> Iterator[Case]:
    """Yield modules whose function does something wrong when it is imported or called."""
    while True:
        words = {
            "number": f"{draw.uniform(-9, 9):.4g}",
            "count": draw.choice([0, 1, 2, 4, 5, 1000]),
            "bad": draw.choice(["nan", "inf", "-inf"]),
            "huge": draw.choice(["1e16", "-1e308", "10 ** 400", "3.5e38"]),
            "error": draw.choice(["ValueError", "KeyError", "MemoryError", "Exception", "OSError"]),
            "text": draw.choice(["\\x1b[31m", "\\n\\n", "\\ud800", "x" * 5000, "", "{}", "é"]),
            "code": draw.randrange(256),
            "signal": draw.choice(["SIGKILL", "SIGSEGV", "SIGTERM"]),
            "flood": draw.randrange(1, 200_000),
            "name": "".join(draw.choices("abcdefgh", k=8)),
        }
        deed, result = draw.choice(list(DEEDS)), draw.choice(list(RESULTS))
        must_refuse = DEEDS[deed] or RESULTS[result]
        module = "def f(prompts, responses):\n    {deed}\n    return " + result + "\n"
        if draw.random() < 0.3:
            module = draw.choice(MODULES)
            must_refuse = module in BROKEN
        source = IMPORTS + module.replace("{deed}", deed).format_map(words)
        number = draw.randrange(10**9)
        (folder / f"fuzzed_{number}.py").write_text(source, errors="surrogatepass")
        name = source.removeprefix(IMPORTS)[:200]
        yield Case(name, lambda n=number: scored(folder, n), must_refuse)  # type: ignore[misc]


def scored(folder: Path, number: int) -> None:
    """Score two batches as a run does, and check the numbers that it would learn from."""
    os.chdir(folder)
    part = RewardTerm(
        kind=RewardKind.function,
        function=f"fuzzed_{number}:f",
        run_code=True,
        timeout_seconds=SECONDS,
    )
    score_batches({"mine": part})


def score_batches(parts: dict[str, RewardTerm], batches: int = 2) -> None:
    """Score ``batches`` of responses with the mix that a run uses."""
    mix = RewardMix(parts, _tokenizer(), GoldJudge(), lambda _: None)
    try:
        for _ in range(batches):
            ids_BT = torch.full((ROWS, 1), 5)
            keep_BT = torch.ones(ROWS, 1, dtype=torch.bool)
            prompts = PromptBatch(ids_BT, keep_BT, torch.zeros(ROWS, 1), ["a", "b", "c"], step=1)
            responses = Responses(ids_BT, keep_BT, keep_BT[:, 0])
            total_B, found = mix(prompts, responses, torch.zeros(ROWS))
            assert total_B.isfinite().all()
            assert found.scores_BK.shape == (ROWS, len(parts))
    finally:
        mix.close()


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["one two three"], vocab_size=260)
