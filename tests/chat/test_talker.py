"""A policy answers with the sampling of its run; Ctrl-C stops an answer, which is kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.base.errors import CheckpointError
from rlhf.chat import talker as talking
from rlhf.chat.dialogue import Dialogue
from rlhf.chat.run_models import RunModels
from rlhf.chat.talker import Talker
from rlhf.config.choices import Dtype
from rlhf.models.build import ModelSource
from rlhf.rollout.sampling import SamplingSettings
from tests.chat.small_run import save_run
from tests.conftest import Compose

SAMPLING = SamplingSettings(max_tokens=16, temperature=1.0, top_k=0, top_p=1.0)
GREEDY = replace(SAMPLING, temperature=0.0)
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def models(compose: Compose, tmp_path: Path) -> RunModels:
    return RunModels(save_run(tmp_path / "run", compose), None)


def scripted(talker: Talker, text: str, *, ctrl_c: bool = False) -> list[int]:
    """Make the model say ``text`` and end, or be interrupted by Ctrl-C; returns the ids."""
    ids = [*talker.tokenizer(text).input_ids, talker.tokenizer.eos_token_id]
    left = list(ids)

    def forced(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        if ctrl_c and len(left) == 1:
            handle.remove()
            raise KeyboardInterrupt
        only = torch.full_like(output, -torch.inf)
        only[..., left.pop(0)] = 0.0
        return only

    handle = talker._model.get_output_embeddings().register_forward_hook(forced)
    return ids


def test_an_answer_streams_in_words_until_the_end_token(models: RunModels) -> None:
    talker = models.talker
    ids = scripted(talker, " One, two\nthree and 四.")
    pieces: list[str] = []
    answer = talker.answer(talker.encode_prompt(HELLO), SAMPLING, pieces.append)
    assert answer == ("One, two\nthree and 四.", ids, "ended")
    assert "".join(pieces) == answer.text
    assert len([piece for piece in pieces if piece]) > 3


def test_rotary_frequencies_keep_their_precision(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 the angle at position 1024 would be off by more than a radian."""
    monkeypatch.setattr(talking, "resolve_dtype", lambda *_: Dtype.bf16)
    models = RunModels(save_run(tmp_path / "run", compose), None)
    talker = models.talker
    assert models.score(talker, [5], talker.answer([5], SAMPLING, str)) is not None
    assert models._reward_model is not None
    for model in (talker._model, models._reward_model):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        frequencies = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
        assert {each.dtype for each in frequencies} == {torch.float32}


def test_stop_texts_and_limits_end_an_answer(models: RunModels) -> None:
    talker = models.talker
    scripted(talker, "One, two and three")
    talker._stop = ["two"]
    answer = talker.answer(talker.encode_prompt(HELLO), SAMPLING, lambda _: None)
    assert (answer.text, answer.why) == ("One, two", "ended")
    scripted(talker, "One, two and three")
    talker._stop = []
    short = replace(SAMPLING, max_tokens=2)
    assert talker.answer(talker.encode_prompt(HELLO), short, lambda _: None).why == "cut"


def test_a_policy_that_has_diverged_is_named(models: RunModels) -> None:
    talker = models.talker
    next(talker._model.parameters()).data.fill_(torch.nan)
    for sampling in (SAMPLING, GREEDY):
        with pytest.raises(CheckpointError, match="its logits are NaN"):
            talker.answer(talker.encode_prompt(HELLO), sampling, str)


def test_sampling_is_that_of_the_settings(models: RunModels) -> None:
    talker = models.talker

    def answers(sampling: SamplingSettings) -> list[list[int]]:
        torch.manual_seed(0)
        ids = talker.encode_prompt(HELLO)
        return [talker.answer(ids, sampling, lambda _: None).ids for _ in range(2)]

    greedy, sampled = answers(GREEDY), answers(SAMPLING)
    assert greedy[0] == greedy[1]
    assert len({str(ids) for ids in sampled}) == 2
    assert answers(SAMPLING) == sampled
    for likeliest in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999999}):
        assert answers(replace(SAMPLING, **likeliest)) == greedy


def test_the_end_token_comes_after_the_fewest_tokens(models: RunModels) -> None:
    talker = models.talker

    def wants_to_end(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 50.0 * (torch.arange(logits.shape[-1]) == talker.tokenizer.eos_token_id)

    talker._model.get_output_embeddings().register_forward_hook(wants_to_end)
    for fewest in (0, 5):
        sampling = replace(SAMPLING, min_tokens=fewest)
        reply = talker.answer(talker.encode_prompt(HELLO), sampling, lambda _: None)
        assert (len(reply.ids), reply.why) == (fewest + 1, "ended")


@pytest.mark.parametrize(
    ("text", "kept"), [("", ["more"]), ("One, two", ["hello", "One, two", "more"])]
)
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    text: str, kept: list[str], models: RunModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    said: list[str] = []
    asked: list[list[str]] = []

    def noted(messages: list[dict[str, str]]) -> list[int]:
        asked.append([message["content"] for message in messages])
        return Talker.encode_prompt(models.talker, messages)

    monkeypatch.setattr(models.talker, "encode_prompt", noted)
    dialogue = Dialogue(models, SAMPLING, write=written.append, say=said.append)
    scripted(models.talker, text, ctrl_c=True)
    assert dialogue.handle_line("hello")
    assert ("".join(written), said) == (f"{text}\n", ["(stopped)"])
    scripted(models.talker, "Yes.")
    assert dialogue.handle_line("more")
    assert asked[1] == kept


def test_the_newest_policy_answers_unless_another_is_chosen(models: RunModels) -> None:
    run_dir = models.run_dir
    assert models.folder == run_dir / "ppo/actor"
    chosen = RunModels(run_dir, "sft")
    assert chosen.folder == run_dir / "sft/model"
    assert [name for name, _ in chosen.iterate_compared_models()] == ["sft/model", "ppo/actor"]
    (run_dir / "ppo").rename(run_dir.with_name("elsewhere"))
    assert RunModels(run_dir, None).folder == run_dir / "sft/model"
    outside = RunModels(run_dir, str(run_dir.with_name("elsewhere") / "actor"))
    assert [name for name, _ in outside.iterate_compared_models()] == [
        "sft/model",
        "elsewhere/actor",
    ]
    with pytest.raises(CheckpointError, match="compare needs"):
        next(RunModels(run_dir, None).iterate_compared_models())


def test_code_of_a_folder_outside_the_run_is_not_trusted(
    models: RunModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted: list[bool] = []

    def build(source: ModelSource, *_: object, **__: object) -> None:
        trusted.append(source.trust_remote_code)
        raise CheckpointError("enough")

    monkeypatch.setattr("rlhf.chat.talker.build_actor", build)
    outside = models.run_dir.with_name("outside")
    for folder, trust in ((models.folder, True), (outside, False)):
        models.folder = folder
        models._keys["model.trust_remote_code"] = True
        if folder == outside:
            (models.run_dir / "ppo/actor").rename(outside)
        with pytest.raises(CheckpointError, match="enough"):
            _ = models.talker
        assert trusted.pop() is trust


def test_a_run_of_another_version_can_be_talked_to(models: RunModels) -> None:
    config = models.run_dir / "config.yaml"
    lines = config.read_text().splitlines()
    known = [line for line in lines if "min_response_tokens" not in line]
    config.write_text("\n".join([*known, "a_key_of_then: 1"]))
    again = RunModels(models.run_dir, None)
    assert again.sampling_settings == models.sampling_settings == replace(SAMPLING, max_tokens=12)
    assert again.talker.answer([5], replace(SAMPLING, max_tokens=1), lambda _: None).ids
