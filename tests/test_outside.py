"""Models of a run give in other programs the numbers that this program computes."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf.config.freeze import load_run
from rlhf.config.roles import reward_model_base
from rlhf.data.collate import collate_prompts
from rlhf.models.build import ModelSource, build_actor, build_scorer
from rlhf.models.language_model import LanguageModel
from rlhf.rollout.sampling import SamplingSettings
from tests.plain_engine import PlainEngine
from tests.rollout.decoder_checks import fast_rollout
from tests.runs import finished, wait_for

TOKENS = 8  # of an answer
# Heads of 32 numbers, which vLLM reads on a CPU.
SIZES = "hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 2"
SIZES += ", num_key_value_heads: 1, max_position_embeddings: 512, hidden_act: silu"
SIZES += ", rope_parameters: {partial_rotary_factor: 1.0}"
LLAMA = f"model.architecture={{model_type: llama, {SIZES}}}"
TEXTS = ["one<|end|>", "two pears and an apple<|end|>", "three plums<|end|>"]


OF_PEFT = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Llama whose models are saved whole."""
    return finished(tmp_path_factory.mktemp("whole") / "run", LLAMA, "sft.epochs=1")


@pytest.fixture(scope="module")
def adapted(whole: Path) -> Path:
    """A run that trains adapters on the SFT model of another run."""
    base = f"model.path={whole / 'sft' / 'model'}"
    return finished(
        whole.parent / "adapted", "model=pretrained", base, "lora=all", "lora.export=adapter"
    )


def source_of(folder: Path) -> ModelSource:
    """A model folder of a run, as evaluations read it."""
    config = load_run(folder.parents[1])
    base = reward_model_base(config)[1] if folder.parent.name == "reward" else config.model
    return ModelSource.from_folder(folder, base=base)


class Answers:
    """Greedy answers of a policy in this program, and their log-probabilities."""

    def __init__(self, folder: Path) -> None:
        lines = (folder.parents[1] / "samples.jsonl").read_text().splitlines()
        self.texts = sorted({json.loads(line)["prompt"] for line in lines})[:4]
        self.folder, self.tokenizer = folder, AutoTokenizer.from_pretrained(folder)
        model = build_actor(source_of(folder), self.tokenizer, seed=0)
        settings = SamplingSettings(max_tokens=TOKENS, temperature=1.0, top_k=1, top_p=1.0)
        self.prompts = self.tokenizer(self.texts, add_special_tokens=False).input_ids
        draws_BT = torch.full((len(self.texts), TOKENS), 0.5)
        batch = collate_prompts(
            self.prompts, self.texts, draws_BT, pad_id=0, device=torch.device("cpu")
        )
        responses = fast_rollout(settings).generate(PlainEngine(LanguageModel(model)), batch)
        rows = zip(responses.ids_BT, responses.keep_BT, strict=True)
        self.ids = [ids_T[keep_T].tolist() for ids_T, keep_T in rows]
        self.logprobs_N = logprobs_of(model, self.prompts, self.ids)


