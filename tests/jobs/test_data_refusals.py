"""A plan and a run refuse the same data with the same words, before the first phase."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from rlhf.base.errors import RlhfError
from rlhf.config.choices import PlanMode
from rlhf.config.schema.run import RunConfig
from rlhf.jobs.read_loads import read_loads
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.preflight import require_data
from rlhf.runtime.run_data import load_phase_data
from rlhf.runtime.worker import create_or_load_tokenizer
from tests.bad_inputs import FILES, lines
from tests.plan.planned import Compose, run_of

PROMPT = "\n\nHuman: {}\n\nAssistant:"
PROMPTS = [{"prompt": PROMPT.format(number)} for number in range(60)]
ANSWERS = [row | {"completion": " yes"} for row in PROMPTS]
PAIRS = [row | {"chosen": " yes", "rejected": " no"} for row in PROMPTS]
LONG = [row | {"prompt": PROMPT.format("word " * 300 + row["prompt"])} for row in PAIRS]
SMALL = ["data.template=plain", "sft.batch_size=4", "reward.batch_size=4", "dpo.batch_size=4"]
SMALL += ["ppo.rollout_batch_size=4", "ppo.mini_batch_size=4", "ppo.steps=2"]
CORPUS = "data.path=samples:english data.ptx_path={file} ppo.ptx_coef=1"
KINDS = {"prompts": PROMPTS, "answers": ANSWERS, "pairs": PAIRS, "long": LONG}

# The file, its content, overrides, and a text of the refusal.
BAD: list[tuple[str, bytes, str, str]] = [
    ("a.csv", b"prompt;chosen\na;b;c\n", "", "row 1: 3 fields .* separated by ';'"),
    ("a.jsonl", b"", "data.path={file}x", "no such file or .* needs data=hub; .* data.size=EXAM"),
    ("a.jsonl", b"", "data.path=samples:x", "no such sample; choose"),
    ("a.csv", b"text\n", CORPUS, "holds no text"),
    ("a.jsonl", lines(*PAIRS[:1]) * 60, "", "has 1 examples. Divided by"),
    ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', "", "has the key 'prompt' twice"),
]
for line in Path(__file__).with_name("bad_data.txt").read_text().splitlines()[1:]:
    command, _, told = line.partition(" # ")
    kind, _, words = command.partition(":")
    BAD.append(("a.jsonl", lines(*KINDS[kind]), words, told))
# The files of tests/bad_inputs.py; a few of them can be used, by both doors.
USABLE = ["one prompt is null", "one answer is empty", "chosen equals rejected"]
USABLE += ["one row has other columns"]
CASES = [pytest.param(*case, id=case[-1]) for case in BAD]
CASES += [pytest.param(*f, "", "", id=name) for name, f in FILES.items() if name not in USABLE]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(RlhfError) as refused:
        act()
    return str(refused.value)


def start(config: RunConfig, run_dir: Path) -> None:
    """What a rank does before it builds the first model."""
    run_dir.mkdir()
    parts = load_phase_data(config, lambda _: None)
    tokenizer = create_or_load_tokenizer(config, run_dir, parts)
    console = SimpleNamespace(say=lambda _: None)
    context = SimpleNamespace(config=config, parts=parts, tokenizer=tokenizer, console=console)
    require_data(cast(RunContext, context), config.phase.order)


@pytest.mark.parametrize(("name", "content", "words", "told"), CASES)
def test_a_plan_refuses_what_a_run_refuses(
    name: str, content: bytes, words: str, told: str, compose: Compose, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    own = [word.format(file=file) for word in words.split()]
    config = run_of(compose, "data=local", f"data.path={file}", *SMALL, *own)
    plan = replace(config, plan=PlanMode.only)
    by_plan = refusal(lambda: read_loads(plan))
    assert by_plan == refusal(lambda: start(config, tmp_path / "run"))
    assert re.search(told, by_plan)
