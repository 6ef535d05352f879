"""Step 2 of InstructGPT, the reward model: it learns to score preferred responses higher."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf.config.choices import Phase
from rlhf.data.encoding import Encoder
from rlhf.data.pair_numbers import read_pair_groups
from rlhf.data.records import Record
from rlhf.data.tokens import Limit, pair_columns
from rlhf.phases.reward_evaluation import RewardEvaluation
from rlhf.phases.reward_trainer import RewardTrainer, build_trainer
from rlhf.phases.shared.checkpoints import Checkpoints
from rlhf.phases.shared.context import RunContext, reward_pairs
from rlhf.phases.shared.exporting import save_trained_model
from rlhf.phases.shared.supervised import run_supervised, share_of_this_rank

if TYPE_CHECKING:
    from datasets import Dataset


def run_reward(context: RunContext) -> dict[str, Any]:
    """Train, evaluate and save the reward model; return the phase's entries of result.json."""
    config = context.config.reward
    groups = read_pair_groups(config.groups_path)
    train, held_out = reward_pairs(context)
    lengths = train["length"][:]
    trainer = build_trainer(context, train)
    checkpoints = Checkpoints(context, Phase.reward, trainer.engines)
    if config.eval_every and not checkpoints.is_resumed:
        checkpoints.log_held_out(trainer.evaluate(held_out).metrics())

    def train_step(number: int) -> dict[str, float]:
        step = trainer.steps[number - 1]
        mine = share_of_this_rank(
            context,
            list(zip(step.rows, step.weights, strict=True)),
            [lengths[row] for row in step.rows],
            micro=trainer.plan.micro,
        )
        pairs, weights = zip(*mine, strict=True)
        rows = train[list(pairs)]
        return trainer.train_step(number, pairs, rows, weights, num_prompts=step.num_prompts)

    run_supervised(
        context,
        checkpoints,
        config,
        total_steps=len(trainer.steps),
        train_step=train_step,
        evaluate=lambda: trainer.evaluate(held_out).metrics(),
    )
    after = trainer.evaluate(held_out)
    measured = _judge_and_group_results(context, trainer, held_out, groups)
    minimal = measured.get("minimal_pairs", {})
    shares = {f"reward/eval_{kind}": share for kind, share in minimal.items()}
    checkpoints.log_held_out(after.metrics(), shares)
    save_reward_model(context, trainer, after)
    trainer.close()
    took = {"steps": checkpoints.step, "seconds": checkpoints.elapsed_seconds}
    return measured | trainer.results(after) | took


def _judge_and_group_results(
    context: RunContext,
    trainer: RewardTrainer,
    held_out: Dataset,
    groups: Mapping[str, list[Record]],
) -> dict[str, Any]:
    """Return results from the judge, if the run has one, and the accuracy on each of ``groups``.

    ``best_possible_accuracy`` is the expected accuracy on the held-out pairs if every response is
    scored with its gold score. ``minimal_pairs`` is, for each kind of flaw, the share of right
    responses that score above a copy with only this flaw. Unlike these pairs, held-out pairs often
    differ in several flaws.
    """

    def measure_accuracies(pairs: Mapping[str, list[Record]]) -> dict[str, float]:
        encoded = {name: _tokenise_pairs(context, each) for name, each in pairs.items()}
        return {name: trainer.evaluate(each).accuracy.value() for name, each in encoded.items()}

    found: dict[str, Any] = {}
    if (judge := context.judge) is not None:
        config, eval_records = context.config, context.parts[Phase.reward].eval
        rows = dict.fromkeys(held_out["row"][: config.reward.eval_examples])
        records = [eval_records[row] for row in rows]
        pairs: defaultdict[str, list[Record]] = defaultdict(list)
        for record in records:
            assert record.prompt is not None
            made = judge.minimal_pairs(record.prompt, seed=config.seed)
            for kind, (right, flawed) in made.items():
                pairs[kind].append(Record(prompt=record.prompt, chosen=right, rejected=flawed))
        found["best_possible_accuracy"] = judge.expected_gold_accuracy(records)
        found["minimal_pairs"] = measure_accuracies(pairs)
        if config.reward.unpaired is not None:
            found["pair_accuracy"] = measure_accuracies({"pairs": records})["pairs"]
    return found | ({"groups": measure_accuracies(groups)} if groups else {})


def save_reward_model(context: RunContext, trainer: RewardTrainer, after: RewardEvaluation) -> None:
    """Write the reward model, with further files if an option trained further models."""
    with trainer.swap_in_final_weights():
        save_trained_model(
            context,
            trainer.engines["model"],
            context.run_dir / "reward" / "model",
            source=trainer.source,
            what="A reward model: one label, read at the end token.",
            answers=False,
            write_more=trainer.build_extra_writer(after),
        )


def _tokenise_pairs(context: RunContext, pairs: Sequence[Record]) -> Dataset:
    """Return pairs as token ids; skip pairs with a sequence that is too long."""
    from datasets import Dataset

    config = context.config
    encoder = Encoder(context.tokenizer, config.data.template)
    limit = Limit("reward.max_tokens", config.reward.max_tokens)
    columns, _ = pair_columns(list(enumerate(pairs)), encoder, limit)
    return Dataset.from_dict(columns)
