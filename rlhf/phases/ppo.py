"""Step 3, PPO: the SFT model learns to give responses that the reward model scores high."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rlhf.algorithms.streams import Shuffle, stream
from rlhf.config.checks import ptx_plan
from rlhf.config.choices import Phase
from rlhf.config.feature_checks import check_ppo
from rlhf.data.collate import collate_prompts
from rlhf.data.corpus import PtxBlocks, ptx_blocks
from rlhf.phases.context import RunContext, peak_memory_gib, rows_of_rank
from rlhf.phases.exporting import exported, exported_critic
from rlhf.phases.policy_evaluation import (
    HeldOutPrompts,
    PolicyEvaluation,
    evaluate_policy,
    write_samples,
)
from rlhf.phases.ppo_trainer import PPOTrainer
from rlhf.phases.ptx import PtxCorpus, corpus_perplexity
from rlhf.phases.rlhf_engine import RLHFEngine
from rlhf.types import PromptBatch

if TYPE_CHECKING:
    from datasets import Dataset


def run_ppo(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save actor and critic; returns the phase's result."""
    started = time.monotonic()
    config = context.config.ppo
    prompts_per_step = config.rollout_batch_size // config.responses_per_prompt
    data = context.tokens(Phase.ppo, batch_size=prompts_per_step, key="ppo.rollout_batch_size")
    steps = num_steps(len(data.train), prompts_per_step, steps=config.steps, epochs=config.epochs)
    config = replace(config, steps=steps)
    check_ppo(config, lora_rank=context.config.lora.rank)  # with the steps that epochs allow
    context = replace(context, config=replace(context.config, ppo=config))
    blocks = corpus_of(context)
    engine = RLHFEngine(context.config, context.ranks)
    trainer = PPOTrainer(engine, config, _corpus(context, blocks))
    loader = PromptLoader(context, data.train)
    held_out = HeldOutPrompts(data.eval, context.part(Phase.ppo).eval)
    evaluation = Evaluation(context, engine, held_out, blocks)
    result = evaluation.result("before")
    write_samples(context, 0, engine.policy, held_out)

    with context.console.progress("ppo", steps) as progress:
        for step in range(1, steps + 1):
            rollout = trainer.generate_experience(loader.batch(step - 1))
            stats = trainer.train_rlhf(rollout)
            context.tracker.log("ppo", step, stats.metrics)
            progress.advance(step, stats.metrics)
            if step % config.sample_every == 0:
                write_samples(context, step, engine.policy, held_out)
            if config.eval_every and step % config.eval_every == 0:
                context.tracker.log("ppo", step, evaluation.metrics())

    result |= evaluation.result("after")
    save_models(context, engine)
    if config.ema_beta:
        with engine.actor.averaged():
            result |= evaluation.result("after_ema")
    engine.close()
    return result | {
        "kl_to_reference": result["kl_after"],
        "steps": steps,
        "seconds": time.monotonic() - started,
        "peak_memory_gib": peak_memory_gib(context.ranks),
    }


def num_steps(
    num_prompts: int, prompts_per_step: int, *, steps: int | None, epochs: float | None
) -> int:
    """Rounds of PPO: what ``steps`` and ``epochs`` (passes over the prompts) both allow."""
    passes = (
        math.inf if epochs is None else max(1, math.ceil(num_prompts * epochs / prompts_per_step))
    )
    return int(min(math.inf if steps is None else steps, passes))


def corpus_of(context: RunContext) -> PtxBlocks | None:
    """Blocks of the corpus, as long as a whole sequence of PPO; None where nobody asks for them."""
    config = context.config
    has_text = config.data.ptx_path is not None
    if not config.ppo.ptx_coef and not (config.ppo.ptx_eval_blocks and has_text):
        return None
    return ptx_blocks(
        config.data,
        context.parts[Phase.sft],
        context.tokenizer,
        block_tokens=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        seed=config.seed,
        learns=config.ppo.ptx_coef > 0,
    )


def _corpus(context: RunContext, blocks: PtxBlocks | None) -> PtxCorpus | None:
    if blocks is None or not context.config.ppo.ptx_coef:
        return None
    return PtxCorpus(blocks, ptx_plan(context.config), seed=context.config.seed)


def save_models(context: RunContext, engine: RLHFEngine) -> None:
    """Write actor, its moving average and critic, those of them that there are."""
    config, folder = context.config, context.run_dir / "ppo"
    export, source = config.lora.export, engine.policy_source
    actor = exported(engine.actor, as_=export, source=source)
    context.save(actor, folder / "actor", what="A language model after PPO.")
    if config.ppo.ema_beta:
        what = "The moving average of a language model during PPO."
        with engine.actor.averaged():
            context.save(actor, folder / "actor_ema", what=what)
    if config.ppo.shared_trunk:
        critic = exported_critic(engine.actor, context.tokenizer)
    elif engine.critic is not None:
        critic = exported(engine.critic, as_=export, source=engine.critic_source)
    else:
        return
    context.save(critic, folder / "critic", what="PPO's critic: one label, read at every position.")


class Evaluation:
    """How good the policy is, at any time, on the same prompts and blocks."""

    def __init__(
        self,
        context: RunContext,
        engine: RLHFEngine,
        prompts: HeldOutPrompts,
        blocks: PtxBlocks | None,
    ) -> None:
        self._context = context
        self._engine = engine
        self._prompts = prompts
        limit = context.config.ppo.ptx_eval_blocks
        self._blocks = blocks.eval[:limit] if blocks is not None else []

    def result(self, when: str) -> dict[str, Any]:
        """Return entries of result.json; their names end in ``when``."""
        result = self._policy().result(when)
        if self._blocks:
            result[f"corpus_perplexity_{when}"] = corpus_perplexity(self._engine, self._blocks)
        return result

    def metrics(self) -> dict[str, float]:
        """Return the same as metrics of a step."""
        return self._policy().metrics()

    def _policy(self) -> PolicyEvaluation:
        return evaluate_policy(
            self._context,
            self._engine.policy,
            self._prompts,
            num_prompts=self._context.config.ppo.eval_prompts,
        )


class PromptLoader:
    """Prompts of each step, with the random numbers that decide their responses.

    Both are drawn for the whole batch and then shared out, so that a response does not depend on
    the number of ranks. The responses of one prompt are neighbours.
    """

    def __init__(self, context: RunContext, examples: Dataset) -> None:
        self._context = context
        self._examples = examples
        self._records = context.parts[Phase.ppo].train
        self._shuffle = Shuffle(len(examples), seed=context.seed("ppo", "shuffle"))

    def batch(self, step: int) -> PromptBatch:
        """This rank's prompts of a step, counted from 0."""
        context, config = self._context, self._context.config
        size, repeats = config.ppo.rollout_batch_size, config.ppo.responses_per_prompt
        draws_BT = torch.rand(
            size,
            config.rollout.max_response_tokens,
            generator=stream(config.seed, "sampling", step),
        )
        drawn = [row for row in self._shuffle.batch(step, size // repeats) for _ in range(repeats)]
        chosen = self._examples[rows_of_rank(drawn, context.ranks)]
        return collate_prompts(
            chosen["ids"],
            [self._records[row].prompt or "" for row in chosen["row"]],
            draws_BT[rows_of_rank(range(size), context.ranks)],
            pad_id=context.tokenizer.pad_token_id,
            device=context.ranks.device,
        )
