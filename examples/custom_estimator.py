"""PPO with an advantage estimator of your own: python examples/custom_estimator.py.

    python -m rlhf_lab.gradients --own examples.custom_estimator:MedianBaseline experiment=rloo

prints its bias.

The estimator compares each response with the median of the responses to its prompt: one lucky
response does not lower the advantages of all others, as it does with the mean that RLOO uses.
"""

from dataclasses import replace

from rlhf import PPOTrainer, RLHFEngine, load_run
from rlhf.algorithms.advantages import Advantages
from rlhf.base.types import Rollout
from rlhf.config.choices import AdvantageEstimator
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.targets import (
    TargetMaker,
    Targets,
    TargetSteps,
    estimate_advantages,
    replace_step,
)

RESPONSES = 4


def compare_with_median(_: TargetMaker, targets: Targets, rollout: Rollout) -> Targets:
    """Give all tokens of a response its total reward, minus the median of its group."""
    totals_GK = targets.scaled_rewards_BT.sum(dim=1).view(-1, targets.compared)
    advantages_GK = totals_GK - totals_GK.median(dim=1, keepdim=True).values
    advantages_BT = advantages_GK.reshape(-1, 1) * rollout.responses.keep_BT
    raw = Advantages(advantages_BT, returns_BT=advantages_BT)  # no critic learns the returns
    return targets._replace(raw=raw)


class MedianBaseline(PpoHook):
    """A hook that puts the median into the place of the estimator."""

    def change_target_steps(self, steps: TargetSteps) -> TargetSteps:
        """Return the steps from scores to advantages."""
        return replace_step(steps, estimate_advantages, compare_with_median)


def main() -> None:
    """Train one step of RLOO, with other baselines, on the models of the last run."""
    config = load_run("runs/latest")
    # An estimator without a critic, and several responses to each prompt.
    rloo = replace(
        config.ppo, advantage_estimator=AdvantageEstimator.rloo, responses_per_prompt=RESPONSES
    )
    engine = RLHFEngine(replace(config, ppo=rloo))
    trainer = PPOTrainer(engine, rloo, [MedianBaseline(engine.config)])
    prompts = ["\n\nHuman: Name a fruit.\n\nAssistant:"] * (rloo.rollout_batch_size // RESPONSES)
    rollout = trainer.generate_experience(engine.prompts(prompts))
    print("scores of the first group:", rollout.scores_B[:RESPONSES])
    targets = trainer.target_maker.make(rollout, kl_ctl=0.0)
    print("their advantages:", targets.raw.advantages_BT[:RESPONSES, 0])
    print("actor loss:", trainer.train_rlhf(rollout).actor_loss)
    engine.close()


if __name__ == "__main__":
    main()
