"""PPO with an advantage estimator of your own: python examples/custom_estimator.py.

    python -m rlhf_lab.gradients --own examples.custom_estimator:MedianBaseline experiment=rloo

prints its bias.

The estimator compares each response with the median of the responses to its prompt: one lucky
response does not lower the advantages of all others, as it does with the mean that RLOO uses.
"""

from dataclasses import replace

from torch import Tensor

from rlhf import PPOTrainer, RLHFEngine, load_run
from rlhf.algorithms.advantages import Advantages
from rlhf.base.types import Rollout
from rlhf.config.choices import AdvantageEstimator
from rlhf.phases.ppo.targets import TargetMaker

RESPONSES = 4


class MedianBaseline(TargetMaker):
    """Targets whose advantage is the total reward minus the median of its group."""

    def advantages(self, rewards_BT: Tensor, rollout: Rollout) -> Advantages:
        """Return the same advantage for all tokens of a response."""
        keep_BT = rollout.responses.keep_BT
        totals_GK = rewards_BT.sum(dim=1).view(-1, RESPONSES)
        advantages_GK = totals_GK - totals_GK.median(dim=1, keepdim=True).values
        advantages_BT = advantages_GK.reshape(-1, 1) * keep_BT
        return Advantages(advantages_BT, returns_BT=advantages_BT)  # no critic learns the returns


def main() -> None:
    """Train one step of RLOO, with other baselines, on the models of the last run."""
    config = load_run("runs/latest")
    # An estimator without a critic, and several responses to each prompt.
    rloo = replace(
        config.ppo, advantage_estimator=AdvantageEstimator.rloo, responses_per_prompt=RESPONSES
    )
    engine = RLHFEngine(replace(config, ppo=rloo))
    trainer = PPOTrainer(engine, rloo)
    trainer.target_maker = MedianBaseline(rloo, engine.ranks)
    prompts = ["\n\nHuman: Name a fruit.\n\nAssistant:"] * (rloo.rollout_batch_size // RESPONSES)
    rollout = trainer.generate_experience(engine.prompts(prompts))
    print("scores of the first group:", rollout.scores_B[:RESPONSES])
    targets = trainer.target_maker.make(rollout, kl_ctl=0.0)
    print("their advantages:", targets.raw.advantages_BT[:RESPONSES, 0])
    print("actor loss:", trainer.train_rlhf(rollout).actor_loss)
    engine.close()


if __name__ == "__main__":
    main()
