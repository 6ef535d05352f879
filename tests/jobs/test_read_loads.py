"""The data that a plan counts is the data that the phases will read."""

import json
import sys
from pathlib import Path

import pytest

from rlhf.base.errors import ConfigError, DataError
from rlhf.config.choices import Phase
from rlhf.data.tokens import find_token_limit, tokenise
from rlhf.jobs import read_loads as reading
from rlhf.jobs.read_loads import CountedData, read_loads
from rlhf.models.tokenizers import load_or_train_tokenizer
from rlhf.plan.plan import plan_run
from rlhf.runtime.run_data import load_phase_data
from tests.plan.planned import Compose, changed, run_of

pytestmark = pytest.mark.slow

SMALL = ["ppo.rollout_batch_size=8", "ppo.mini_batch_size=8"]
WORDS = "one two three four five six seven eight nine ten".split()


def pairs(path: Path, count: int) -> str:
    """Write ``count`` different pairs of different lengths."""
    lines = []
    for number in range(count):
        few, many = WORDS[: 1 + number % 4], WORDS[: 2 + number % 9]
        row = {"prompt": f"Say {number}", "chosen": " ".join(many), "rejected": " ".join(few)}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return str(path)


def test_counts_are_those_of_the_phases(compose: Compose, tmp_path: Path) -> None:
    path = pairs(tmp_path / "pairs.jsonl", 300)
    config = run_of(compose, "data=local", f"data.path={path}", "ppo.epochs=1", "ppo.steps=null")
    config = changed(config, ppo={"rollout_batch_size": 8, "mini_batch_size": 8})
    loads = read_loads(config).loads
    assert loads is not None
    parts = load_phase_data(config, lambda _: None)
    texts = (
        text for part in parts.values() for record in part.train for text in record.texts if text
    )
    tokenizer = load_or_train_tokenizer(config.model, key="model", texts=texts)
    for phase in (Phase.sft, Phase.reward, Phase.ppo):
        used = tokenise(
            parts[phase],
            phase,
            tokenizer,
            limit=find_token_limit(phase, config),
            cache_dir=tmp_path,
        )
        sides = ("chosen_ids", "rejected_ids") if phase is Phase.reward else ("ids",)
        lengths = [len(ids) for side in sides for ids in used.train[side]]
        load = loads[phase]
        assert load.held_out == len(used.eval)
        assert load.mean_tokens == pytest.approx(sum(lengths) / len(lengths))
        assert load.lengths == tuple(sorted(lengths))
        batch = {Phase.sft: 32, Phase.reward: 32, Phase.ppo: 8}[phase]
        assert load.steps == -(-len(used.train) // batch)


def test_generated_data_is_counted_from_a_sample(compose: Compose) -> None:
    loads = read_loads(run_of(compose)).loads
    assert loads is not None
    assert loads[Phase.sft].steps == 688  # a sample's estimate of 129,500 * 7 / 37 * 0.9 / 32
    assert loads[Phase.ppo].steps == 56
    assert 20 < loads[Phase.reward].mean_tokens < loads[Phase.reward].longest_length < 120


def test_a_folders_own_tokenizer_counts(compose: Compose, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    path = pairs(tmp_path / "pairs.jsonl", 300)
    own = [f"data.path={path}", "data=local", "model=pretrained", *SMALL]
    loads = read_loads(run_of(compose, *own, f"model.path={tmp_path}")).loads
    assert loads is not None
    assert loads[Phase.ppo].mean_tokens == 2  # "Say 7"
    guessed = read_loads(run_of(compose, *own, "model.path=some/model")).loads
    assert guessed is not None
    assert guessed[Phase.ppo].mean_tokens == pytest.approx(7 / 4, abs=0.3)


def test_what_a_sample_leaves_open_is_counted_completely(
    compose: Compose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pairs(tmp_path / "pairs.jsonl", 1200)
    words = ["data=local", f"data.path={path}", "phase=sft", "data.split=[1,0,0]"]
    config = run_of(compose, *words, "sft.max_tokens=9")
    whole = CountedData(config, most=sys.maxsize).examples[Phase.sft]
    sample = CountedData(config, most=100).examples[Phase.sft]
    assert whole.left_out["longer than sft.max_tokens=9"] > 0
    assert sample.train != whole.train, "an estimate"
    with pytest.raises(DataError, match=f"sft phase has {whole.train} examples .* Use sft.batch_s"):
        read_loads(changed(config, sft={"batch_size": whole.train + 1}))
    printed = capsys.readouterr().out
    assert "1,098 examples, 102 skipped (" in printed
    assert "skipped: 584 longer than sft.max_tokens=9" in printed


def test_what_is_not_read_is_named(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs(tmp_path / "pairs.jsonl", 300)
    own = ["data=local", f"data.path={path}", "plan=only", *SMALL]
    loads, lines = read_loads(run_of(compose, *own))
    assert loads is not None
    number = "sft 55 (6 held out), reward 109 (11 held out), ppo 109 (11 held out)"
    assert lines[-1] == f"data: 273 examples: {number}"
    hub = read_loads(run_of(compose, "data=rm_static"))
    assert hub.loads is None
    assert hub.lines[0].startswith(
        "data: not read: Dahoas/rm-static is not on this machine; the ru"
    )
    elsewhere = ["data=local", f"data.path={tmp_path / 'none'}", "plan=only", "data.size=99"]
    assert "data.size=99 gives the number" in read_loads(run_of(compose, *elsewhere)).lines[0]
    monkeypatch.setattr(reading, "LARGEST_READ", 100)
    assert "pairs.jsonl has over 0 MiB" in read_loads(run_of(compose, *own)).lines[0]


COUNTDOWN = """
class Countdown:
    def reset(self, *, seed, row):
        self.left = 3
        return "count down from 3"

    def step(self, text):
        self.left -= 1
        return ("go on", 1.0, self.left == 0)

    def demonstration(self):
        return str(self.left)
"""


def test_a_plan_counts_episodes_of_an_environment_of_the_user(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["experiment=environment", "environment=custom", "environment.run_code=true"]
    own += ["environment.target=my_game:Countdown", "environment.processes=1", "plan=only"]
    config = run_of(compose, *own)
    with pytest.raises(ConfigError, match=r"target=my_game:Countdown: cannot be imported"):
        read_loads(config)
    (tmp_path / "my_game.py").write_text(COUNTDOWN)
    loads = read_loads(config).loads
    assert loads is not None
    assert config.data.size == loads[Phase.ppo].records
    answer, most = loads[Phase.ppo].answer, config.token_limit_after_prompt[1]
    assert answer is not None
    assert answer < most / 4
    read, unread = (plan_run(config, each).phases[-1].step_seconds for each in (loads, None))
    assert read["generate"] < unread["generate"] / 3


def test_a_response_is_planned_at_least_as_long_as_it_must_be(compose: Compose) -> None:
    """A run on an H200 that had to sample 256 tokens was planned for the 7 of SFT's answers."""
    loads = read_loads(run_of(compose, "experiment=smoke", "rollout.min_response_tokens=20")).loads
    assert loads is not None
    answer = loads[Phase.ppo].answer
    assert answer is not None
    assert answer >= 20
