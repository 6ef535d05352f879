"""Exported folders, their model cards, and what is sent to the hub."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from rlhf.base.stored_files import INPUTS
from rlhf.config.choices import Device, Dtype, TrainingEngine
from rlhf.config.freeze import to_run_config, write_command, write_frozen_config
from rlhf.config.hydra_errors import to_hydra_override
from rlhf.export import config_for_one_rank, export_final_model, main
from rlhf.models.build import ModelSource, build_actor
from rlhf.options.lora.models import save_adapter
from rlhf.phases.ppo.rlhf_engine import RLHFEngine
from rlhf.run.model_card import origin_sections
from rlhf.run.model_folder import save_model
from rlhf.run.phase_state import checkpoint_folder, write_checkpoint
from rlhf.run.results import phase_result_path, write_json
from tests.conftest import Compose
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import (
    disturb,
    save_base,
    save_models,
    small_tokenizer,
    some_ids,
    whole_state,
)
from tests.rounding import assert_near, terms_of

SPEC = lora_config()
TOKEN = "hf_" + "a" * 30
CALL = 'A policy.\n\n```python\nmodel = pipeline("text-generation", "ppo/actor")\n```'


class Hub:
    """What an HfApi is asked; ``private`` is what it says of a repository."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, private: bool = True) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.private = private
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)

    def create_repo(self, repo_id: str, *, repo_type: str, private: bool, exist_ok: bool) -> str:
        self.asked.append(("create", private))
        self.kinds = {repo_type}
        return f"https://hub.example/{repo_id}"

    def repo_info(self, repo_id: str, *, repo_type: str) -> SimpleNamespace:
        self.kinds.add(repo_type)
        return SimpleNamespace(private=self.private)

    def upload_folder(self, *, repo_id: str, repo_type: str, folder_path: Path) -> None:
        self.kinds.add(repo_type)
        names = {path.name for path in folder_path.iterdir()}
        self.asked.append(("upload", names))
        self.card = (folder_path / "README.md").read_text()


class Run(NamedTuple):
    """A run whose PPO has saved an adapter, and the model with its adapters."""

    folder: Path
    live: Any


@pytest.fixture
def run(tmp_path: Path, compose: Compose) -> Run:
    words = ["experiment=smoke", "ppo.kl_ctl=0.3", "name=a|b"]
    folder, base = tmp_path / "run", tmp_path / "base"
    folder.mkdir()
    write_frozen_config(to_run_config(compose(words)), folder)
    write_command([*words, "run_dir=x", f"model.path={TOKEN}"], folder)
    write_json(phase_result_path(folder, "ppo"), {"score_after": 1.25, "seconds": 3.0})
    write_json(phase_result_path(folder, "sft"), {"reused_from": "/home/ann/runs/pets/first"})
    inputs = {"data.path": {"/home/ann/pairs.jsonl": [12, "ab" * 32]}}
    write_json(folder / INPUTS, inputs | {"rewards.a.function": {"/home/ann/code.py": [1, "cd"]}})
    tokenizer = small_tokenizer()
    save_base(base, "llama", tokenizer)
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    description = CALL + origin_sections(folder, rows={"ppo": (90, 10)})
    places = (tmp_path / "first" / "actor", folder / "ppo" / "actor")  # an adapter on an adapter
    for seed, place in enumerate(places):
        source = ModelSource(key="m", path=str(base))
        live = build_actor(source, tokenizer, seed=4, extensions=adding(SPEC, seed=4)).eval()
        disturb(live, seed=seed)
        state = whole_state(live).items()
        write = partial(save_adapter, model=live, stream=state, base=str(base))
        save_model(place, write, tokenizer, description=description, task="text-generation")
        base = place
    return Run(folder, live)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_export_has_the_weights_of_pefts_own_merge(run: Run, tmp_path: Path) -> None:
    export_final_model(run.folder, tmp_path / "mine")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "mine").state_dict()
    actor = AutoPeftModelForCausalLM.from_pretrained(run.folder / "ppo" / "actor")
    theirs = actor.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["stop", "bias, bias: length"])
def test_a_card_says_that_the_reward_was_corrupted(
    kind: str, tmp_path: Path, compose: Compose
) -> None:
    words = f"rewards={{learned: {{kind: model}}, other: {{kind: {kind}}}}}"
    write_frozen_config(to_run_config(compose([to_hydra_override(words)])), tmp_path)
    is_told = "Corrupt the score on purpose" in origin_sections(tmp_path, rows={})
    assert is_told == kind.startswith("bias")


def test_a_card_names_no_folder_of_its_owner(tmp_path: Path, compose: Compose) -> None:
    words = ["data=local", f"data.path=[{tmp_path}/my/rows.jsonl,org/name]", "data.template=plain"]
    write_frozen_config(to_run_config(compose(words)), tmp_path)
    card = origin_sections(tmp_path, rows={})
    assert "| from | my/rows.jsonl, org/name |" in card
    assert str(tmp_path) not in card


