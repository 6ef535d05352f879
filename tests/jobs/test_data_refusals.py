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
ENOUGH = "sft.max_tokens=900 dpo.max_tokens=900"
MINE = "data.path=null +data.sets={{mine:{{path:{file},columns:{{prompt:question}}}}}}"


# What is wrong; the file and its content; overrides; words of the refusal.
BAD: list[tuple[str, str, bytes, str, str]] = [
    ("semicolons", "a.csv", b"prompt;chosen\na;b;c\n", "", "row 1: 3 fields .* separated by ';'"),
    ("no file", "a.jsonl", b"", "data.path={file}x", "no such file or folder.* data.size=EXAM"),
    ("prompts", "a.jsonl", lines(*PROMPTS), "", "the sft phase finds no responses"),
    (
        "prompts for pairs",
        "a.jsonl",
        lines(*PROMPTS),
        "phase=reward",
        "reward phase finds no pairs",
    ),
    ("no pairs", "a.jsonl", lines(*ANSWERS), "", "the reward phase finds no pairs of responses"),
    (
        *("few prompts", "a.jsonl", lines(*PAIRS)),
        *(
            "ppo.rollout_batch_size=128 ppo.mini_batch_size=64",
            "Use ppo.rollout_batch_size=22 ppo.",
        ),
    ),
    # What phases need.
    ("few for sft", "a.jsonl", lines(*PAIRS), "sft.batch_size=32", "Use sft.batch_size=11, or"),
    ("few pairs", "a.jsonl", lines(*PAIRS), "reward.batch_size=32", "Use reward.batch_size=22, or"),
    (
        *("few for dpo", "a.jsonl", lines(*PAIRS)),
        *("phase=pipeline_dpo dpo.batch_size=64", "the dpo phase has 22 examples"),
    ),
    (
        *("no prompt for dpo", "a.jsonl", lines(*LONG)),
        *(f"phase=pipeline_dpo {ENOUGH}", "no held-out prompt to answer that fits"),
    ),
    (
        "long prompts",
        "a.jsonl",
        lines(*LONG),
        ENOUGH + " reward.max_tokens=900",
        "ppo phase has 0",
    ),
    ("long", "a.jsonl", lines(*PAIRS), "sft.max_tokens=2", r"\(12 longer than sft.max_tokens=2\)"),
    (
        *("resting", "a.jsonl", lines(*PAIRS)),
        *("ppo.epochs=0.1 ppo.steps=80 ppo.actor_freeze_steps=3", "ppo.actor_freeze_steps=3: .*=1"),
    ),
    (
        *("no column for a reward", "a.jsonl", lines(*PAIRS)),
        *(
            "phase=pipeline_rule +rewards={{right:{{kind:number,columns:[answer]}}}}",
            "'answer' is missing, which rewards",
        ),
    ),
    (
        "an empty corpus",
        "a.csv",
        b"text\n",
        "data.path=samples:english data.ptx_path={file} ppo.ptx_coef=1",
        "holds no text",
    ),
    ("no template", "a.jsonl", lines(*PAIRS), "data.template=chat", "tokenizer has no chat_templ"),
    (
        *("few for two phases", "a.jsonl", lines(*PAIRS)),
        "sft.batch_size=32 ppo.rollout_batch_size=32 ppo.mini_batch_size=16",
        "Use sft.batch_size=11 ppo.rollout_batch_size=22 ppo.mini_batch_size=11, or give",
    ),
    # What files hold.
    ("no such expression", "a.jsonl", lines(*PAIRS), MINE, "reads 'question', which no row has"),
    ("one example", "a.jsonl", lines(*PAIRS[:1]) * 60, "", "has 1 examples. Divided by"),
    ("no eval file", "a.jsonl", lines(*PAIRS), "data.eval_path={file}x", "no such file or folder"),
    ("no sample", "a.jsonl", b"", "data.path=samples:x", "no such sample; choose"),
    ("a key twice", "a.jsonl", b'{"prompt": "a", "prompt": "b"}', "", "has the key 'prompt' twice"),
]
# The files of tests/bad_inputs.py; a few of them can be used, by both doors.
USABLE = ["one prompt is null", "one answer is empty", "chosen equals rejected"]
USABLE += ["one row has other columns"]
BAD += [(label, *file, "", "") for label, file in FILES.items() if label not in USABLE]


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


@pytest.mark.parametrize(
    ("name", "content", "words", "told"),
    [pytest.param(*case, id=label) for label, *case in BAD],
)
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
