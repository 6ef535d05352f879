"""Members of a reward model: each learns as if it were alone, and the ensemble is saved whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rlhf.algorithms.reward import end_loss
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.random_streams import random_stream, seed_for
from rlhf.base.ranks import Ranks
from rlhf.config.choices import Dtype, Phase
from rlhf.config.typed import to_run_config
from rlhf.data.collate import PairStep, divide_pairs_into_steps
from rlhf.data.splits import PhaseData
from rlhf.engine.settings import EngineSettings, OptimizerSettings
from rlhf.kernels.cpu import cpu_layers
from rlhf.models.build import build_scorer
from rlhf.models.sources import ModelSource
from rlhf.models.tokenizers import train_tokenizer
from rlhf.phases.reward import RewardTrainer, run_reward
from rlhf.phases.reward import build_trainer as build_reward_trainer
from rlhf.phases.shared.context import RunContext, phase_tokens
from rlhf.phases.shared.step_signals import StoppedError, StopRequests
from rlhf.run.console import Console
from rlhf.run.phase_state import checkpoint_folders, load_checkpoint
from rlhf_lab.ensembles import CombineName
from rlhf_lab.ensembles.members import Combination, Ensemble, load_ensemble
from rlhf_lab.ensembles.trainer import EnsembleTrainer
from tests.conftest import Compose
from tests.phases.run_pieces import EVAL, TRAIN, Notes

MakeContext = Callable[..., RunContext]

SHAPE = "model.architecture={model_type:gpt_neox,hidden_size:8,intermediate_size:16,"
SHAPE += "num_hidden_layers:4,num_attention_heads:2}"
KEYS = ["phase=reward", "model.vocab_size=300", "data.template=plain", "hardware.dtype=fp32"]
KEYS += ["reward.batch_size=6", "reward.micro_batch_size=3", "reward.epochs=2", "reward.loss=end"]
KEYS += ["reward.lr=0.01", "reward.max_grad_norm=0.1", "reward.warmup_steps=1"]
KEYS += ["reward.adam_eps=1e-3"]  # Adam would blow up the rounding of gradients that are 0
NAMES = {  # of a member, and of a whole model
    "branch.blocks.0": "gpt_neox.layers.3",
    "branch.tail.0": "gpt_neox.final_layer_norm",
    "head": "score",
}
PROMPT = "\n\nHuman: one\n\nAssistant:"


@pytest.fixture
def make_context(compose: Compose, tmp_path: Path) -> MakeContext:
    """The context of a run of the reward phase on one rank, with engines of torch."""

    def make(*overrides: str, shape: str = SHAPE) -> RunContext:
        config = to_run_config(compose([*KEYS, shape, *overrides]))
        config.data.cache_dir = str(tmp_path / "cache")
        texts = [text for record in TRAIN for text in record if text]
        return RunContext(
            config=config,
            run_dir=tmp_path,
            ranks=Ranks(),
            settings=EngineSettings(zero=config.zero, dtype=Dtype.fp32),
            tokenizer=train_tokenizer(texts, vocab_size=300),
            parts={Phase.reward: PhaseData(TRAIN, EVAL)},
            judge=None,
            console=Console(quiet=True),
            tracker=Notes(),
        )

    return make


def steps_of(context: RunContext, *, further: bool) -> list[PairStep]:
    config = context.config.reward
    groups = phase_tokens(context, Phase.reward).train["group"][:]
    names = ("members", "shuffle") if further else ("shuffle",)
    epochs = config.member_epochs if further else config.epochs
    seed = seed_for(context.config.seed, "reward", *names)
    return divide_pairs_into_steps(groups, batch_size=config.batch_size, epochs=epochs, seed=seed)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def train_alone(
    context: RunContext, state: dict[str, Tensor], pair_weights_N: Tensor, *, trained: set[str]
) -> dict[str, Tensor]:
    """Train one whole model, row by row, from ``state``; only the weights ``trained`` learn."""
    data = phase_tokens(context, Phase.reward).train
    config = context.config.reward
    source = ModelSource.from_config(context.config.model, key="model")
    scorer = build_scorer(source, context.tokenizer, seed=1)
    scorer.pretrained.load_state_dict(state, strict=False)
    steps = steps_of(context, further=True)
    schedule = OptimizerSettings.from_config(config, total_steps=len(steps)).schedule
    for name, weight in scorer.pretrained.named_parameters():
        weight.requires_grad_(name in trained)
    learning = [weight for weight in scorer.parameters() if weight.requires_grad]
    groups = [
        {"params": [w for w in learning if w.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [w for w in learning if w.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    for count, step in enumerate(steps):
        for row, weight in zip(step.rows, step.weights, strict=True):
            pair = data[row]
            better, worse = (
                scorer(torch.tensor([pair[side]]))[0, -1] for side in ("chosen_ids", "rejected_ids")
            )
            loss = weight * pair_weights_N[row] * end_loss(better, worse) / step.num_prompts
            loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = schedule(count) * group["initial_lr"]
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(scorer.pretrained)


def build_trainer(context: RunContext) -> EnsembleTrainer:
    trainer = build_reward_trainer(context, phase_tokens(context, Phase.reward).train)
    assert isinstance(trainer, EnsembleTrainer)
    return trainer


def take_steps(trainer: RewardTrainer, context: RunContext, *, further: bool) -> None:
    data = phase_tokens(context, Phase.reward).train
    before = len(steps_of(context, further=False)) if further else 0
    for number, step in enumerate(steps_of(context, further=further), start=before + 1):
        rows, num_prompts = data[step.rows], step.num_prompts
        trainer.train_step(number, step.rows, rows, step.weights, num_prompts=num_prompts)


def train_together(context: RunContext) -> EnsembleTrainer:
    trainer = build_trainer(context)
    take_steps(trainer, context, further=False)
    take_steps(trainer, context, further=True)
    return trainer


def member_weights(trainer: RewardTrainer, number: int) -> dict[str, Tensor]:
    """The member's own weights, under the names that they have in a whole model."""
    if number == 0:
        return weights_of(trainer.engines["model"].module.pretrained)
    own = weights_of(trainer.engines[f"member_{number}"].module)
    for old, new in NAMES.items():
        own = {name.replace(old, new): weight for name, weight in own.items()}
    return own


