"""The phase around PPO's trainer: its prompts, how long it runs, and what it tells and keeps."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.base.errors import ConfigError
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Phase
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.options.ptx.hooks import load_corpus_blocks
from rlhf.phases.ppo.loop import run_ppo
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import count_ppo_steps, phase_tokens
from rlhf.phases.shared.preflight import require_data
from tests.phases.ppo.ppo_pieces import source
from tests.phases.run_pieces import Judge, Make
from tests.rounding import assert_near, terms_of
from tests.runs import soaked

SHORT = ["phase=ppo", "ppo.rollout_batch_size=4", "ppo.mini_batch_size=2", "ppo.steps=2"]
SHORT += ["ppo.eval_prompts=3", "ppo.sample_every=2", "rollout.max_response_tokens=4"]
SHORT += ["rollout.max_prompt_tokens=200"]


@pytest.mark.slow
def test_responses_to_one_prompt_are_neighbours_on_any_number_of_ranks(made: Make) -> None:
    context, _ = made("ppo.responses_per_prompt=2")
    examples = phase_tokens(context, Phase.ppo).train

    def batches(step: int, size: int) -> list[tuple[str, list[int], list[float]]]:
        rows = []
        for rank in range(size):
            here = replace(context, ranks=Ranks(rank, size))
            batch = PromptLoader(here, examples).own_prompts(step)
            ids = [row[keep].tolist() for row, keep in zip(*batch[:2], strict=True)]
            rows += list(zip(batch.texts, ids, batch.draws_BT.tolist(), strict=True))
        return rows

    seen = []
    for step in range(3):
        rows = batches(step, 2)
        assert rows == batches(step, 1)
        texts = [text for text, _, _ in rows]
        assert len(texts) == 4
        assert texts == [text for text in texts[::2] for _ in range(2)]
        assert len({tuple(draws) for _, _, draws in rows}) == 4, "each response has its own draws"
        for text, ids, _ in rows:
            assert context.tokenizer.decode(ids) == text
        seen += texts[::2]
    assert len(set(seen[: len(set(examples["row"]))])) > 1
    assert batches(0, 1) != batches(1, 1)


MEASURES = ("score", "kl", "ended_share", "response_tokens")
KEYS = {f"{name}_{when}" for name in MEASURES for when in ("before", "after")}
KEYS |= {"kl_to_reference", "steps", "seconds", "peak_memory_gib", "score_gain_ci"}
PERPLEXITY = {"corpus_perplexity_before", "corpus_perplexity_after"}


def test_what_a_run_of_ppo_tells(made: Make) -> None:
    context, notes = made()
    result = run_ppo(context)
    assert set(result) == KEYS
    assert result["steps"] == 2
    assert result["kl_before"] == pytest.approx(0, abs=1e-5)
    assert result["kl_to_reference"] == result["kl_after"] != 0
    assert notes.steps_with("ppo/actor_loss") == [1, 2]
    assert notes.steps_with("ppo/eval_score") == [0, 2]
    steps = [values for _, values in notes.logged if "ppo/score_mean" in values]
    for (_, numbers), logged in zip(notes.numbers, steps, strict=True):
        score, tokens, kl, advantages = numbers.values()
        names = ("ppo/score_mean", "ppo/response_tokens", "ppo/kl_to_reference")
        means = [sum(each) / 4 for each in (score, tokens, kl)]
        assert means == pytest.approx([logged[name] for name in names], abs=1e-5)
        assert len(advantages) == sum(tokens)
    low, high = result["score_gain_ci"]
    assert low <= result["score_after"] - result["score_before"] <= high
    held_out = json.loads((context.run_dir / "ppo" / "held_out.json").read_text())
    for when in ("before", "after"):
        scores = held_out[when]["score"]
        assert sum(scores) / len(scores) == pytest.approx(result[f"score_{when}"])
    assert list(notes.saved) == ["ppo/actor", "ppo/critic"]
    assert [step for _, step, _ in notes.sample] == [0] * 4 + [2] * 4
    first = next(values for _, values in notes.logged if "ppo/approx_kl" in values)
    assert first["ppo/approx_kl"] >= 0
    assert first["ppo/kl_to_reference"] == pytest.approx(0, abs=1e-4)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("one text\n\nanother text\n\na third one")
    return f"data.ptx_path={tmp_path / 'corpus.txt'}"


def test_options_tell_more(made: Make, corpus: str) -> None:
    options = ["ppo.ema_beta=0.5", "ppo.ptx_coef=0.5", "ppo.eval_every=1", corpus]
    context, notes = made(*options, "ppo.responses_per_prompt=2", "ppo.lr_guard_kl=1")
    result = run_ppo(replace(context, judge=Judge()))
    gold = {"gold", "exact", "exact_greedy", "gold_parts"}
    golds = {f"{name}_{when}" for name in gold for when in ("before", "after")}
    golds |= {"gold_gain_ci", "exact_gain_ci"}
    after_ema = {"score", "kl", "ended_share", "response_tokens", "corpus_perplexity", *gold}
    assert set(result) == KEYS | PERPLEXITY | golds | {f"{name}_after_ema" for name in after_ema}
    assert result["gold_after"] == 0.25
    assert notes.steps_with("ppo/eval_gold") == [0, 1, 2]
    assert notes.steps_with("ppo/ptx_loss") == notes.steps_with("ppo/lr_scale") == [1, 2]
    answered = [(step, sample.model) for _, step, sample in notes.sample]
    both = [(2, "actor"), (2, "actor_ema")]
    assert [each for each in dict.fromkeys(answered)] == [(0, "actor"), *both]
    assert list(notes.saved) == ["ppo/actor", "ppo/actor_ema", "ppo/critic"]


def test_without_a_critic_none_is_kept_and_passes_over_the_prompts_end_the_run(made: Make) -> None:
    keys = ["ppo.advantage_estimator=reinforce_pp", "ppo.ptx_eval_blocks=0"]
    context, notes = made(*keys, "ppo.steps=null", "ppo.epochs=0.5")
    steps = math.ceil(len(phase_tokens(context, Phase.ppo).train) / 2 / 4)
    result = run_ppo(count_ppo_steps(context))
    assert set(result) == KEYS
    assert result["steps"] == len(notes.steps_with("ppo/actor_loss")) == steps
    assert list(notes.saved) == ["ppo/actor"]


def test_an_actor_that_would_rest_to_the_end_of_the_prompts_is_refused(made: Make) -> None:
    context, _ = made("ppo.steps=80", "ppo.epochs=0.5", "ppo.actor_freeze_steps=3")
    refusal = r"ppo\.actor_freeze_steps=3: .* ppo\.steps=2; use a number below 2"
    with pytest.raises(ConfigError, match=refusal):
        require_data(context, [Phase.ppo])


def test_nobody_asks_for_a_corpus(made: Make, corpus: str) -> None:
    assert load_corpus_blocks(made("ppo.ptx_eval_blocks=0", corpus)[0]) is None
    assert load_corpus_blocks(made()[0]) is None
    measured = load_corpus_blocks(made(corpus)[0])
    assert measured.eval
    assert not measured.train, "nobody learns from it"
    learned = load_corpus_blocks(made("ppo.ptx_coef=1", corpus)[0])
    assert learned.train
    assert learned.eval == measured.eval
    from_sft = load_corpus_blocks(made("ppo.ptx_coef=1")[0])
    assert {len(ids) for ids in from_sft.train} == {204} or len(from_sft.train) == 1
    assert from_sft.eval == []


def test_another_seed_divides_the_same_corpus(made: Make, corpus: str) -> None:
    """Of runs of one SFT model with several seeds, whose data have one seed."""
    words = ["ppo.ptx_coef=1", "data.eval_share=0.5", corpus]
    one, other, same = (
        load_corpus_blocks(made(*words, *seeds)[0])
        for seeds in ([], ["seed=4"], ["seed=4", "data.seed=1"])
    )
    assert same == one != other


def test_a_shared_trunk_leaves_an_actor_and_a_critic(made: Make, tmp_path: Path) -> None:
    context, notes = made("ppo.shared_trunk=true", "ppo.num_layers_unfrozen=1", "ppo.ema_beta=0.5")
    build_actor(source(), context.tokenizer, seed=1).save_pretrained(tmp_path / "policy")
    result = run_ppo(context)
    assert set(result) >= KEYS
    assert result["kl_before"] == pytest.approx(0, abs=1e-5)
    assert result["kl_after"] != 0
    assert list(notes.saved) == ["ppo/actor", "ppo/actor_ema", "ppo/critic"]
    trunk_actor = notes.saved["ppo/actor"].model
    for name in ("actor", "critic"):
        (tmp_path / name).mkdir()
        notes.saved[f"ppo/{name}"].write(tmp_path / name)
    ids_BS = torch.arange(5, 15)[None]
    with torch.no_grad():
        folder = ModelSource(key="k", path=str(tmp_path / "actor"))
        loaded = build_actor(folder, context.tokenizer, seed=9).eval()
        expected = trunk_actor.eval()(ids_BS).logits
        assert_near(loaded(ids_BS).logits, expected, terms=terms_of(loaded, 10))
        folder = ModelSource(key="k", path=str(tmp_path / "critic"))
        critic = build_scorer(folder, context.tokenizer, seed=9).eval().pretrained
        assert torch.equal(critic.model.norm.weight, loaded.model.norm.weight)
        assert critic.score.weight.any(), "the head has learned"


@pytest.mark.slow
@pytest.mark.parametrize("export", soaked(["merged", "adapter"], "merged"))
def test_adapters_are_merged_or_kept_apart(made: Make, tmp_path: Path, export: str) -> None:
    from peft import PeftConfig
    from transformers import AutoModelForCausalLM

    context, notes = made("lora=default", f"lora.export={export}")
    run_ppo(context)
    folders = {name: tmp_path / "written" / name for name in ("actor", "critic")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        notes.saved[f"ppo/{name}"].write(folder)
    actor = notes.saved["ppo/actor"].model
    has_adapter = (folders["actor"] / "adapter_config.json").exists()
    assert has_adapter == (export == "adapter")
    assert (folders["actor"] / "model.safetensors").exists() != has_adapter
    if has_adapter:
        base = PeftConfig.from_pretrained(folders["actor"]).base_model_name_or_path
        assert Path(base) == tmp_path / "policy"
        base = PeftConfig.from_pretrained(folders["critic"]).base_model_name_or_path
        assert Path(base) == tmp_path / "reward"
    source = ModelSource(key="k", path=str(folders["actor"]))
    loaded = build_actor(source, context.tokenizer, seed=9).eval()
    ids_BS = torch.arange(5, 15)[None]
    with torch.no_grad():
        live = actor.eval()(ids_BS).logits
        assert_near(loaded(ids_BS).logits, live, terms=terms_of(loaded, 10))
        start = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(ids_BS).logits
        assert not torch.allclose(start, live, atol=1e-5), "the adapters have learned"
        source = ModelSource(key="k", path=str(folders["critic"]))
        critic = build_scorer(source, context.tokenizer, seed=9).eval().pretrained
        live = notes.saved["ppo/critic"].model.eval()(ids_BS).logits
        assert_near(critic(ids_BS).logits, live, terms=terms_of(critic, 10))


def test_the_last_samples_are_of_the_step_that_ended_the_phase(made: Make) -> None:
    more = ["ppo.steps=6", "ppo.sample_every=50", "ppo.ema_beta=0.5"]
    context, notes = made(*more, "ppo.stop_run_kl=1e-6")
    last = run_ppo(context)["steps"]
    assert last < 6
    sampled = [(step, sample.model) for _, step, sample in notes.sample]
    assert sampled == [(0, "actor")] * 4 + [(last, "actor")] * 4 + [(last, "actor_ema")] * 4
    assert {sample.weights_step for *_, sample in notes.sample} == {None}


@pytest.mark.parametrize(("best", "named"), [(1, 1), (2, None)])
def test_the_last_samples_name_an_earlier_step_of_their_weights(
    made: Make, monkeypatch: pytest.MonkeyPatch, *, best: int, named: int | None
) -> None:
    monkeypatch.setattr(Checkpoints, "models_step", best)
    for name in ("load_checkpoint", "_load_engines"):
        monkeypatch.setattr(f"rlhf.phases.shared.checkpoints.{name}", lambda *_: None)
    context, notes = made()
    run_ppo(context)
    steps = {(step, sample.weights_step) for _, step, sample in notes.sample}
    assert steps == {(0, None), (2, named)}
