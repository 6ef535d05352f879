"""fused_layers=liger: models that it does not fit, what is replaced, and launches that it saves."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import CapabilityError
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.roles import Role
from rlhf.models.build import compile_layers, find_model_extensions
from rlhf.options.fused_layers import liger_layers, rules
from rlhf.phases.shared.policies import build_policy, build_reference
from tests.conftest import Compose
from tests.models_on_disk import save_base, small_tokenizer
from tests.options.fused_layers.launches import count_launches
from tests.plain_engine import PlainEngine
from tests.rollout.decoder_checks import tiny_model

# Operations of norms, rotary embeddings and SwiGLU.
SMALL = {"rsqrt", "pow", "neg", "cat", "slice_backward", "silu", "silu_backward"}
ON_GPU = ["fused_layers=liger", "hardware=h100_80g", "zero=stage1"]


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["model=opt_1.3b"],
            ["a model with model_type=opt is", "llama, mistral", "fused_layers=none"],
        ),
        (
            ["model=llama3.1_8b", "+model.architecture.hidden_act=gelu"],
            ["a model with hidden_act=gelu", "with hidden_act=silu"],
        ),
    ],
)
def test_models_that_it_does_not_fit_are_refused(
    overrides: list[str], parts: list[str], compose: Compose
) -> None:
    config = to_run_config(compose([*ON_GPU, *overrides]))
    with pytest.raises(CapabilityError) as caught:
        rules.check_liger_layers(config, [Phase.sft])
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("words", "uses"),
    [
        (["hardware=h100_80g"], True),
        (["hardware=cpu"], False),
        (["hardware=h100_80g", "fused_layers=none"], False),
        (["hardware=h100_80g", "rollout=hybrid_engine", "zero=stage1"], False),
    ],
)
def test_auto_selects_liger_where_it_fits(
    words: list[str], uses: bool, compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = to_run_config(compose(["model=llama3.1_8b", *words]))
    extensions = find_model_extensions(config, Role.actor, seed=1)
    assert (liger_layers.fuse_fitting_layers in extensions) == uses
    monkeypatch.setattr(liger_layers, "find_spec", lambda _: None)
    assert find_model_extensions(config, Role.actor, seed=1) == []


def test_what_does_not_fit_or_fails_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = list[object]()
    monkeypatch.setattr(liger_layers, "replace_layers", replaced.append)
    monkeypatch.setattr(liger_layers, "use_if_equal", lambda *_, **__: True)
    for family in ("opt", "llama"):
        liger_layers.fuse_fitting_layers(tiny_model(family), ())
    assert [each.config.model_type for each in replaced] == ["llama"]
    monkeypatch.setattr(liger_layers, "use_if_equal", lambda *_, **__: None)
    liger_layers.fuse_fitting_layers(tiny_model("llama"), ())
    monkeypatch.setattr(liger_layers, "use_if_equal", lambda *_, **__: True)
    compiled = tiny_model("llama")
    compile_layers(compiled, key="model")
    liger_layers.fuse_fitting_layers(compiled, ())
    assert len(replaced) == 1


def test_a_missing_package_is_named(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    config = to_run_config(compose([*ON_GPU, "model=llama3.1_8b"]))
    rules.check_liger_layers(config, [*Phase])
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(CapabilityError, match=r"fused_layers=liger.*pip install 'rlhf\[liger\]'"):
        rules.check_liger_layers(config, [*Phase])


def test_the_policy_and_its_frozen_reference_have_them(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokenizer, replaced = small_tokenizer(), list[object]()
    save_base(tmp_path, "llama", tokenizer)
    model = ["model=pretrained", f"model.path={tmp_path}"]
    config = to_run_config(compose([*ON_GPU, "phase=dpo", *model]))
    monkeypatch.setattr(liger_layers, "replace_layers", replaced.append)
    policy = build_policy(config, tokenizer, dropout=0.0)
    reference: Any = build_reference(config, Phase.dpo, PlainEngine(policy), tokenizer, PlainEngine)
    assert replaced == [policy.pretrained, reference.module.pretrained]


def test_a_layer_launches_less() -> None:
    plain, fused = count_launches(fuses=False), count_launches(fuses=True)
    for few, many in zip(fused, plain, strict=True):
        assert few.launches <= many.launches / 2
        assert few.bytes < many.bytes
        assert SMALL & {*many.names}
        assert not SMALL & {*few.names}
