"""What only a later phase would refuse is refused before the first phase, by plan and run alike."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rlhf.base.errors import RlhfError
from rlhf.config.freeze import to_run_config
from rlhf.jobs.completion import CompletedConfig, plan_config
from rlhf.jobs.launch_command import Job
from rlhf.jobs.search import run_search
from rlhf.jobs.search_command import parse_search
from rlhf.runtime.start_checks import check_before_start, logged_metric_names
from tests.conftest import CONF, Compose

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 272}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
JUDGED = "{own} phase=pipeline_rule model@reward_model=gold"
STUDY = "study: {{trials: 4, maximize: [{}], prune: {{metric: {}}}}}\nseed: [1, 2]"

BAD_STARTS = Path(__file__).with_name("bad_starts.txt").read_text().splitlines()[2:]
DOORS = [(line, "plan=only") for line in BAD_STARTS]
DOORS += [(line, "plan=check") for line in BAD_STARTS if re.search("unfrozen=2|stop_after", line)]


def words_of(command: str, folder: Path) -> list[str]:
    """Write the model and the pairs of a command to ``folder``; return its other words."""
    model, pairs = folder / "model", folder / "pairs.jsonl"
    model.mkdir()
    words = command.format(own=f"model=pretrained model.path={model}", model=model, pairs=pairs)
    fields = [word.removeprefix("config.") for word in words.split() if word.startswith("config.")]
    own = {
        name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in fields)
    }
    (model / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama"} | own))
    rows = [{"prompt": f"Say {n}", "chosen": "yes", "rejected": "no"} for n in range(60)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    return [word for word in words.split() if not word.startswith("config.")]


@pytest.mark.parametrize(("line", "door"), DOORS)
def test_both_doors_refuse_before_the_first_phase(
    line: str, door: str, compose: Compose, tmp_path: Path
) -> None:
    command, _, told = line.partition(" # ")
    words = [*words_of(command, tmp_path), door, "data.template=plain"]
    words.append(f"run_dir={tmp_path / 'run'}")
    job = Job(compose(words), words, is_plan=door == "plan=only")
    with pytest.raises(RlhfError) as refused:
        plan_config(CompletedConfig(to_run_config(job.cfg)), job)
    assert told in str(refused.value)
    assert not (tmp_path / "run").exists(), "before a run directory is made"


@pytest.mark.parametrize(
    "command",
    [
        "config.model_type=mistral config.sliding_window=288 {own}",
        "config.model_type=mistral config.sliding_window=16 {own} rollout=hf",
        f"config.model_type=granite {JUDGED} ppo.advantage_estimator=reinforce_pp",
        "config.model_type=granite {own} phase=sft",
        "{own} lora=default lora.target_modules=[q_proj]",
        "{own} ppo.shared_trunk=true ppo.num_layers_unfrozen=1 reward.members=2 "
        "reward.member_layers=1",
        "checkpoint.best=ppo/eval_exact ppo.eval_every=1",
        "model=pretrained model.path=nobody/has-this",
    ],
)
def test_what_works_is_started(command: str, compose: Compose, tmp_path: Path) -> None:
    check_before_start(to_run_config(compose(words_of(command, tmp_path))))


def test_an_adapter_has_the_config_of_its_base(compose: Compose, tmp_path: Path) -> None:
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    config = SHAPE | {"model_type": "mistral", "sliding_window": 16}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    adapter = {"base_model_name_or_path": str(tmp_path / "base"), "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    words = ["model=pretrained", f"model.path={tmp_path / 'adapter'}"]
    with pytest.raises(RlhfError, match="attends to 16 tokens at most"):
        check_before_start(to_run_config(compose(words)))


@pytest.mark.parametrize(
    ("maximize", "prune", "told"),
    [
        ("sft.perplexty_after", "sft/loss", "study=sft.perplexty_after: this run does not"),
        ("ppo.score_after", "sft/loss", "study=ppo.score_after: this run does not"),
        ("sft.perplexity_after", "sft/evl_loss", "study.prune.metric=sft/evl_loss: this run"),
        ("sft.perplexity_after", "reward/loss", "study.prune.metric=reward/loss: this run"),
    ],
)
def test_a_study_of_unknown_names_starts_no_trial(
    maximize: str, prune: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(STUDY.format(maximize, prune) + "\nphase: sft")
    search = parse_search(["-m", "sweep=mine"], tmp_path)
    with pytest.raises(RlhfError, match=told.replace(".", r"\.")):
        run_search(search, CONF, "launch.py")
    assert not search.folder.exists()


def test_a_study_may_be_pruned_by_a_part_of_the_score(compose: Compose) -> None:
    parts = ["+rewards.model={kind: model}", "+rewards.ends={kind: stop}"]
    found = logged_metric_names(to_run_config(compose(parts)))
    assert {"ppo/parts/model", "ppo/parts/ends", "ppo/eval_parts/ends"} <= {*found}
    assert not [name for name in found if "NAME" in name]