@torch.no_grad()
def logprobs_of(model: torch.nn.Module, prompts: list[list[int]], ids: list[list[int]]) -> Tensor:
    """Log-probabilities of answers, one after the other, each in a call of its own."""
    found = []
    for prompt, answer in zip(prompts, ids, strict=True):
        logits_SV = model.eval()(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        picks = torch.tensor(answer)[:, None]
        found.append(logits_SV.float().log_softmax(-1).gather(1, picks)[:, 0])
    return torch.cat(found)


def check_answers(theirs: torch.nn.Module, ours: Answers) -> None:
    """Alone and padded on the left, ``theirs`` answers as this program does."""
    logprobs_N = logprobs_of(theirs, ours.prompts, ours.ids)
    torch.testing.assert_close(logprobs_N, ours.logprobs_N, atol=1e-5, rtol=0)
    batch = ours.tokenizer.pad(
        {"input_ids": ours.prompts}, padding_side="left", return_tensors="pt"
    )
    answers = theirs.generate(**batch, do_sample=False, max_new_tokens=TOKENS)
    for row, ids in zip(answers[:, batch.input_ids.shape[1] :].tolist(), ours.ids, strict=True):
        assert row[: len(ids)] == ids


@pytest.mark.parametrize("name", ["sft/model", "ppo/actor"])
def test_transformers_answers_as_the_policy_does(name: str, whole: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(whole / name)
    check_answers(theirs, Answers(whole / name))
    assert theirs.generation_config.max_new_tokens == {"sft/model": 512}.get(name, TOKENS)


@OF_PEFT
@pytest.mark.parametrize("name", ["sft/model", "ppo/actor"])
def test_peft_answers_as_the_adapted_policy_does(name: str, adapted: Path) -> None:
    theirs = AutoPeftModelForCausalLM.from_pretrained(str(adapted / name))
    check_answers(theirs, Answers(adapted / name))


@torch.no_grad()
def check_scores(theirs: torch.nn.Module, folder: Path) -> Tensor:
    """Alone and padded on either side, ``theirs`` scores as this program does."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = build_scorer(source_of(folder), tokenizer, seed=0).eval()
    rows = tokenizer(TEXTS, add_special_tokens=False).input_ids
    wanted = torch.cat([ours(torch.tensor([row]))[:, -1] for row in rows])
    single = torch.cat([theirs.eval()(torch.tensor([row])).logits[:, 0] for row in rows])
    torch.testing.assert_close(single, wanted, atol=1e-5, rtol=0)
    for side in ("left", "right"):
        batch = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt")
        torch.testing.assert_close(theirs(**batch).logits[:, 0], wanted, atol=1e-5, rtol=0)
    return wanted


@pytest.mark.parametrize("name", ["reward/model", "ppo/critic"])
def test_transformers_scores_as_the_run_does(name: str, whole: Path) -> None:
    check_scores(AutoModelForSequenceClassification.from_pretrained(whole / name), whole / name)


@OF_PEFT
@pytest.mark.parametrize("name", ["reward/model", "ppo/critic"])
def test_peft_scores_as_the_adapted_scorer_does(name: str, adapted: Path) -> None:
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(
        str(adapted / name), num_labels=1
    )
    check_scores(theirs, adapted / name)


def test_trl_scores_as_the_reward_model_does(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its trainers load a reward model, and as they score queries with responses."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.utils import get_reward

    folder = whole / "reward" / "model"
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    wanted = check_scores(theirs, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(TEXTS, add_special_tokens=False).input_ids
    width = max(map(len, rows)) + 1
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    with torch.no_grad():
        _, scores, _ = get_reward(theirs, padded, tokenizer.pad_token_id, 1)
    torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=0)


@pytest.mark.soak
def test_transformers_serve_answers_as_the_policy_does(whole: Path) -> None:
    ours = Answers(whole / "ppo" / "actor")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = "from transformers.cli.transformers import main; main()"
    words = ["serve", str(ours.folder), "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-c", serve, *words, "--device", "cpu"])
    address = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert server.poll() is None, "the server ended"
        try:
            return bool(urlopen(f"{address}/health").status == 200)
        except OSError:
            return False

    try:
        wait_for(is_ready, seconds=120)
        for text, ids in zip(ours.texts, ours.ids, strict=True):
            asked = {"model": str(ours.folder), "prompt": text, "temperature": 0}
            asked |= {"max_tokens": TOKENS}
            request = Request(f"{address}/v1/completions", json.dumps(asked).encode())
            request.add_header("Content-Type", "application/json")
            (choice,) = json.loads(urlopen(request).read())["choices"]
            assert choice["text"] == ours.tokenizer.decode(ids, skip_special_tokens=True)
    finally:
        server.terminate()
        server.wait()
