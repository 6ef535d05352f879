"""Models of every family that is advertised, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.models.build import build_actor, build_scorer, require_enough_positions
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import Tokens, check_same_tokens, load_tokenizer
from rlhf.options.lora.models import has_adapters
from tests.lora_settings import adding, lora_config
from tests.models_on_disk import FAMILIES, save_base, source_of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scorer_reads_its_head_at_every_position(family: str, tokenizer) -> None:
    """Padding behind a sequence changes no value."""
    scorer = build_scorer(source_of(family), tokenizer, seed=1).eval()
    ids = torch.randint(2, 260, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = scorer(ids)
        at_the_end = scorer.pretrained(ids).logits[:, 0]
        padded = scorer(torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], dim=1))
    assert values.shape == (2, 7)
    torch.testing.assert_close(values[:, -1], at_the_end)
    torch.testing.assert_close(padded[:, :7], values)


def test_a_model_keeps_all_its_end_tokens(tmp_path: Path, tokenizer) -> None:
    save_base(tmp_path, "llama", tokenizer)
    source, end = ModelSource(key="model", path=str(tmp_path)), tokenizer.eos_token_id
    rows = {1: end, 5: [end, 5], "null": end, "[5, 1]": [end, 5], "[7, 5]": [end, 7, 5]}
    for stored, expected in rows.items():
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {stored}}}')
        model = build_actor(source, tokenizer, seed=1)
        assert model.generation_config.eos_token_id == expected
        model.save_pretrained(tmp_path / "again")
        saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
        assert saved["eos_token_id"] == expected
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 999]}')
    with pytest.raises(CheckpointError, match=r"has eos_token_id=\[1, 999\]; must be token ids"):
        build_actor(source, tokenizer, seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_what_is_asked_for(family: str, tokenizer) -> None:
    def probabilities(model: torch.nn.Module) -> set[float]:
        return {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}

    ids = torch.arange(2, 12)[None]
    actor = build_actor(source_of(family), tokenizer, seed=1).train()
    assert probabilities(actor) <= {0.0}
    torch.testing.assert_close(actor(ids).logits, actor(ids).logits)
    noisy = build_actor(source_of(family, dropout=0.5), tokenizer, seed=1).train()
    assert probabilities(noisy) <= {0.5}
    assert not torch.equal(noisy(ids).logits, noisy(ids).logits)
    assert getattr(noisy.config, "layerdrop", 0.0) == 0.0, "no layer is skipped"


def test_models_are_drawn_without_the_states_of_eight_gpus(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fork_rng would read and set each, and warn that there are so many."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    lora = lora_config()
    assert has_adapters(build_actor(source_of("llama"), tokenizer, seed=1, extensions=adding(lora)))


def test_a_scorer_in_bf16_gives_fp32_values(tokenizer) -> None:
    scorer = build_scorer(source_of("llama"), tokenizer, seed=0).bfloat16()
    assert scorer(torch.ones(1, 3, dtype=torch.long)).dtype == torch.float32


def test_positions_are_checked_against_the_model(tokenizer) -> None:
    actor = build_actor(source_of("opt"), tokenizer, seed=1)
    require_enough_positions(actor, 2048, key="model", wanted="a + b")
    with pytest.raises(ConfigError, match=r"a \+ b=2049: the model of model has 2048 positions"):
        require_enough_positions(actor, 2049, key="model", wanted="a + b")


def test_an_architecture_that_cannot_be_built_is_refused(tokenizer) -> None:
    source = ModelSource(key="model.architecture", path=None, architecture={"model_type": "no"})
    with pytest.raises(ConfigError, match=r"model\.architecture: .*model_type='no'"):
        build_actor(source, tokenizer, seed=1)


def test_a_trained_tokenizer_encodes_any_text_and_comes_back(tokenizer, tmp_path: Path) -> None:
    text = "some новый 词 words 🙂\n\n  to"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, key="k")
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert loaded.pad_token_id != loaded.eos_token_id
    check_same_tokens(*map(Tokens.from_tokenizer, (tokenizer, loaded)), place="there")
