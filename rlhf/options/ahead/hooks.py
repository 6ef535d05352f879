"""The hook with which PPO samples responses rollout.lag steps before it trains on them."""

from __future__ import annotations

from rlhf.base.types import StatefulWithTensors
from rlhf.config.choices import When
from rlhf.options.ahead.ahead import AfterSampling, SamplingAhead, SamplingInTurn, StepSampler
from rlhf.options.ahead.overlapped_sampling import SamplingProcesses
from rlhf.phases.ppo.hooks import PpoHook
from rlhf.phases.ppo.loop import PPOTrainer
from rlhf.phases.ppo.prompts import PromptLoader
from rlhf.phases.shared.backends import samples_on_server


class AheadHook(PpoHook):
    """A hook that replaces the engine's backend by a backend that samples later steps early."""

    samples_older_policy = True
    _processes: SamplingProcesses | None = None

    @property
    def logprob_reuse_mode_for_auto(self) -> When | None:
        """Return ``When.always``: PPO's ratio must compare with the policy that sampled."""
        return When.always

    def prepare(self, trainer: PPOTrainer, loader: PromptLoader) -> dict[str, StatefulWithTensors]:
        """Replace the engine's backend; return the pending responses, which checkpoints store."""
        rollout, engine, context = self.config.rollout, trainer.engine, loader.context
        assert self.config.ppo.steps is not None
        sampler: StepSampler = SamplingInTurn(engine.rollout)
        if rollout.overlap:
            sampler = self._processes = SamplingProcesses(context, loader)
        engine.rollout = ahead = SamplingAhead(
            sampler,
            lambda step: loader.own_prompts(step - 1),
            lag=rollout.lag,
            steps=self.config.ppo.steps,
            pad_id=context.tokenizer.pad_token_id,
            ranks=context.ranks,
        )
        if rollout.overlap and samples_on_server(self.config):
            engine.policy = engine.policy._replace(
                sampling=AfterSampling(engine.policy.sampling, ahead),
                greedy=AfterSampling(engine.policy.greedy, ahead),
            )
        return {"pending": ahead}

    def close(self) -> None:
        """End the sampling processes."""
        if self._processes is not None:
            self._processes.close()