def test_each_member_learns_as_if_it_were_alone(make_context: MakeContext) -> None:
    """The first like a single model, bit for bit."""
    single = make_context()
    alone = build_reward_trainer(single, phase_tokens(single, Phase.reward).train)
    take_steps(alone, single, further=False)
    context = make_context("reward.members=3")
    num_pairs = len(phase_tokens(context, Phase.reward).train)
    trainer = build_trainer(context)
    take_steps(trainer, context, further=False)
    trainer.start_members()
    first = member_weights(trainer, 0)
    assert all(first[name].equal(weight) for name, weight in member_weights(alone, 0).items())
    starts = [member_weights(trainer, number) for number in (1, 2)]
    take_steps(trainer, context, further=True)

    for number, start in enumerate(starts, start=1):
        draws = random_stream(context.config.seed, "reward", "weights", number)
        pair_weights_N = torch.empty(num_pairs).exponential_(generator=draws)
        expected = train_alone(context, first | start, pair_weights_N, trained=set(start))
        for name, weight in member_weights(trainer, number).items():
            torch.testing.assert_close(weight, expected[name], atol=2e-5, rtol=1e-4)
            if name.endswith("weight"):
                assert not weight.equal(start[name]), "nothing was learned"
    assert all(weight.equal(first[name]) for name, weight in member_weights(trainer, 0).items())
    assert not starts[0]["score.weight"].equal(starts[1]["score.weight"])
    up = "gpt_neox.layers.3.mlp.dense_h_to_4h.weight"
    assert not starts[0][up].equal(first[up]), "members start from the model before the phase"


def saved_ensemble(context: RunContext, combine: Combination) -> nn.Module:
    folder = context.run_dir / "reward" / "model"
    source = ModelSource(key="model", path=str(folder))
    return load_ensemble(build_scorer(source, context.tokenizer, seed=1), source, combine).eval()


def test_the_saved_ensemble_scores_as_the_trained_one(make_context: MakeContext) -> None:
    """The mean held-out score of each member is 0."""
    context = make_context("reward.members=3")
    ids_BS = torch.tensor(context.tokenizer([f"{PROMPT} kiwi and plum"])["input_ids"])
    result = run_reward(context)
    assert set(result["member_accuracies"]) == {"member 1", "member 2", "member 3"}

    ensemble = saved_ensemble(context, Combination(3, CombineName.mean))
    assert isinstance(ensemble, Ensemble)
    values_BSM = ensemble.member_values(ids_BS)
    again = train_together(context)
    again.close()
    folder = ModelSource(key="model", path=str(context.run_dir / "reward" / "model"))
    for number in range(3):
        alone = build_scorer(folder, context.tokenizer, seed=1).eval()
        alone.pretrained.load_state_dict(member_weights(again, number), strict=False)
        values_BS = alone(ids_BS) - ensemble.offsets_M[number]
        torch.testing.assert_close(values_BSM[..., number], values_BS, atol=1e-5, rtol=1e-4)
    ends = [
        ensemble.member_values(torch.tensor([row[side]]))[0, -1]
        for row in phase_tokens(context, Phase.reward).eval
        for side in ("chosen_ids", "rejected_ids")
    ]
    torch.testing.assert_close(torch.stack(ends).mean(dim=0), torch.zeros(3), atol=1e-5, rtol=0)
    with pytest.raises(CheckpointError, match=r"holds 3 reward models.* asks for 1; set reward\.m"):
        saved_ensemble(context, Combination())


