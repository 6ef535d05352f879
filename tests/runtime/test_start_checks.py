"""What only a later phase would refuse is refused before the first phase, by plan and run alike."""

import json
from pathlib import Path

import pytest

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
OWN = "model=pretrained model.path={model}"
JUDGED = f"{OWN} phase=pipeline_rule model@reward_model=gold"
PAIRS = "data=local data.path={pairs}"
ADAPTED = f"{OWN} lora=default lora.target_modules=[nothing]"
STUDY = "study: {{trials: 4, maximize: [{}], prune: {{metric: {}}}}}\nseed: [1, 2]"

# The phase that would refuse; fields of the model's config; overrides; the message.
CASES: dict[str, tuple[dict[str, object], str, str]] = {
    "sft: positions": ({}, f"{OWN} sft.max_tokens=513", "sft.max_tokens=513: the model has 512"),
    "reward: no such class": (
        {"model_type": "granite"},
        OWN,
        "model: transformers has no reward model for model_type=granite: use "
        "model@reward_model=... (another family, with the same tokenizer), or phase=pipeline_rule",
    ),
    "reward: members": (
        {},
        f"{OWN} reward.members=2 reward.member_layers=2",
        "reward.member_layers=2: the reward model has 2 layers",
    ),
    "dpo: positions": ({}, f"{OWN} phase=pipeline_dpo dpo.max_tokens=513", "dpo.max_tokens=513: t"),
    "dpo: a window": (
        {"model_type": "mistral", "sliding_window": 16},
        f"{OWN} phase=pipeline_dpo",
        "model_type=mistral attends to 16 tokens at most, fewer than the 288",
    ),
    "ppo: a window": (
        {"model_type": "gemma3_text", "sliding_window": 64, "head_dim": 8},
        OWN,
        "model_type=gemma3_text attends to 64 tokens at most, fewer than the 288",
    ),
    "ppo: positions": ({}, f"{OWN} rollout.max_prompt_tokens=500", "=532: the model has 512 posit"),
    "ppo: a critic": ({"model_type": "cohere"}, JUDGED, "ppo.advantage_estimator=reinforce_pp"),
    "ppo: adapted layers": ({}, ADAPTED, "lora.target_modules=['nothing']: no linear layer"),
    "ppo: trunk": (
        {},
        f"{OWN} ppo.shared_trunk=true ppo.num_layers_unfrozen=2",
        "ppo.num_layers_unfrozen=2: the model has 2 layers",
    ),
    "ppo: family of a trunk": (
        {"model_type": "phi"},
        f"{OWN} ppo.shared_trunk=true ppo.num_layers_unfrozen=1",
        "ppo.shared_trunk is not supported for model_type=phi",
    ),
    "ppo: no trained reward model": (
        {},
        f"{OWN} phase=ppo model@reward_model=pretrained reward_model.path={{model}}",
        "is not a trained reward model",
    ),
    "evaluation: a name": (
        {},
        "checkpoint.best=ppo/eval_scoer ppo.eval_every=1",
        "checkpoint.best=ppo/eval_scoer: this run does not measure it",
    ),
    "evaluation: no judge": (
        {},
        f"{PAIRS} checkpoint.best=ppo/eval_gold ppo.eval_every=1",
        "checkpoint.best=ppo/eval_gold: this run does not measure it",
    ),
    "evaluation: no environment": (
        {},
        "checkpoint.best=ppo/eval_episode/return ppo.eval_every=1",
        "checkpoint.best=ppo/eval_episode/return: this run does not",
    ),
    "checkpoint: a step": (
        {},
        f"{PAIRS} checkpoint.stop_after=ppo/400 sft.batch_size=4 reward.batch_size=4 ppo.steps=3 "
        "ppo.rollout_batch_size=4 ppo.mini_batch_size=4",
        "checkpoint.stop_after=ppo/400: the ppo phase has 3 steps",
    ),
}


def job_of(words: list[str], compose: Compose) -> Job:
    return Job(compose(words), words)


DOORS = [(case, "plan=only") for case in CASES]
DOORS += [(case, "plan=check") for case in ("ppo: trunk", "checkpoint: a step")]


@pytest.mark.parametrize(("case", "door"), DOORS)
def test_both_doors_refuse_before_the_first_phase(
    case: str, door: str, compose: Compose, tmp_path: Path
) -> None:
    fields, words, told = CASES[case]
    model, pairs = tmp_path / "model", tmp_path / "pairs.jsonl"
    model.mkdir()
    config = SHAPE | {"model_type": "llama"} | fields
    (model / "config.json").write_text(json.dumps(config))
    rows = [{"prompt": f"Say {n}", "chosen": "yes", "rejected": "no"} for n in range(60)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    own = [*words.format(model=model, pairs=pairs).split(), door, "data.template=plain"]
    job = job_of([*own, f"run_dir={tmp_path / 'run'}"], compose)
    job = job._replace(is_plan=door == "plan=only")
    with pytest.raises(RlhfError) as refused:
        plan_config(CompletedConfig(to_run_config(job.cfg)), job)
    assert told in str(refused.value)
    assert not (tmp_path / "run").exists(), "before a run directory is made"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mistral", "sliding_window": 288}, OWN),
        ({"model_type": "mistral", "sliding_window": 16}, f"{OWN} rollout=hf"),
        ({"model_type": "granite"}, f"{JUDGED} ppo.advantage_estimator=reinforce_pp"),
        ({"model_type": "granite"}, f"{OWN} phase=sft"),
        ({}, f"{OWN} lora=default lora.target_modules=[q_proj]"),
        (
            {},
            f"{OWN} ppo.shared_trunk=true ppo.num_layers_unfrozen=1 "
            "reward.members=2 reward.member_layers=1",
        ),
        ({}, "checkpoint.best=ppo/eval_exact ppo.eval_every=1"),
        ({}, "model=pretrained model.path=nobody/has-this"),
    ],
)
def test_what_works_is_started(
    fields: dict[str, object], words: str, compose: Compose, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama"} | fields))
    check_before_start(to_run_config(compose(words.format(model=tmp_path).split())))


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
    assert search is not None
    with pytest.raises(RlhfError, match=told.replace(".", r"\.")):
        run_search(search, CONF, "launch.py")
    assert not search.folder.exists()


def test_a_study_may_be_pruned_by_a_part_of_the_score(compose: Compose) -> None:
    parts = ["+rewards.model={kind: model}", "+rewards.ends={kind: stop}"]
    found = logged_metric_names(to_run_config(compose(parts)))
    assert {"ppo/parts/model", "ppo/parts/ends", "ppo/eval_parts/ends"} <= {*found}
    assert not [name for name in found if "NAME" in name]


@pytest.mark.parametrize(
    ("key", "size"),
    [("sft.batch_size", 10**9 + 7), ("ppo.rollout_batch_size", 2**62), ("ppo.mini_batch_size", 0)],
)
def test_absurd_batch_sizes_are_refused_by_their_bound(
    key: str, size: int, compose: Compose
) -> None:
    with pytest.raises(RlhfError, match=f"{key}={size}: must be from 1 to 1000000"):
        to_run_config(compose([f"{key}={size}"]))
