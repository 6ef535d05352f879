"""A rollout backend that cannot work is refused before any model is built."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.base.errors import CapabilityError, ConfigError, DataError
from rlhf.config.choices import Phase
from rlhf.config.freeze import to_run_config
from rlhf.config.schema.run import RunConfig
from rlhf.data.tokens import TokenData
from rlhf.models.families import FAMILIES
from rlhf.options import Backend
from rlhf.options.hybrid_engine import hybrid_backend
from rlhf.options.lora.keys import LoraRole
from rlhf.phases.shared import preflight as rollout_checks
from rlhf.phases.shared.preflight import require_capabilities, require_data
from tests.conftest import Compose
from tests.rollout.decoder_checks import FAMILIES as DECODED
from tests.rollout.decoder_checks import tiny_model


def config_of(compose: Compose, backend: Backend = Backend.fast, **architecture: Any) -> RunConfig:
    """A run whose model has this architecture; rules between keys are not looked at again."""
    config = to_run_config(compose(["hardware=a6000_48g"]))
    model = replace(config.model, architecture=architecture)
    return replace(config, model=model, rollout=replace(config.rollout, backend=backend))


def hybrid(compose: Compose, model_type: str, **fields: Any) -> RunConfig:
    return config_of(compose, Backend.hybrid_engine, model_type=model_type, **fields)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can run the Hybrid Engine."""
    monkeypatch.setattr(hybrid_backend, "hybrid_engine_unavailable_reason", lambda **_: None)
    monkeypatch.setattr(hybrid_backend, "op_unavailable_reason", lambda _: None)


@pytest.mark.usefixtures("gpu")
def test_the_hybrid_engine_does_not_see_adapters(compose: Compose) -> None:
    config = hybrid(compose, "llama")
    for roles, is_refused in (([LoraRole.critic], False), ([LoraRole.actor], True)):
        adapted = replace(config, lora=replace(config.lora, rank=4, roles=roles))
        if not is_refused:
            require_capabilities(adapted)
            continue
        with pytest.raises(CapabilityError, match=r"lora.rank=4 on the actor.*lora=none"):
            require_capabilities(adapted)


@pytest.mark.usefixtures("gpu")
def test_the_config_of_a_folder_is_read(compose: Compose, tmp_path: Path) -> None:
    for family in ("opt", "llama"):
        tiny_model(family).config.save_pretrained(tmp_path / family)
    overrides = ["model=pretrained", "hardware=a6000_48g", "rollout=hybrid_engine"]
    for family, words in {"opt": "model_type=opt", "llama": "num_key_value_heads=2"}.items():
        config = to_run_config(compose([*overrides, f"model.path={tmp_path / family}"]))
        with pytest.raises(CapabilityError, match=words):
            require_capabilities(config)
    # What cannot be read is left to whoever builds the model.
    require_capabilities(to_run_config(compose([*overrides, f"model.path={tmp_path / 'none'}"])))


def test_the_machine_is_asked_first(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match=r"torch finds no GPU here.*use rollout=fast"):
        require_capabilities(hybrid(compose, "llama"))


@pytest.mark.usefixtures("gpu")
def test_only_ppo_has_the_hybrid_engine(compose: Compose) -> None:
    config = hybrid(compose, "llama")
    phases = replace(config.phase, order=[Phase.sft, Phase.dpo])
    with pytest.raises(ConfigError, match="with the dpo phase"):
        require_capabilities(replace(config, phase=phases))
    # Where nothing is sampled, nothing is asked.
    sft = replace(config.phase, order=[Phase.sft])
    require_capabilities(replace(hybrid(compose, "opt"), phase=sft))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "mamba does not cache the keys and values of its tokens"),
        ({"model_type": "mistral", "sliding_window": 8}, "mistral .* fewer than the 288 of rol"),
    ],
)
def test_fast_needs_a_model_that_it_can_decode(
    fields: dict[str, Any], words: str, compose: Compose
) -> None:
    with pytest.raises(CapabilityError, match=rf"model_type=\w*{words}.*; use rollout=hf"):
        require_capabilities(config_of(compose, **fields))
    require_capabilities(config_of(compose, Backend.hf, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*DECODED, *FAMILIES])
def test_what_fast_decodes_passes(family: str, compose: Compose) -> None:
    fields = DECODED.get(family, {})
    fields = fields | ({"sliding_window": 288} if "sliding_window" in fields else {})
    require_capabilities(config_of(compose, model_type=family.partition("-")[0], **fields))


