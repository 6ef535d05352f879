"""A scorer's folder gives the same scores in plain transformers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf.models.build import build_scorer
from rlhf.models.tokenizers import train_byte_level_bpe
from rlhf.phases.shared.exporting import build_export, save_export
from tests.models_on_disk import disturb, source_of
from tests.phases.run_pieces import Make
from tests.plain_engine import PlainEngine

TEXTS = ["one<|end|>", "two pears and an apple<|end|>", "three plums<|end|>"]


def tokenizer_with(*special: str) -> PreTrainedTokenizerBase:
    """A tokenizer with some special tokens beside its end token, with which it pads itself."""
    stored = json.loads(train_byte_level_bpe(["some text"], vocab_size=270).to_str())
    stored["added_tokens"] = [each for each in stored["added_tokens"] if "end" in each["content"]]
    own = Tokenizer.from_str(json.dumps(stored))
    made = PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": list(special)})
    made.pad_token = "<|end|>"
    return made


def test_a_card_has_no_call_that_gives_another_score(made: Make, tmp_path: Path) -> None:
    """Plain transformers reads the first member of an ensemble alone."""
    context, _ = made()
    scorer = build_scorer(source_of("llama"), context.tokenizer, seed=1)
    export = build_export(context.config, PlainEngine(scorer))
    folder = tmp_path / "reward" / "model"
    for writes in (None, lambda _: None):
        save_export(
            context, export._replace(write_more=writes), folder, what="", answers=False, example="a"
        )
        assert ("```python" in (folder / "README.md").read_text()) == (writes is None)


@pytest.mark.parametrize("special", [("<|first|>", "<|my_pad|>"), ("<|first|>",), ()])
@pytest.mark.parametrize("folder", ["reward/model", "ppo/critic"])
def test_plain_transformers_reads_the_end_token(
    folder: str,
    special: tuple[str, ...],
    made: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    context, _ = made()
    tokenizer = tokenizer_with(*special)
    scorer = build_scorer(source_of("llama"), tokenizer, seed=1).eval()
    disturb(scorer)
    export = build_export(context.config, PlainEngine(scorer))
    example = TEXTS[0] if folder == "reward/model" else None
    context = replace(context, tokenizer=tokenizer)
    save_export(
        context, export, tmp_path / folder, what="A scorer.", answers=False, example=example
    )
    with torch.no_grad():
        ids = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
        wanted = torch.cat([scorer(each)[:, -1] for each in ids])

    monkeypatch.chdir(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    reader = AutoTokenizer.from_pretrained(folder)
    assert [reader(text).input_ids for text in TEXTS] == [each[0].tolist() for each in ids]
    with torch.no_grad():
        single = torch.cat([model(each).logits[:, 0] for each in ids])
        torch.testing.assert_close(single, wanted, atol=1e-5, rtol=1e-5)
        if special:
            batch = reader(TEXTS, padding=True, padding_side="right", return_tensors="pt")
            torch.testing.assert_close(model(**batch).logits[:, 0], wanted, atol=1e-5, rtol=1e-5)
            assert reader.pad_token == special[-1], "the one that is called padding"
        else:
            with pytest.raises(ValueError, match="padding token"):
                reader(TEXTS, padding=True)
    assert model.config.pad_token_id != tokenizer.eos_token_id
    calls = re.findall(r"```python\n(.*?)```", Path(folder, "README.md").read_text(), re.DOTALL)
    for call in calls:
        exec(call, {})
        printed = re.search(r"-?\d\.\d+", capsys.readouterr().out)
        assert float(printed[0]) == pytest.approx(wanted[0].item(), abs=1e-3)
    assert len(calls) == (folder == "reward/model")