def test_warm_saves_the_mean_of_the_members_weights(make_context: MakeContext) -> None:
    context = make_context("reward.members=3", "reward.combine=warm")
    run_reward(context)
    scorer = saved_ensemble(context, Combination())
    trainer = train_together(context)
    members = [member_weights(trainer, number) for number in range(3)]
    saved = weights_of(scorer.pretrained)
    for name in members[1]:
        mean = torch.stack([own[name] for own in members]).mean(dim=0)
        torch.testing.assert_close(saved[name], mean, atol=1e-6, rtol=1e-5)
        if name.endswith("weight"):
            assert not members[0][name].equal(members[1][name])
    assert not (context.run_dir / "reward" / "model" / "members.safetensors").exists()


def test_members_share_at_least_one_layer(make_context: MakeContext) -> None:
    context = make_context("reward.members=2", "reward.member_layers=4")
    with pytest.raises(
        ConfigError, match=r"member_layers=4: the reward model has 4 layers.*most 3"
    ):
        build_trainer(context)


class StopAfter(StopRequests):
    """Asks for the end of the run after ``steps`` more steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    @property
    def wants_stop(self) -> bool:
        self.left -= 1
        return self.left < 0

    @wants_stop.setter
    def wants_stop(self, value: bool) -> None: ...


def test_a_resumed_ensemble_is_the_same_bit_for_bit(
    make_context: MakeContext, tmp_path: Path
) -> None:
    keys = ("reward.members=3", "reward.member_epochs=1.5", "checkpoint.every_steps=1")
    result = run_reward(make_context(*keys))
    files = sorted((tmp_path / "reward" / "model").glob("*.safetensors"))
    expected = [load_file(file) for file in files]
    assert len(files) == 2
    for stopped_after in (4, 5):  # the first member takes 4 of 7 steps
        stopped = replace(make_context(*keys), requests=StopAfter(stopped_after - 1))
        with pytest.raises(StoppedError, match=f"step {stopped_after}"):
            run_reward(stopped)
        (folder,) = checkpoint_folders(tmp_path / "reward")
        again = replace(make_context(*keys), resumes={Phase.reward: load_checkpoint(folder)})
        resumed = run_reward(again)
        for file, weights in zip(files, expected, strict=True):
            found = load_file(file)
            assert set(found) == set(weights)
            assert all(found[name].equal(weight) for name, weight in weights.items()), file.name
        for name in ("accuracy", "calibration_error", "member_accuracies", "steps"):
            assert resumed[name] == result[name]


def test_five_members_cost_less_than_twice_one_at_tiny(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the products of a whole phase, counted, and in weights and optimizer states."""
    monkeypatch.setattr(cpu_layers, "has_slow_mkl", lambda: False)  # oneDNN's are not counted
    context = make_context("reward.members=5", "reward.epochs=1", shape="model=tiny")
    trainer = build_trainer(context)
    single_bytes = trainer.engines["model"].training_state.total_bytes
    data = phase_tokens(context, Phase.reward).train
    step, flops = steps_of(context, further=False)[0], []
    for further in (False, True):
        if further:
            trainer.start_members()
        with FlopCounterMode(display=False) as counter:
            rows = data[step.rows]
            trainer.train_step(1, step.rows, rows, step.weights, num_prompts=step.num_prompts)
        flops.append(counter.get_total_flops())
    config = context.config.reward
    work = (config.epochs * flops[0] + config.member_epochs * flops[1]) / flops[0]
    states = (
        sum(engine.training_state.total_bytes for engine in trainer.engines.values()) / single_bytes
    )
    print(f"five members: {work:.2f} times the products, {states:.2f} times the states of one")
    assert 1 < work < 2
    assert 1 < states < 2
