"""Adapters: off is the base, merged is the live model, and folders that peft reads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    PeftModel,
    get_peft_model,
)
from peft import (
    LoraConfig as PeftConfig,
)
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.config.freeze import to_run_config
from rlhf.models.build import build_actor, build_scorer
from rlhf.models.pretrained import require_one_label_model
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.options.lora.keys import LoraConfig, LoraExport
from rlhf.options.lora.models import (
    add_adapters,
    computing_merged,
    disable_adapters,
    fold_adapters,
    has_adapters,
    is_adapter_name,
    merge_adapters_in_stream,
    save_adapter,
)
from rlhf.runtime.start_checks import check_before_start
from tests.conftest import Compose
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import (
    FAMILIES,
    disturb,
    save_base,
    small_tokenizer,
    some_ids,
    source_of,
    whole_state,
)

IDS = some_ids()
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
# peft 0.21's PeftModel reads an attribute that transformers 5.23 has renamed.
THEIR_WARNING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def spec(**changes) -> LoraConfig:
    return lora_config(**({"rank": 3, "alpha": 6.0} | changes))


def adapted(family: str, tokenizer, **changes):
    return build_actor(
        source_of(family), tokenizer, seed=1, extensions=adding(spec(**changes))
    ).eval()


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def values_of(scorer) -> torch.Tensor:
    with torch.no_grad():
        return scorer(IDS)


def trained_names(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapters_change_nothing_and_trained_ones_can_be_switched_off(family, tokenizer):
    base = build_actor(source_of(family), tokenizer, seed=1).eval()
    model = adapted(family, tokenizer)
    assert type(model) is type(base)
    assert has_adapters(model)
    assert not has_adapters(base)
    assert torch.equal(logits_of(model), logits_of(base))
    disturb(model)
    live = logits_of(model)
    assert (live - logits_of(base)).abs().max() > 0.01
    with disable_adapters(model):
        assert torch.equal(logits_of(model), logits_of(base))
    assert torch.equal(logits_of(model), live)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_alone_are_trained_on_every_layer_but_the_output(family, tokenizer) -> None:
    model = adapted(family, tokenizer)
    trained = trained_names(model)
    linear = {"Linear", "OnednnLinear", "Conv1D"}
    base = build_actor(source_of(family), tokenizer, seed=1)
    layers = {n for n, m in base.named_modules() if type(m).__name__ in linear} - {"lm_head"}
    wanted = {f"{layer}.lora_{side}.default.weight" for layer in layers for side in "AB"}
    assert trained == wanted
    assert all(map(is_adapter_name, trained))
    assert not any(is_adapter_name(name) for name, _ in base.named_parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scorer_trains_its_head_beside_the_adapters(family, tokenizer, tmp_path) -> None:
    """Merged, it gives the live values."""
    scorer = build_scorer(source_of(family), tokenizer, seed=1, extensions=adding(spec())).eval()
    model = scorer.pretrained
    trained = trained_names(model)
    assert {name for name in trained if not is_adapter_name(name)} == {"score.weight"}
    assert not any(name.startswith("score.lora") for name in trained)
    disturb(scorer)
    state = dict(merge_adapters_in_stream(model, whole_state(model).items()))
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = build_scorer(ModelSource(key="m", path=str(tmp_path)), tokenizer, seed=9).eval()
    torch.testing.assert_close(values_of(loaded), values_of(scorer), **CLOSE)
    require_one_label_model(ModelSource(key="reward_model.path", path=str(tmp_path)))


def test_adapters_follow_from_the_seed_in_fp32_and_leave_the_global_stream_alone(tokenizer) -> None:
    def first_a(seed: int) -> torch.Tensor:
        model = build_actor(source_of("llama"), tokenizer, seed=1).bfloat16()
        add_adapters(model, spec(), seed=seed)
        return model.model.layers[0].mlp.up_proj.lora_A.default.weight

    before = torch.get_rng_state()
    assert torch.equal(first_a(1), first_a(1))
    assert not torch.equal(first_a(1), first_a(2))
    assert first_a(1).dtype is torch.float32, "over a base in half precision"
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_are_chosen_by_the_ends_of_their_names(tokenizer) -> None:
    model = adapted("llama", tokenizer, target_modules=["q_proj", "1.mlp.up_proj"])
    layers = {name.split(".lora_")[0] for name in trained_names(model)}
    ends = {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"}
    assert layers == {f"model.layers.{end}" for end in ends}
    for name in ("query", "lm_head", "proj"):
        message = rf"lora\.target_modules=\['q_proj', '{name}'\]: .* from down_proj, .*q_proj"
        with pytest.raises(ConfigError, match=message):
            adapted("llama", tokenizer, target_modules=["q_proj", name])


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_compute_what_the_live_model_does(family, tokenizer, tmp_path) -> None:
    model = adapted(family, tokenizer)
    disturb(model)
    live, state = logits_of(model), whole_state(model)
    for parameter in model.parameters():  # as under ZeRO-3: only ``state`` holds the weights
        parameter.data = torch.empty(0)
    model.save_pretrained(tmp_path, state_dict=dict(merge_adapters_in_stream(model, state.items())))
    loaded = build_actor(ModelSource(key="m", path=str(tmp_path)), tokenizer, seed=9).eval()
    assert not has_adapters(loaded)
    torch.testing.assert_close(logits_of(loaded), live, **CLOSE)


def saving(form: str) -> Any:
    return SimpleNamespace(lora=spec(export=LoraExport(form)))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_measured_is_the_model_that_is_saved(family, tokenizer, tmp_path) -> None:
    model = adapted(family, tokenizer).bfloat16()
    disturb(model)
    merged = dict(merge_adapters_in_stream(model, whole_state(model).items()))
    model.save_pretrained(tmp_path, state_dict=merged)
    saved = (
        build_actor(ModelSource(key="m", path=str(tmp_path)), tokenizer, seed=9).eval().bfloat16()
    )
    with disable_adapters(model):
        base = logits_of(model)
    live = logits_of(model)
    with computing_merged(saving("merged"), model):
        assert torch.equal(logits_of(model), logits_of(saved)), "rounded as the folder is"
        with disable_adapters(model):
            assert torch.equal(logits_of(model), base)
    assert not torch.equal(live, logits_of(saved))
    assert torch.equal(logits_of(model), live)
    with computing_merged(saving("adapter"), model):
        assert torch.equal(logits_of(model), live)


def test_merging_adds_in_fp32_and_rounds_once(tokenizer) -> None:
    model = adapted("llama", tokenizer)
    disturb(model)
    state = {name: tensor.bfloat16() for name, tensor in whole_state(model).items()}
    layer = "model.layers.0.mlp.up_proj"
    w, a, b = (
        state[f"{layer}.{part}.weight"].float()
        for part in ("base_layer", "lora_A.default", "lora_B.default")
    )
    merged = dict(merge_adapters_in_stream(model, state.items()))[f"{layer}.weight"]
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, (w + 2.0 * (b @ a)).bfloat16())


def trained_on(base: Path | str, tokenizer, *, seed: int = 5, **changes):
    """A model with trained adapters over the model in a folder."""
    source = ModelSource(key="m", path=str(base))
    extensions = adding(spec(**changes), seed=4)
    model = build_actor(source, tokenizer, seed=4, extensions=extensions).eval()
    disturb(model, seed=seed)
    return model


def read_config(folder: Path) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def change_config(folder: Path, **changes) -> None:
    text = json.dumps(read_config(folder) | changes)
    (folder / "adapter_config.json").write_text(text)


def save(folder: Path, model, *, base: Path | str) -> None:
    folder.mkdir()
    save_adapter(folder, model, whole_state(model).items(), base=str(base))


@pytest.mark.slow
@pytest.mark.filterwarnings(THEIR_WARNING)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_models_adapter_is_read_by_peft_and_by_us(family, tokenizer, tmp_path) -> None:
    base = save_base(tmp_path / "base", family, tokenizer)
    model, folder = trained_on(tmp_path / "base", tokenizer), tmp_path / "adapter"
    save(folder, model, base=tmp_path / "base")
    tokenizer.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} >= {"adapter_model.safetensors"}
    assert not (folder / "model.safetensors").exists()

    live = logits_of(model)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder
    ).eval()
    torch.testing.assert_close(logits_of(theirs), live, **CLOSE)
    assert (live - logits_of(base)).abs().max() > 0.01

    ours = build_actor(ModelSource(key="m", path=str(folder)), tokenizer, seed=5).eval()
    assert not has_adapters(ours)
    assert type(ours) is type(base)
    torch.testing.assert_close(logits_of(ours), live, **CLOSE)
    assert load_tokenizer(folder, key="k").get_vocab() == tokenizer.get_vocab()

    with pytest.raises(CheckpointError, match=r"reward_model\.path=.*task_type=CAUSAL_LM"):
        require_one_label_model(ModelSource(key="reward_model.path", path=str(folder)))
    scorer = build_scorer(ModelSource(key="m", path=str(folder)), tokenizer, seed=5).pretrained
    trunk, merged = scorer.base_model.state_dict(), ours.base_model.state_dict()
    assert trunk.keys() == merged.keys()
    assert all(torch.equal(trunk[name], merged[name]) for name in trunk)


@pytest.mark.filterwarnings(THEIR_WARNING)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reward_models_adapter_holds_its_head(family, tokenizer, tmp_path: Path) -> None:
    save_base(tmp_path / "base", family, tokenizer)
    source = ModelSource(key="m", path=str(tmp_path / "base"))
    scorer = build_scorer(source, tokenizer, seed=4, extensions=adding(spec(), seed=4)).eval()
    disturb(scorer)
    folder = tmp_path / "adapter"
    save(folder, scorer.pretrained, base=tmp_path / "base")
    require_one_label_model(ModelSource(key="reward_model.path", path=str(folder)))
    ours = build_scorer(ModelSource(key="m", path=str(folder)), tokenizer, seed=5).eval()
    torch.testing.assert_close(values_of(ours), values_of(scorer), **CLOSE)

    fresh = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=1, pad_token_id=tokenizer.pad_token_id
    )
    theirs = PeftModel.from_pretrained(fresh, folder).eval()
    with torch.no_grad():
        at_the_end = theirs(IDS).logits[:, 0]
    torch.testing.assert_close(at_the_end, values_of(scorer)[:, -1], **CLOSE)


@pytest.mark.filterwarnings(THEIR_WARNING)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_over_adapters_are_saved_as_one_that_peft_merges(
    family, tokenizer, tmp_path: Path, monkeypatch
) -> None:
    """SFT, PPO on it, and a third round, from relative folders, with other layers and scalings."""
    save_base(tmp_path / "base", family, tokenizer)
    monkeypatch.chdir(tmp_path)
    ends = {"llama": "q_proj", "gpt2": "c_attn"}[family]
    rounds = {"first": {}, "second": {"target_modules": [ends], "alpha": 1.5}, "third": {"rank": 2}}
    base = "base"
    for seed, (name, changes) in enumerate(rounds.items()):
        model = trained_on(base, tokenizer, seed=seed, **changes)
        save(Path(name), model, base=base)
        theirs = AutoPeftModelForCausalLM.from_pretrained(name).merge_and_unload().eval()
        torch.testing.assert_close(logits_of(theirs), logits_of(model), **CLOSE)
        if name == "first":  # as peft users write it: one layer with an alpha of its own
            patterns = {"alpha_pattern": {f"0.*{ends}": 12}, "r": 2, "rank_pattern": {".*": 3}}
            change_config(Path(name), use_rslora=True, **patterns)
        base = name
    monkeypatch.chdir("first")
    ours = build_actor(ModelSource(key="m", path="../third"), tokenizer, seed=7).eval()
    assert all(p.requires_grad for p in ours.parameters()), "trained like those of a whole folder"
    torch.testing.assert_close(logits_of(ours), logits_of(model), **CLOSE)
    stored = read_config(tmp_path / "third")
    assert stored["base_model_name_or_path"] == str(tmp_path / "base")
    assert stored["r"] == 3 + 3 + 2


@pytest.mark.filterwarnings(THEIR_WARNING)
def test_a_critic_on_a_reward_model_on_an_sft_model_is_one_adapter(tokenizer, tmp_path) -> None:
    save_base(tmp_path / "base", "llama", tokenizer)
    save(tmp_path / "sft", trained_on(tmp_path / "base", tokenizer), base=tmp_path / "base")
    for name, base in (("reward", "sft"), ("critic", "reward")):
        source = ModelSource(key="m", path=str(tmp_path / base))
        scorer = build_scorer(source, tokenizer, seed=4, extensions=adding(spec(), seed=4)).eval()
        disturb(scorer, seed=len(name))
        save(tmp_path / name, scorer.pretrained, base=tmp_path / base)
        theirs = AutoPeftModelForSequenceClassification.from_pretrained(
            tmp_path / name, num_labels=1, pad_token_id=tokenizer.pad_token_id
        )
        with torch.no_grad():
            at_the_end = theirs.merge_and_unload().eval()(IDS).logits[:, 0]
        torch.testing.assert_close(at_the_end, values_of(scorer)[:, -1], **CLOSE)
        require_one_label_model(ModelSource(key="reward_model.path", path=str(tmp_path / name)))


@pytest.mark.filterwarnings(THEIR_WARNING)
def test_what_one_adapter_cannot_contain_is_refused_at_the_start(
    tokenizer, tmp_path: Path, compose: Compose
) -> None:
    base, first = tmp_path / "base", tmp_path / "first"
    save_base(base, "llama", tokenizer)
    model = trained_on(base, tokenizer)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        PeftConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    )
    theirs.save_pretrained(first)
    change_config(first, base_model_name_or_path=str(base))
    words = ["model=pretrained", f"model.path={first}", "lora=all", "data.template=plain"]
    check_before_start(to_run_config(compose(words)))
    with pytest.raises(ConfigError, match=r"lora_magnitude_vector.* use lora\.export=merged"):
        check_before_start(to_run_config(compose([*words, "lora.export=adapter"])))
    heads = {"base_model.model.lm_head.weight": torch.ones(2, 2)}
    whole = PeftConfig(modules_to_save=["lm_head"])
    assert fold_adapters([(whole, heads)], [])[1] == heads, "an adapter of whole modules only"
    with pytest.raises(ConfigError, match="lora_magnitude_vector"):  # an adapter of the hub
        save(tmp_path / "second", model, base=first)


def test_new_tokens_have_the_same_embeddings_when_an_adapter_comes_back(tmp_path: Path) -> None:
    tokenizer, folder = small_tokenizer(), tmp_path / "adapter"
    save_base(tmp_path / "base", "llama", tokenizer)
    tokenizer.add_tokens(["<new>"])
    model = trained_on(tmp_path / "base", tokenizer)
    save(folder, model, base=tmp_path / "base")
    loaded = build_actor(ModelSource(key="m", path=str(folder)), tokenizer, seed=8).eval()
    assert len(loaded.get_input_embeddings().weight) == len(tokenizer)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), **CLOSE)


def test_adapters_that_do_not_fit_are_refused(tokenizer, tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_base(base, "llama", tokenizer)
    folder.mkdir()
    model, place = trained_on(base, tokenizer), ModelSource(key="model.path", path=str(folder))
    state = whole_state(model)
    lost = {name: t for name, t in state.items() if "layers.1.mlp.up_proj.lora_A" not in name}
    other = build_actor(source_of("llama", fields={"intermediate_size": 32}), tokenizer, seed=1)
    other.save_pretrained(tmp_path / "wide")
    for own, below, message in (
        (lost, "base", r"not fit its base .*layers\.1\.mlp\.up_proj"),
        (state, "gone", r"base_model_name_or_path=.*gone is not a local folder"),
        (state, "wide", r"model\.path=.*does not fit its base .*size mismatch"),
    ):
        save_adapter(folder, model, own.items(), base=str(base))
        change_config(folder, base_model_name_or_path=str(tmp_path / below))
        with pytest.raises(CheckpointError, match=message):
            build_actor(place, tokenizer, seed=1)

    head = ModelSource(key="model.path", path=str(base))
    scorer = build_scorer(head, tokenizer, seed=4, extensions=adding(spec(), seed=4)).pretrained
    headless = {name: t for name, t in whole_state(scorer).items() if name != "score.weight"}
    save_adapter(folder, scorer, headless.items(), base=str(base))
    with pytest.raises(CheckpointError, match=r"'score\.weight' is missing"):
        build_scorer(place, tokenizer, seed=1)

    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"does not hold a model.*adapter_model\.safetensors"):
        build_actor(place, tokenizer, seed=1)
