"""A policy answers with the sampling of its run; Ctrl-C stops an answer, which is kept."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.base.errors import CheckpointError
from rlhf.chat import talker as talking
from rlhf.chat.dialogue import Dialogue
from rlhf.chat.run_policy import RunPolicy
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
def policy(compose: Compose, tmp_path: Path) -> RunPolicy:
    return RunPolicy(save_run(tmp_path / "run", compose), None)


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


def test_an_answer_streams_in_words_until_the_end_token(policy: RunPolicy) -> None:
    talker = policy.talker
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
    model = RunPolicy(save_run(tmp_path / "run", compose), None).talker._model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    frequencies = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    assert {each.dtype for each in frequencies} == {torch.float32}


def test_stop_texts_and_limits_end_an_answer(policy: RunPolicy) -> None:
    talker = policy.talker
    scripted(talker, "One, two and three")
    talker._stop = ["two"]
    answer = talker.answer(talker.encode_prompt(HELLO), SAMPLING, lambda _: None)
    assert (answer.text, answer.ending) == ("One, two", "ended")
    scripted(talker, "One, two and three")
    talker._stop = []
    short = replace(SAMPLING, max_tokens=2)
    assert talker.answer(talker.encode_prompt(HELLO), short, lambda _: None).ending == "cut"


def test_each_end_token_of_the_model_ends_an_answer(policy: RunPolicy) -> None:
    (policy.folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert policy.talker._generation_config(SAMPLING).eos_token_id == [1, 5]


def test_a_policy_that_has_diverged_is_named(policy: RunPolicy) -> None:
    talker = policy.talker
    next(talker._model.parameters()).data.fill_(torch.nan)
    for sampling in (SAMPLING, GREEDY):
        with pytest.raises(CheckpointError, match="its logits are NaN"):
            talker.answer(talker.encode_prompt(HELLO), sampling, str)


def test_sampling_is_that_of_the_settings(policy: RunPolicy) -> None:
    talker = policy.talker

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


def test_the_end_token_comes_after_the_fewest_tokens(policy: RunPolicy) -> None:
    talker = policy.talker

    def wants_to_end(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
        return logits + 50.0 * (torch.arange(logits.shape[-1]) == talker.tokenizer.eos_token_id)

    talker._model.get_output_embeddings().register_forward_hook(wants_to_end)
    for fewest in (0, 5):
        sampling = replace(SAMPLING, min_tokens=fewest)
        reply = talker.answer(talker.encode_prompt(HELLO), sampling, lambda _: None)
        assert (len(reply.ids), reply.ending) == (fewest + 1, "ended")


@pytest.mark.parametrize(
    ("text", "kept"), [("", ["more"]), ("One, two", ["hello", "One, two", "more"])]
)
def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    text: str, kept: list[str], policy: RunPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    said: list[str] = []
    asked: list[list[str]] = []

    def noted(messages: list[dict[str, str]]) -> list[int]:
        asked.append([message["content"] for message in messages])
        return Talker.encode_prompt(policy.talker, messages)

    monkeypatch.setattr(policy.talker, "encode_prompt", noted)
    dialogue = Dialogue(policy.talker, SAMPLING, write=written.append, say=said.append)
    scripted(policy.talker, text, ctrl_c=True)
    assert dialogue.handle_line("hello")
    assert ("".join(written), said) == (f"{text}\n", ["(stopped)"])
    scripted(policy.talker, "Yes.")
    assert dialogue.handle_line("more")
    assert asked[1] == kept


def test_the_newest_policy_answers_unless_another_is_chosen(policy: RunPolicy) -> None:
    run_dir = policy.run_dir
    assert policy.folder == run_dir / "ppo/actor"
    assert RunPolicy(run_dir, "sft").folder == run_dir / "sft/model"
    (run_dir / "ppo").rename(run_dir.with_name("elsewhere"))
    assert RunPolicy(run_dir, None).folder == run_dir / "sft/model"
    outside = run_dir.with_name("elsewhere") / "actor"
    assert RunPolicy(run_dir, str(outside)).folder == outside


def test_code_of_a_folder_outside_the_run_is_not_trusted(
    policy: RunPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted: list[bool] = []

    def build(source: ModelSource, *_: object, **__: object) -> None:
        trusted.append(source.trust_remote_code)
        raise CheckpointError("enough")

    monkeypatch.setattr("rlhf.chat.talker.build_actor", build)
    outside = policy.run_dir.with_name("outside")
    for folder, trust in ((policy.folder, True), (outside, False)):
        policy.folder = folder
        policy._keys["model.trust_remote_code"] = True
        if folder == outside:
            (policy.run_dir / "ppo/actor").rename(outside)
        with pytest.raises(CheckpointError, match="enough"):
            _ = policy.talker
        assert trusted.pop() is trust


def test_a_run_of_another_version_can_be_talked_to(policy: RunPolicy) -> None:
    config = policy.run_dir / "config.yaml"
    lines = config.read_text().splitlines()
    known = [line for line in lines if "min_response_tokens" not in line]
    config.write_text("\n".join([*known, "a_key_of_then: 1"]))
    again = RunPolicy(policy.run_dir, None)
    assert again.sampling_settings == policy.sampling_settings == replace(SAMPLING, max_tokens=12)
    assert again.talker.answer([5], replace(SAMPLING, max_tokens=1), lambda _: None).ids
