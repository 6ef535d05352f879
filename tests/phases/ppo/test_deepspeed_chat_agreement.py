"""A whole step of PPOTrainer under ``ppo=deepspeed_chat`` is DeepSpeed-Chat's arithmetic.

The models' logits and values are read row by row, without padding, and go through the loops of
``deepspeed_chat_loops``; the trainer sees left-padded prompts and responses of unequal length.
"""

import copy
from collections.abc import Callable
from itertools import chain
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf.base.types import PromptBatch, Responses
from rlhf.config.freeze import to_run_config
from rlhf.data.collate import collate_prompts
from rlhf.options.ptx.corpus import PtxBlocks
from rlhf.options.ptx.hooks import CorpusHook, PtxCorpus
from rlhf.phases.ppo.loop import PPOTrainer
from tests.algorithms import deepspeed_chat_loops as seeds
from tests.algorithms.loop_reference import Row, Rows, policy_loss, value_loss
from tests.algorithms.padded_batches import keep_of
from tests.conftest import Compose
from tests.phases.ppo.ppo_pieces import PARTS, ROWS, TOKENIZER, separate_engine
from tests.plain_engine import TrainingEngine

P, T = 4, 5
PROMPTS, LENGTHS = [2, 4, 3, 1], [3, 5, 5, 2]
END = TOKENIZER.eos_token_id
ENDED = [True, False, True, True]
TOLERANCE = 1e-6


def moved(module: nn.Module, *, by: float) -> nn.Module:
    """A copy in fp64 with noise of this deviation on its weights."""
    generator = torch.Generator().manual_seed(0)
    copied = copy.deepcopy(module).double()
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=generator))
    return copied


class Run:
    """Four models in fp64, fixed prompts and responses, and a trainer over them."""

    def __init__(self, compose: Compose, *, ended: list[bool], ptx_coef: float = 0.0) -> None:
        engine = separate_engine(ptx_parts=PARTS if ptx_coef else 0, temperature=1.0)
        self.models = models = engine.models
        models.reference.module = copy.deepcopy(models.actor.module)
        models.scores.model.module = copy.deepcopy(models.critic.module)
        noise = {models.reference: 0.05, models.scores.model: 0.02}
        for each in (models.actor, models.critic, *noise):
            each.module = moved(each.module, by=noise.get(each, 0.0))
        models.scores.model.module.pretrained.score.weight.data *= 5  # beyond the clip of scores
        self.prompts, self.responses = sequences(ended)
        engine.rollout = SimpleNamespace(generate=lambda *_: self.responses)
        overrides = ["ppo=deepspeed_chat", f"ppo.ptx_coef={ptx_coef}"]
        config = to_run_config(compose(overrides))
        corpus = PtxCorpus(PtxBlocks(BLOCKS, []), engine.plan, seed=1) if ptx_coef else None
        self.trainer = PPOTrainer(engine, config.ppo, [CorpusHook(config, corpus)])
        self.rollout = self.trainer.generate_experience(self.prompts)

    def learn(self) -> dict[str, float]:
        """Metrics of one update of models that have moved since the rollout was made."""
        for engine in (self.models.actor, self.models.critic):
            engine.module = moved(engine.module, by=0.02)
        return self.trainer.train_rlhf(self.rollout).metrics


BLOCKS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]] * 2


def sequences(ended: list[bool]) -> tuple[PromptBatch, Responses]:
    """Prompts and responses of random words; a response that ended has the end token last."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 258, (n,), generator=generator).tolist() for n in PROMPTS]
    pad_id = TOKENIZER.pad_token_id
    prompts = collate_prompts(
        ids, list("abcd"), torch.zeros(ROWS, T), pad_id=pad_id, device=torch.device("cpu")
    )
    lengths = [n if has_end else T for n, has_end in zip(LENGTHS, ended, strict=True)]
    keep_BT = keep_of(lengths, T)
    ids_BT = torch.randint(5, 258, (ROWS, T), generator=generator).masked_fill(~keep_BT, pad_id)
    for row, (length, has_end) in enumerate(zip(lengths, ended, strict=True)):
        if has_end:
            ids_BT[row, length - 1] = END
    return prompts, Responses(ids_BT, keep_BT, torch.tensor(ended))


class Reading:
    """What the models say of each sequence alone, spread over DeepSpeed-Chat's columns."""

    def __init__(self, run: Run) -> None:
        ids_BS = torch.cat([run.prompts.ids_BP, run.responses.ids_BT], dim=1)
        attend_BS = torch.cat([run.prompts.attend_BP, run.responses.keep_BT], dim=1)
        self.ids = ids_BS.masked_fill(~attend_BS, END).tolist()  # its padding is the end token
        self._alone = [row[keep][None] for row, keep in zip(ids_BS, attend_BS, strict=True)]
        self._left = [P - n for n in PROMPTS]

    def logprobs(self, model: nn.Module) -> Rows:
        """Log-probability of every token but the first; 0 on padding."""
        with torch.no_grad():
            rows = [
                (model.pretrained(ids).logits[0].tolist(), ids[0].tolist()) for ids in self._alone
            ]
        return [
            self._spread(row, seeds.gather_log_probs([logits], [ids])[0])
            for row, (logits, ids) in enumerate(rows)
        ]

    def values(self, scorer: nn.Module) -> Rows:
        """Values before every token but the first; 0 on padding."""
        return [self._spread(row, x[:-1]) for row, x in enumerate(self._all_values(scorer))]

    def scores(self, scorer: nn.Module) -> Row:
        """Values at the last tokens."""
        return [x[-1] for x in self._all_values(scorer)]

    def _all_values(self, scorer: nn.Module) -> Rows:
        with torch.no_grad():
            return [scorer(ids)[0].tolist() for ids in self._alone]

    def _spread(self, row: int, x: Row) -> Row:
        left = self._left[row]
        return [0.0] * left + x + [0.0] * (P + T - 1 - left - len(x))


