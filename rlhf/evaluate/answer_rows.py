"""Answer held-out prompts with the policies of a run, and measure each answer.

Shapes: B = sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.base.command import quieten_libraries
from rlhf.base.errors import CheckpointError, ConfigError
from rlhf.base.stored_files import RESULT
from rlhf.config.batches import BatchPlan, batch_plans
from rlhf.config.choices import ModelInit, Phase, RewardKind, Source
from rlhf.config.consent import require_consent
from rlhf.config.freeze import load_run, read_frozen_keys
from rlhf.config.roles import Role, has_reward_model, reward_model_base
from rlhf.config.schema.run import RunConfig
from rlhf.data.splits import phase_of_dpo_prompts
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.data.tokens import tokenizer_identity
from rlhf.engine.devices import best_device
from rlhf.engine.select import AnyEngine, build_engine
from rlhf.engine.zero3_partition import build_parameter_placer
from rlhf.export import build_run_context
from rlhf.models.build import build_actor, build_scorer, complete_reward_model
from rlhf.models.language_model import LanguageModel
from rlhf.models.sources import RUN_FOLDER, ModelSource
from rlhf.models.tokenizers import load_tokenizer
from rlhf.options.environments.keys import SUCCESS
from rlhf.phases.ppo.models import SeparateModels
from rlhf.phases.ppo.reward_mix import build_reward_mix
from rlhf.phases.shared.backends import RolloutBackends
from rlhf.phases.shared.context import RunContext
from rlhf.phases.shared.policies import policy_source
from rlhf.phases.shared.policy_evaluation import (
    AnsweringPolicy,
    HeldOutPrompts,
    answer_prompts,
    describe_answers,
    measure_answers,
)
from rlhf.phases.shared.scoring import JudgeScores, ModelScores, zero_scores
from rlhf.run.finished_phase import verify_model
from rlhf.run.policies import POLICIES, TRAINED
from rlhf.runtime.run_data import load_phase_data

PLAN_WITHOUT_PPO = BatchPlan(per_rank=16, micro=16, accumulation=1)
# Kinds of rewards that score a right answer 1 and any other answer 0.
RIGHT_OR_WRONG = (RewardKind.exact, RewardKind.number, RewardKind.json, RewardKind.pattern)

AnswerRow = dict[str, Any]


class Decoding(NamedTuple):
    """A way to choose tokens: greedily, or by sampling at a temperature."""

    name: str
    temperature: float
    greedy: bool = False


class Evaluator:
    """The reference model, reward model and rules of a run, loaded once to score all its policies.

    The models run on a GPU if torch finds one.
    """

    def __init__(self, run_dir: Path, *, trusts_run: bool = False) -> None:
        """Load the run's configuration, tokenizer, reference model, reward model and rules.

        Raises:
            CheckpointError: if the run has not finished, or its models are missing or damaged.
            ConfigError: if the run needs consent (rlhf/config/consent.py), and ``trusts_run`` is
                False.
        """
        quieten_libraries()
        config = load_run(run_dir)
        require_consent(run_dir, is_given=trusts_run)
        if not (run_dir / RESULT).is_file():
            raise CheckpointError(f"{run_dir} has no {RESULT}: finish the run first (resume=)")
        context = build_run_context(run_dir, best_device())
        self.config: RunConfig = context.config
        judge = GoldJudge() if config.data.source is Source.synthetic else None
        self.context: RunContext = replace(
            context, parts=load_phase_data(self.config, context.console.say), judge=judge
        )
        self.plan = batch_plans(self.config).get(Phase.ppo, PLAN_WITHOUT_PPO)
        for folder in ("sft/model", "reward/model"):
            verify_model(run_dir / folder)
        self._reference = self.load_start_model()
        self.reward_model = self._load_reward_model()
        self._rewards = build_reward_mix(self.config, context.tokenizer, self._shared)
        dtype, ranks, rows = context.settings.dtype, context.ranks, self.plan.micro
        self._backends = RolloutBackends(self.config, context.tokenizer, dtype, ranks, rows)

    @property
    def default_decodings(self) -> list[Decoding]:
        """Return two decodings: sampling at the run's evaluation temperature, and greedy."""
        rollout = self.config.rollout
        temperature = rollout.eval_temperature or rollout.temperature
        return [Decoding("sampled", temperature), Decoding("greedy", rollout.temperature, True)]

    @cached_property
    def prompts(self) -> HeldOutPrompts:
        """Return the held-out prompts that the run's own evaluation uses."""
        is_dpo = Phase.dpo in self.config.phase.order
        phase = phase_of_dpo_prompts(self.context.parts) if is_dpo else Phase.ppo
        return HeldOutPrompts.from_phase(self.context, phase)

    def load_start_model(self) -> AnyEngine:
        """Load the model from which PPO or DPO started."""
        return self._build_policy(policy_source(self.config))

    def load_policy(self, folder: Path) -> AnyEngine:
        """Load the policy that is stored in ``folder``.

        Raises:
            CheckpointError: if the folder is damaged.
            ConfigError: if its tokenizer is not the run's, or it holds an adapter.
        """
        if (folder / "adapter_config.json").exists():
            raise ConfigError(f"{folder} is an adapter: python -m rlhf.export merges it first")
        verify_model(folder)
        tokenizer = load_tokenizer(folder, key=RUN_FOLDER)
        if tokenizer_identity(tokenizer) != tokenizer_identity(self.context.tokenizer):
            raise ConfigError(
                f"{folder} has a different tokenizer from {self.context.run_dir}; evaluate each "
                f"run by itself, or train this model again with from_run={self.context.run_dir}"
            )
        return self._build_policy(ModelSource.from_folder(folder, base=self.config.model))

    def generate_answers(
        self, name: str, actor: AnyEngine, decoder: Decoding, *, num_prompts: int, sample: int = 0
    ) -> Iterator[AnswerRow]:
        """Answer ``num_prompts`` held-out prompts and score the answers; yield a row per answer."""
        context, scorer = self.context, self.reward_model
        is_judged = context.judge is not None and not self.config.rewards
        scores = JudgeScores(GoldJudge(), context.tokenizer) if is_judged else zero_scores
        models = SeparateModels(
            actor,
            self._reference,
            None,
            scores if scorer is None else ModelScores(scorer),
            self._rewards,
            temperature=self.config.rollout.temperature,
        )
        backend = partial(self._backends.build, temperature=decoder.temperature)
        policy = AnsweringPolicy(actor, backend(), backend(greedy=True), models, self.plan.micro)
        answering = partial(answer_prompts, context, policy, self.prompts, num_prompts=num_prompts)
        for rollout, batch in answering(sample=sample, greedy=decoder.greedy):
            measured = measure_answers(context, rollout)
            columns = {key: values_B.tolist() for key, values_B in measured.items()}
            shown = describe_answers(context, rollout)
            for row in batch.keep_B.nonzero().flatten().tolist():
                measures = {key: column[row] for key, column in columns.items()}
                yield {
                    "model": name,
                    "decoder": decoder.name,
                    "sample": sample,
                    "prompt": shown[row].prompt,
                    "response": shown[row].response,
                    **measures,
                    "right": self._is_answer_right(measures),
                }

    def close(self) -> None:
        """End the processes of rewards and of an environment."""
        self._backends.close()
        if self._rewards is not None:
            self._rewards.close()

    def _is_answer_right(self, measures: Mapping[str, float]) -> bool | None:
        """Return True if the judge or all rules accept the answer, or the episode is a success.

        Return None if the run has no judge, no rule of ``RIGHT_OR_WRONG`` and no episodes.
        """
        for name in ("gold/exact", SUCCESS):
            if name in measures:
                return bool(measures[name])
        kinds = {name: part.kind for name, part in self.config.rewards.items()}
        names = [name for name, kind in kinds.items() if kind in RIGHT_OR_WRONG]
        rules = [measures[f"parts/{name}"] for name in names]
        return all(score == 1 for score in rules) if rules else None

    def _build_policy(self, source: ModelSource) -> AnyEngine:
        place = build_parameter_placer(Role.reference, **self._shared)
        actor = build_actor(source, self.context.tokenizer, seed=0, shard=place)
        model = LanguageModel(actor, fp32_logits=self.config.hardware.keeps_fp32_logits)
        return self._build_frozen_engine(model, Role.reference)

    def _load_reward_model(self) -> AnyEngine | None:
        config, folder = self.config, self.context.run_dir / "reward" / "model"
        if not has_reward_model(config):
            return None
        if Phase.reward in config.phase.order:
            _, base = reward_model_base(config)
            source = ModelSource.from_folder(folder, base=base)
        elif config.reward_model.init is ModelInit.pretrained:
            source = ModelSource.from_config(config.reward_model, key="reward_model")
        else:
            return None  # without PPO, a run may have no reward model
        place = build_parameter_placer(Role.reward, **self._shared)
        scorer = build_scorer(source, self.context.tokenizer, seed=0, shard=place)
        model = complete_reward_model(scorer, source, read_frozen_keys(self.context.run_dir))
        return self._build_frozen_engine(model, Role.reward)

    def _build_frozen_engine(self, module: Any, role: Role) -> AnyEngine:
        return build_engine(module, role=role, **self._shared)

    @property
    def _shared(self) -> dict[str, Any]:
        """Return the arguments that all engines have in common."""
        context = self.context
        return {"settings": context.settings, "plan": self.plan, "ranks": context.ranks}


def policy_folders(run_dir: Path) -> dict[str, Path]:
    """Return the folders of a run's policies by name, in training order.

    Raises:
        CheckpointError: if the run has no policy.
    """
    folders = {policy.name: run_dir / policy.folder for policy in POLICIES}
    found = {name: folder for name, folder in folders.items() if folder.is_dir()}
    if not found:
        names = ", ".join(policy.folder for policy in POLICIES)
        raise CheckpointError(f"{run_dir} has no policy: none of {names} exists")
    return found


def last_trained_policy(run_dir: Path) -> tuple[str, Path]:
    """Return the name and folder of a run's last trained policy, not of an average of weights."""
    trained = {policy.name for policy in TRAINED}
    return [item for item in policy_folders(run_dir).items() if item[0] in trained][-1]