def test_what_only_the_built_model_can_say_is_left_to_it(compose: Compose) -> None:
    require_capabilities(config_of(compose, model_type="bart"))  # its decoder may be taken alone


@pytest.fixture
def counted_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids are those that a context of ``some_data`` has."""
    for name in ("phase_tokens", "phase_prompts"):
        monkeypatch.setattr(
            rollout_checks, name, lambda context, phase, n=name: getattr(context, n)(phase)
        )
    monkeypatch.setattr(rollout_checks, "phase_of_dpo_prompts", lambda _: Phase.reward)


def some_data(examples: dict[Phase, int], said: list[str], config: RunConfig) -> Any:
    """A context whose phases have these many examples."""

    def tokens(phase: Phase) -> TokenData:
        train: Any = range(examples[phase])
        return TokenData(train, train, {"longer than a limit": 0, "no prompt": 3})

    console = SimpleNamespace(say=said.append)
    return SimpleNamespace(config=config, phase_tokens=tokens, console=console, parts={})


@pytest.mark.usefixtures("counted_data")
@pytest.mark.parametrize(
    ("words", "phase", "examples", "sizes"),
    [
        ([], Phase.ppo, 52, "ppo.rollout_batch_size=52 ppo.mini_batch_size=26"),
        ([], Phase.ppo, 1, "ppo.rollout_batch_size=1 ppo.mini_batch_size=1"),
        (
            ["hardware.ranks_per_node=4", "ppo.mini_batch_size=32"],
            *(Phase.ppo, 52, "ppo.rollout_batch_size=48 ppo.mini_batch_size=12"),
        ),
        (
            ["ppo.advantage_estimator=rloo", "ppo.responses_per_prompt=8"],
            *(Phase.ppo, 13, "ppo.rollout_batch_size=104 ppo.mini_batch_size=52"),
        ),
        (["hardware.ranks_per_node=2"], Phase.sft, 31, "sft.batch_size=2 sft.epochs=4"),
        (["hardware.ranks_per_node=2"], Phase.reward, 1, None),
    ],
)
def test_too_little_data_is_refused_before_a_phase_is_trained_with_sizes_that_work(
    words: list[str], phase: Phase, examples: int, sizes: str | None, compose: Compose
) -> None:
    config, said = to_run_config(compose(words)), list[str]()
    counts = dict.fromkeys((Phase.sft, Phase.reward, Phase.ppo), 1000) | {phase: examples}
    with pytest.raises(DataError) as refused:
        require_data(some_data(counts, said, config), config.phase.order)
    message = str(refused.value)
    assert f"the {phase} phase has {examples} examples to train on" in message
    line = next(line for line in said if line.startswith(f"{phase}: {examples} examples to train"))
    assert line.endswith("; skipped: 3 no prompt")
    if sizes is None:
        assert "Use " not in message
        return
    assert f"Use {sizes}, or give more data" in message
    accepted = to_run_config(compose([*words, *sizes.split()]))
    require_data(some_data(counts, said, accepted), accepted.phase.order)


@pytest.mark.usefixtures("counted_data")
def test_a_phase_without_held_out_examples_is_refused_without_sizes(compose: Compose) -> None:
    config = to_run_config(compose([]))
    context = some_data({}, [], config)
    context.phase_tokens = lambda _: TokenData(range(9), [], {})
    with pytest.raises(DataError, match=r"0 held out, .* and 1 held out\. Give more"):
        require_data(context, [Phase.sft])


@pytest.mark.usefixtures("counted_data")
def test_dpo_without_a_held_out_prompt_that_fits_is_refused(compose: Compose) -> None:
    config = to_run_config(compose(["phase=pipeline_dpo", "rollout.max_prompt_tokens=5"]))
    context = some_data({Phase.dpo: 1000}, [], config)
    context.phase_prompts = lambda _: TokenData(range(9), [], {})
    with pytest.raises(DataError, match=r"answer that fits rollout\.max_prompt_tokens=5; raise"):
        require_data(context, [Phase.dpo])
    context.phase_prompts = lambda _: TokenData([], range(1), {})
    require_data(context, [Phase.dpo])


@pytest.mark.usefixtures("counted_data")
def test_a_corpus_that_is_missing_is_refused_before_a_phase_is_trained(
    compose: Compose, tmp_path: Path
) -> None:
    config = to_run_config(compose([f"data.ptx_path={tmp_path / 'none.txt'}"]))
    with pytest.raises(DataError, match=r"none\.txt"):
        require_data(some_data({Phase.ppo: 1000}, [], config), [Phase.ppo])