def responses_of(rows: Rows) -> Rows:
    """The response actions of rows of all actions."""
    return [row[P - 1 :] for row in rows]


@pytest.mark.parametrize("ended", [ENDED, [False] * ROWS])
def test_a_step_is_that_of_deepspeed_chat(compose: Compose, ended: list[bool]) -> None:
    run = Run(compose, ended=ended)
    reading, models = Reading(run), run.models
    experience = seeds.Experience(
        reading.ids,
        P,
        END,
        reading.logprobs(models.actor.module),
        reading.logprobs(models.reference.module),
        reading.values(models.critic.module),
        reading.scores(models.scores.model.module),
    )
    assert max(map(abs, experience.scores)) > seeds.CLIP_REWARD > min(map(abs, experience.scores))
    targets = seeds.targets(experience)
    mask = [row[P - 1 :] for row in experience.action_mask()]
    keep = run.responses.keep_BT.long().tolist()
    # The end token is the one that its mask leaves out, here the padding being the end token too.
    missing = sum(map(sum, keep)) - sum(map(sum, mask))
    assert missing == sum(ended)

    metrics = run.learn()
    new = responses_of(reading.logprobs(models.actor.module))
    new_values = responses_of(reading.values(models.critic.module))
    old, old_values = responses_of(experience.logprobs), responses_of(experience.values)
    expected = {
        "ppo/actor_loss": actor_loss_of(new, old, targets.advantages, keep=keep),
        "ppo/critic_loss": critic_loss_of(new_values, old_values, targets.returns, keep=keep),
        "ppo/reward_mean": sum(sum(row) for row in responses_of(targets.rewards)) / ROWS,
        "ppo/score_mean": sum(experience.scores) / ROWS,
        "ppo/advantages_mean": fmean(chain(*kept(targets.advantages, keep))),
        "ppo/returns_mean": fmean(chain(*kept(targets.returns, keep))),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=TOLERANCE)
    assert metrics["ppo/ratio_max"] > 1.01
    if not missing:
        assert mask == keep

    def actor_loss() -> float:
        logprobs = responses_of(reading.logprobs(models.actor.module))
        return actor_loss_of(logprobs, old, targets.advantages, keep=keep)

    def critic_loss() -> float:
        values = responses_of(reading.values(models.critic.module))
        return critic_loss_of(values, old_values, targets.returns, keep=keep)

    for loss, engine in ((actor_loss, models.actor), (critic_loss, models.critic)):
        norm, slope = along_the_gradient(loss, engine)
        assert norm == pytest.approx(slope, rel=1e-4)


def along_the_gradient(loss: Callable[[], float], engine: TrainingEngine) -> tuple[float, float]:
    """Norm of an engine's gradient, and how fast ``loss`` grows along it; they should be equal.

    Norms and softmax of the models are in fp32, whose rounding moves the losses by some 1e-9: at a
    step of 1e-5 that is up to 2e-4 of the slope, at this step 1e-5.
    """
    (gradients,) = engine.gradients
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    step, sides = 3e-4, []
    for sign in (+1, -1):
        for name, gradient in gradients.items():
            engine.module.get_parameter(name).data.add_(gradient, alpha=sign * step / norm)
        sides.append(loss())
        for name, gradient in gradients.items():
            engine.module.get_parameter(name).data.sub_(gradient, alpha=sign * step / norm)
    return norm, (sides[0] - sides[1]) / (2 * step)


def kept(rows: Rows, keep: seeds.Mask) -> Rows:
    """The kept tokens of each row."""
    pairs = (zip(*row, strict=True) for row in zip(rows, keep, strict=True))
    return [[x for x, counts in pair if counts] for pair in pairs]


def actor_loss_of(*rows: Rows, keep: seeds.Mask) -> float:
    return policy_loss(*(kept(each, keep) for each in rows), cliprange=seeds.CLIPRANGE).mean


def critic_loss_of(*rows: Rows, keep: seeds.Mask) -> float:
    return value_loss(*(kept(each, keep) for each in rows), cliprange=seeds.CLIPRANGE_VALUE).mean


def test_the_ptx_mix_adds_its_coefficient_times_the_mean_loss(compose: Compose) -> None:
    """In one optimiser step, as DeepSpeed-Chat has it with its accumulation doubled."""
    plain, mixed = (Run(compose, ended=ENDED, ptx_coef=coefficient) for coefficient in (0.0, 27.8))
    plain.learn()
    metrics = mixed.learn()
    actor = mixed.models.actor.module
    ids_BS = torch.tensor(BLOCKS)
    logits_BSV = actor.pretrained(ids_BS).logits
    expected = seeds.lm_loss(logits_BSV.tolist(), BLOCKS)
    assert metrics["ppo/ptx_loss"] == pytest.approx(expected, abs=TOLERANCE)
    loss = nn.functional.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten())
    extra = torch.autograd.grad(27.8 * loss, list(actor.parameters()))
    alone, both = (run.models.actor.gradients[0] for run in (plain, mixed))
    for (name, _), added in zip(actor.named_parameters(), extra, strict=True):
        torch.testing.assert_close(both[name], alone[name] + added, atol=1e-5, rtol=1e-5)
