"""Scores are those of plain transformers for each text alone, whatever the scorer's form is."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf.base.errors import CheckpointError, RewardError, RlhfError
from rlhf.base.ranks import Ranks
from rlhf.config.batches import BatchPlan
from rlhf.config.choices import Dtype, Phase, RewardKind
from rlhf.config.roles import Role
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.config.typed import to_run_config
from rlhf.engine.settings import EngineSettings
from rlhf.models.model_uses import models_in_phase
from rlhf.options.scorers.keys import ScorerTemplate
from rlhf.options.scorers.text_scorer import TextScorer, build_text_scorers, read_scorer_forms
from rlhf.phases.shared.model_checks import require_text_scorers
from tests.conftest import Compose
from tests.options.scorers.scorer_folders import FORMS, save_form, save_scorer, save_tokenizer
from tests.phases.ppo.ppo_pieces import engine_config
from tests.zero_settings import zero_config

QUESTIONS = ["Name a fruit.", "And?", "Say whether a lemon is sweet, and if so, how sweet it is."]
ANSWERS = [
    "An apple.",
    "",
    " A lemon is not sweet, and I say so: it is sour. " * 3,
    "No",
    "A fig\n",
]
ROWS = [(question, answer) for question in QUESTIONS for answer in ANSWERS]


def config_of(path: Path, **keys: Any) -> RunConfig:
    part = RewardTerm(kind=RewardKind.scorer, path=str(path), **keys)
    return replace(engine_config(), rewards={"own": part})


def build(config: RunConfig, said: list[str] | None = None) -> TextScorer:
    plan = BatchPlan(per_rank=4, micro=4, accumulation=1)
    settings = EngineSettings(zero=zero_config(stage=0), dtype=Dtype.fp32)
    say = [].append if said is None else said.append
    engines = {"settings": settings, "plan": plan, "ranks": Ranks()}
    return build_text_scorers(config, say, engines)["own"]


def prompt_of(question: str) -> str:
    return f"\n\nHuman: {question}\n\nAssistant:"


def plain_scores(folder: Path, rows: list[tuple[str, str]]) -> torch.Tensor:
    """The scores of plain transformers, by the calls that model cards show, row by row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for question, answer in rows:
        asked = [("user", question), ("assistant", answer.removeprefix(" "))]
        messages = [{"role": role, "content": text} for role, text in asked]
        if tokenizer.chat_template:
            inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        elif tokenizer.sep_token:  # in lists, because alone an empty second text would be no text
            inputs = tokenizer([question], [messages[1]["content"]], return_tensors="pt")
        else:
            inputs = tokenizer(prompt_of(question) + answer, return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0]
        scores.append(float(logits[1] - logits[0] if len(logits) == 2 else logits[0]))
    return torch.tensor(scores)


def scores_of(scorer: TextScorer, rows: list[tuple[str, str]]) -> torch.Tensor:
    return scorer([prompt_of(question) for question, _ in rows], [a for _, a in rows])


@pytest.mark.parametrize("name", FORMS)
def test_scores_are_those_of_plain_transformers(name: str, tmp_path: Path) -> None:
    save_form(tmp_path, name)
    expected = plain_scores(tmp_path, ROWS)
    assert expected.std() > 0.2
    found = scores_of(build(config_of(tmp_path)), ROWS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_padding_is_never_a_token_of_a_text(tmp_path: Path) -> None:
    save_form(tmp_path, "no padding token")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pieces = [tokenizer.decode([id_]) for id_ in range(33, len(tokenizer), 20)]
    rows = [("A?", f" It is x{piece}" + each) for piece in pieces for each in ("", " and so on")]
    found = scores_of(build(config_of(tmp_path)), rows)
    torch.testing.assert_close(found, plain_scores(tmp_path, rows), atol=1e-5, rtol=0)


def test_a_prompt_of_several_turns_is_a_conversation(tmp_path: Path) -> None:
    save_form(tmp_path, "llama, template")
    prompt = "\n\nSystem: Be brief.\n\nHuman: A?\n\nAssistant: B.\n\nHuman: C?\n\nAssistant: It"
    (form,) = read_scorer_forms(config_of(tmp_path))
    (row,) = form.encode([prompt], [" is."])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(row["input_ids"]) == (
        "<b><t>system: Be brief.<e><t>user: A?<e><t>assistant: B.<e><t>user: C?<e>"
        "<t>assistant: It is.<e>"
    )


def test_a_text_is_cut_at_its_beginning(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, opens=True)
    model = save_scorer(tmp_path, "llama", tokenizer, max_position_embeddings=40)
    said: list[str] = []
    scorer = build(config_of(tmp_path, add_end=True), said)
    found = scores_of(scorer, ROWS[-3:])
    ids = [tokenizer(prompt_of(q) + a + "<e>").input_ids for q, a in ROWS[-3:]]
    assert sorted(len(row) > 40 for row in ids) == [True] * 3
    kept = [torch.tensor([[row[0], *row[-39:]]]) for row in ids]
    with torch.no_grad():
        expected = torch.cat([model(row).logits[:, 0] for row in kept])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    scores_of(scorer, ROWS)
    (warning,) = said
    assert "rewards.own reads 40 tokens: the beginning of 3 of 3 texts is cut off" in warning


NAMED = {"id2label": {0: "no", 1: "so-so", 2: "yes"}, "label2id": {"no": 0, "so-so": 1, "yes": 2}}
OPPOSITES = {"id2label": {0: "toxic", 1: "clean"}, "label2id": {"toxic": 0, "clean": 1}}


@pytest.mark.parametrize(
    ("labels", "label", "weights"),
    [
        (NAMED, "yes", [0, 0, 1]),
        (NAMED, "0", [1, 0, 0]),
        (OPPOSITES, "clean", [-1, 1]),
        (OPPOSITES, "toxic", [1, -1]),
    ],
)
def test_a_label_is_chosen(
    labels: dict[str, Any], label: str, weights: list[int], tmp_path: Path
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    model = save_scorer(tmp_path, "llama", tokenizer, num_labels=len(weights), **labels)
    with torch.no_grad():
        logits = model(**tokenizer(prompt_of("A?") + " B.", return_tensors="pt")).logits[0]
    found = scores_of(build(config_of(tmp_path, label=label)), [("A?", " B.")])
    expected = logits @ torch.tensor(weights, dtype=torch.float)
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=0)


def save_language_model(folder: Path) -> None:
    save_form(folder, "llama, plain")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("SequenceClassification", "CausalLM"))