def test_a_final_policy_is_merged_and_its_card_has_everything(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "models" / "mine"
    assert main([str(run.folder), "--out", str(out)]) == 0
    assert not (out / "adapter_config.json").exists()
    model, ids = AutoModelForCausalLM.from_pretrained(out), some_ids()
    with torch.no_grad():
        theirs, ours = (each(ids).logits for each in (model, run.live))
    assert_near(theirs, ours, terms=terms_of(model, ids.shape[1]))
    assert model.generation_config.eos_token_id == [1, 5]
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# models/mine\n" in card
    assert f'pipeline("text-generation", "{out}")' in card, "it runs in any directory"
    assert "python launch.py experiment=smoke ppo.kl_ctl=0.3 " in card
    assert TOKEN not in card
    for row in (
        "ppo.kl_ctl | 0.3",
        r"name | a\|b",
        "source | synthetic",
        "ppo: score after | 1.25",
        f"run | {tmp_path.name}/run",
        "sft of | pets/first",
        f"file pairs.jsonl | 12 bytes, SHA-256 {'ab' * 32}",
    ):
        assert f"| {row} |" in card
    assert "| ppo: examples | 90 to train on, 10 held out |" in card
    assert not re.search(r"\| (run_dir|ppo: seconds) \|", card)
    assert "not safe to deploy" in card
    assert "code.py" not in card, "the run's code is no data"
    assert "/home/ann" not in card
    assert "a generated task" in card


def test_the_hub_gets_a_private_repository(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch)
    assert main([str(run.folder), "--push", "me/mine"]) == 0
    assert "uploaded to https://hub.example/me/mine" in capsys.readouterr().out
    assert hub.asked[0] == ("create", True)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= hub.asked[1][1]
    assert '"me/mine")' in hub.card
    assert hub.kinds == {"model"}
    assert not (run.folder / "exported").exists()
    assert main([str(run.folder), "--push", "me/mine", "--public"]) == 0
    assert hub.asked[2] == ("create", False)


def test_a_public_repository_is_not_filled_by_accident(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch, private=False)
    assert main([str(run.folder), "--push", "me/mine"]) == 2
    assert "--push me/mine: the repository is public: add --public" in capsys.readouterr().err
    assert hub.asked == [("create", True)]


def keeps_checkpoint(folder: Path, *words: str, compose: Compose) -> Path:
    """A run of PPO with these words in its configuration, which keeps the checkpoint of step 1."""
    text = "Human Assistant one two three"
    save_models(folder, policy=text, reward=text)
    run_dir = folder / "run"
    small_tokenizer().save_pretrained(run_dir / "tokenizer")
    paths = ["model=pretrained", "model@reward_model=pretrained", "phase=ppo"]
    paths += ["data.template=plain"]
    paths += [f"model.path={folder / 'policy'}", f"reward_model.path={folder / 'reward'}"]
    write_frozen_config(to_run_config(compose([*paths, *words])), run_dir)
    engine = RLHFEngine(replace(to_run_config(compose([*paths, "ppo.steps=1"])), run_dir=None))
    streams = {name: each.training_state.stream() for name, each in engine.trained_engines.items()}
    write_checkpoint(run_dir / "ppo", 1, streams, {"logs": {}}, wanted_bytes=0)
    engine.close()
    return run_dir


@pytest.mark.parametrize(
    "words",
    [
        ["rollout=vllm_server", "rollout.server.url=http://127.0.0.1:9"],
        ["+rewards.s={kind: function, function: 'gone:score', run_code: true}"],
    ],
)
def test_a_checkpoint_needs_neither_the_server_nor_the_gpu_nor_the_rewards_of_its_run(
    words: list[str], compose: Compose, tmp_path: Path
) -> None:
    run_dir = keeps_checkpoint(tmp_path, *words, compose=compose)
    out = tmp_path / "out"
    assert main([str(run_dir), "--checkpoint", "1", "--out", str(out)]) == 0
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(place).state_dict()
        for place in (out, tmp_path / "policy")
    )
    for name, weights in ours.items():
        torch.testing.assert_close(theirs[name], weights, atol=1e-2, rtol=1e-2, check_dtype=False)


def test_one_rank_shards_and_offloads_nothing(compose: Compose) -> None:
    words = ["hardware=8xa100_80g", "zero=stage3_nvme", "zero.engine=deepspeed"]
    config = to_run_config(compose([*words, "zero.critic_stage=3", "sft.micro_batch_size=2"]))
    alone = config_for_one_rank(config, Device.cuda, Dtype.bf16)
    assert (alone.zero.stage, alone.zero.critic_stage, alone.zero.nvme_path) == (1, 1, None)
    assert (alone.zero.engine, alone.hardware.ranks_per_node) == (TrainingEngine.auto, 1)
    assert not alone.zero.offload_optimizer
    assert alone.sft.micro_batch_size == 2
    assert config_for_one_rank(config, Device.cpu, Dtype.fp32).sft.micro_batch_size is None


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--push", "mine"], "--push mine: must be OWNER/NAME, without --out"),
        (["--push", "me/mine", "--out", "x"], "must be OWNER/NAME, without --out"),
        (["--push", "me/mine"], "the Hugging Face hub refused, or cannot be reached (offline)"),
        (["--phase", "sft"], "sft/model is missing: the run has not finished this phase"),
        (["--average"], "ppo/actor_ema is missing"),
        (["--checkpoint", "4"], "--checkpoint 4 is in 0 phases; it must be in one. The run keeps "),
        (["--checkpoint", "3"], "--phase ppo --checkpoint 3, --phase sft --checkpoint 3"),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    words: list[str],
    complaint: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(create_repo=offline))
    for phase in ("sft", "ppo"):
        checkpoint_folder(run.folder / phase, 3).mkdir(parents=True)
    before = sorted(run.folder.rglob("*"))
    assert main([str(run.folder), *words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert complaint in line
    assert sorted(run.folder.rglob("*")) == before