def save_without_head(folder: Path) -> None:
    save_form(folder, "llama, plain")
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_labels(folder: Path, **labels: Any) -> None:
    count = {"num_labels": len(labels.get("id2label", "1"))}
    save_scorer(folder, "llama", save_tokenizer(folder), **count, **labels)


PLAIN = partial(save_form, name="llama, plain")
REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], str]] = {
    "no label": (
        partial(save_labels, **NAMED),
        {},
        r"own\.label=null: .* 3 labels.*no or so-so or",
    ),
    "no opposite": (partial(save_labels, **OPPOSITES), {}, r"own\.label=null: .* toxic or clean"),
    "no such label": (PLAIN, {"label": "1"}, r"own\.label=1: .* has 1 labels"),
    "no template": (
        PLAIN,
        {"template": ScorerTemplate.chat},
        r"own\.template=chat: .* no chat temp",
    ),
    "no text": (
        partial(save_form, name="qwen2, two labels"),
        {"add_end": True},
        r"own\.add_end=true: needs template=plain \(here it is chat\)",
    ),
    "a language model": (save_language_model, {}, r"own\.path=.* is not a trained reward model or"),
    "no head": (save_without_head, {}, r"own\.path=.* does not hold the model .* missing: score"),
    "no tokenizer": (
        lambda folder: save_labels(folder) or (folder / "tokenizer.json").unlink(),
        {},
        r"own\.path=.* does not hold a tokenizer: .*\)$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_scorer_that_cannot_be_used_is_refused_before_training(name: str, tmp_path: Path) -> None:
    save, keys, told = REFUSED[name]
    save(tmp_path)
    config = config_of(tmp_path, **keys)
    for phases in ([Phase.sft], [Phase.ppo]):  # only PPO reads it
        with pytest.raises(RlhfError, match=told) if Phase.ppo in phases else nullcontext():
            require_text_scorers(config, phases)


def test_a_model_without_all_tokens_of_its_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, opens=True)
    save_scorer(tmp_path, "llama", tokenizer, vocab_size=len(tokenizer) - 3)
    (form,) = read_scorer_forms(config_of(tmp_path))
    told = r"own\.path=.* the tokenizer writes the token id 297, but the model has 297 embeddings"
    with pytest.raises(RewardError, match=told):
        form.check_prompts([prompt_of("A?")])


def test_a_template_that_shows_no_system_message_is_refused(tmp_path: Path) -> None:
    save_form(tmp_path, "gemma")
    (form,) = read_scorer_forms(config_of(tmp_path))
    form.check_prompts([prompt_of("A?")] * 2)
    told = r"own\.template=chat: .* fails on messages of system, user, assistant \(.*no system\)"
    with pytest.raises(RewardError, match=told):
        form.check_prompts([prompt_of("A?"), f"\n\nSystem: Be brief.{prompt_of('A?')}"])


def test_a_model_on_the_hub_is_checked_when_the_run_starts() -> None:
    config = config_of(Path("nobody/has-this"))
    require_text_scorers(config, [Phase.ppo])
    with pytest.raises(CheckpointError, match=r"own\.path=nobody/has-this is not a local folder"):
        list(read_scorer_forms(config))


def test_a_plan_counts_the_weights_of_all_scorers(tmp_path: Path, compose: Compose) -> None:
    names = ["llama, plain", "deberta-v2, pair"]  # the planner does not know the second's family
    sizes = [
        sum(p.numel() for p in save_form(tmp_path / name, name).parameters()) for name in names
    ]
    parts = ", ".join(
        f"p{i}: {{kind: scorer, path: '{tmp_path / n}'}}" for i, n in enumerate(names)
    )
    for words, own in ((["phase=pipeline_rule"], 0), (["phase=pipeline"], 1)):
        first = "m: {kind: model}, " if own else ""
        config = to_run_config(compose([*words, f"+rewards={{{first}{parts}}}"]))
        (model,) = (m for m in models_in_phase(config, Phase.ppo) if m.role is Role.reward)
        expected = sum(sizes) + own * (model.shape.scorer_weights if own else 0)
        assert model.weights == pytest.approx(expected, rel=0.05)
        assert all(m.role is not Role.reward for m in models_in_phase(config, Phase.sft))
