"""A score that is the weighted sum of several rewards, the parts of the config key ``rewards``.

Shapes: B = sequences, K = parts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf.base.errors import RewardError
from rlhf.base.types import PromptBatch, Responses, TermScores
from rlhf.config.choices import Phase, RewardKind
from rlhf.config.schema.rewards import RewardTerm
from rlhf.config.schema.run import RunConfig
from rlhf.data.records import Record, describe_row
from rlhf.data.synthetic_pairs import GoldJudge
from rlhf.methods import methods_in_use
from rlhf.options.scorers.costs import list_scorers
from rlhf.phases.shared.context import RunContext, phase_records
from rlhf.phases.shared.scoring import (
    FIX_MODEL,
    NO_SCORE,
    count_failed_scores,
    describe_step,
    rate_responses,
    response_texts,
    valid_score_mask,
)
from rlhf.rewards.isolated import HERE, FailureError, end_reward_processes, start_reward_processes
from rlhf.rewards.rules import Answers, PartScores
from rlhf.run.console import Console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf.options.scorers.text_scorer import TextScorer


class RewardMix:
    """A function from responses to the scores of all parts of the reward, and their weighted sums.

    ``say`` prints a warning the first time that a part fails, and at the end how often it failed.
    ``environment_rewards`` returns the rewards (B, T) that an environment gave the responses.
    """

    def __init__(
        self,
        parts: Mapping[str, RewardTerm],
        tokenizer: PreTrainedTokenizerBase,
        judge: GoldJudge,
        say: Callable[[str], None],
        environment_rewards: Callable[[Responses], Tensor] | None = None,
        run_dir: str | None = None,
        scorers: Mapping[str, TextScorer] = {},
    ) -> None:
        self.parts = parts
        self._scorers = scorers
        self._environment_rewards = environment_rewards
        self._tokenizer = tokenizer
        self._judge = judge
        self._say = say
        self._rows = 0  # responses scored so far
        self._fallbacks: Counter[str] = Counter()  # responses that got the fallback, by part
        self._isolated = start_reward_processes(parts, run_dir)

    def __call__(
        self, prompts: PromptBatch, responses: Responses, model_scores_B: Tensor
    ) -> tuple[Tensor, TermScores]:
        """Return the weighted sums (B,), and the scores (B, K) of the parts.

        Raises:
            RewardError: if a part without a fallback failed, or a prompt lacks a column.
        """
        reads_texts = self._isolated or self._scorers
        texts = response_texts(self._tokenizer, responses) if reads_texts else []
        for name, isolated in self._isolated.items():  # start all parts, then wait for scores
            isolated.send_answers(
                _build_reward_inputs(prompts, responses, texts, self.parts[name].columns)
            )
        self._rows += len(model_scores_B)
        columns: list[Tensor] = []
        criteria: dict[str, Tensor] = {}
        of_tokens: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            problem = NO_SCORE
            match part.kind:
                case RewardKind.model:
                    scores_B = model_scores_B
                case RewardKind.gold:
                    rated = rate_responses(self._judge, self._tokenizer, prompts, responses)
                    scores_B = model_scores_B.new_tensor([each["gold"] for each in rated])
                case RewardKind.scorer:
                    scores_B = self._scorers[name](prompts.texts, texts)
                case RewardKind.environment:
                    assert self._environment_rewards is not None, "the run has no environment"
                    of_tokens[name] = self._environment_rewards(responses)
                    scores_B = of_tokens[name].sum(dim=1)
                case _:
                    scored = self._receive_scores(name, len(model_scores_B))
                    scores_B = model_scores_B.new_tensor(scored.scores)
                    problem = scored.problem or NO_SCORE
                    if scored.steps:
                        placed = self._place_step_scores(responses, scored, part.fallback or 0.0)
                        of_tokens[name] = placed.to(scores_B)
                    for criterion, scores in scored.criteria.items():
                        of_criterion_B = model_scores_B.new_tensor(scores)
                        criteria[f"{name}.{criterion}"] = of_criterion_B.nan_to_num(part.fallback)
            if count := count_failed_scores(scores_B):
                self._raise_or_count_failure(name, problem, count, describe_step(prompts))
            columns.append(scores_B)
        scores_BK = torch.stack(columns, dim=1)
        failed_BK = ~valid_score_mask(scores_BK)
        fallbacks_K = scores_BK.new_tensor([part.fallback or 0.0 for part in self.parts.values()])
        scores_BK = torch.where(failed_BK, fallbacks_K, scores_BK)
        terms = TermScores(scores_BK, failed_BK, criteria, of_tokens)
        return sum_weighted_scores(self.parts, scores_BK), terms

    def try_parts_on_rows(self, records: Sequence[Record]) -> None:
        """Test each part that has its own process: let it score the responses in rows of the data.

        Raises:
            RewardError: if a part without a fallback failed.
        """
        prompts = [record.prompt or "" for record in records]
        texts = [record.chosen or "" for record in records]
        tokens = [len(self._tokenizer(text).input_ids) for text in texts]
        for name, isolated in self._isolated.items():
            names, rows = self.parts[name].columns, [record.columns or {} for record in records]
            columns = {each: [row[each] for row in rows] for each in names}
            isolated.send_answers(Answers(prompts, texts, [True] * len(texts), tokens, columns))
        for name in self._isolated:
            scored = self._receive_scores(name, len(records))
            pairs = zip(records, scored.scores, strict=True)
            failed = [describe_row(record) for record, score in pairs if math.isnan(score)]
            if failed:
                where = f"on {' and '.join(failed)}, before training"
                problem = scored.problem or NO_SCORE
                self._raise_or_count_failure(name, problem, len(failed), where)
        self._fallbacks.clear()

    def _receive_scores(self, name: str, rows: int) -> PartScores:
        """Return the scores of the part ``name``, NaN where it failed."""
        try:
            return self._isolated[name].receive_scores()
        except FailureError as error:
            nans = [math.nan] * rows
            return PartScores(nans, dict.fromkeys(self._isolated[name].criteria, nans), str(error))

    def _place_step_scores(
        self, responses: Responses, scored: PartScores, fallback: float
    ) -> Tensor:
        """Return the scores (B, T) of steps, each at the token that completes the step.

        The last token gets the last step's score or, if the response has no score, ``fallback``.
        """
        rewards_BT = torch.zeros(responses.ids_BT.shape)
        rows = zip(responses.ids_BT.tolist(), responses.keep_BT.sum(dim=1).tolist(), strict=True)
        for row, (ids, length) in enumerate(rows):
            has_failed = math.isnan(scored.scores[row])
            steps = [(0, fallback)] if has_failed else scored.steps[row]
            for end, score in steps[:-1]:
                rewards_BT[row, find_token(self._tokenizer, ids[:length], end)] += score
            rewards_BT[row, length - 1] += steps[-1][1]
        return rewards_BT

    def close(self) -> None:
        """End the processes of the parts; print how often each part failed."""
        end_reward_processes(self._isolated)
        for scorer in self._scorers.values():
            scorer.engine.close()
        for name, count in self._fallbacks.items():
            self._say(
                f"warning: rewards.{name} failed for {count} of {self._rows} responses, which got "
                f"its fallback {self.parts[name].fallback:g}"
            )

    def _raise_or_count_failure(self, name: str, problem: str, count: int, where: str) -> None:
        """Raise RewardError if the part has no fallback; otherwise warn once and count failures."""
        part = self.parts[name]
        failed = f"rewards.{name} (kind={part.kind}) failed {where}: {problem}"
        if part.kind in HERE:
            is_model = part.kind in (RewardKind.model, RewardKind.scorer)
            fix = FIX_MODEL if is_model else "Make its rewards smaller"
            raise RewardError(f"{failed} for {count} responses. {fix}")
        if part.fallback is None:
            raise RewardError(
                f"{failed}. A part must return one number for each response: correct it, or set "
                f"rewards.{name}.fallback=NUMBER, the score of responses that cannot be scored"
            )
        if name not in self._fallbacks:
            self._say(
                f"warning: {failed}; responses that {name} fails to score get its fallback "
                f"{part.fallback:g}, and ppo/fallback_share counts them"
            )
        self._fallbacks[name] += count


def find_token(tokenizer: PreTrainedTokenizerBase, ids: list[int], end: int) -> int:
    """Return the index of the token with which the text of ``ids`` reaches ``end`` characters."""

    def count_characters(tokens: int) -> int:
        return len(tokenizer.decode(ids[:tokens], skip_special_tokens=True))

    return bisect_left(range(1, len(ids)), end, key=count_characters)


def _build_reward_inputs(
    prompts: PromptBatch, responses: Responses, texts: list[str], columns: Sequence[str]
) -> Answers:
    """Return the input of a part: prompts, responses with their ``texts``, and ``columns``."""
    rows = prompts.columns or [{}] * len(prompts.texts)
    missing = next((name for name in columns for row in rows if name not in row), None)
    if missing is not None:
        raise RewardError(
            f"rewards read the column {missing}, but a prompt lacks it; give RLHFEngine.prompts "
            "the columns of each prompt"
        )
    return Answers(
        prompts.texts,
        texts,
        responses.ended_B.tolist(),
        responses.keep_BT.sum(dim=1).tolist(),
        {name: [row[name] for row in rows] for name in columns},
        prompts.step,
    )


def build_reward_mix(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    engines: Mapping[str, Any] | None = None,
) -> RewardMix | None:
    """Build the RewardMix of ``config.rewards``; return None if there are no parts.

    The mix prints its warnings on this rank's terminal, even if this is not rank 0. ``engines`` are
    the arguments that all engines have in common; without them no scorer is loaded.
    """
    if not config.rewards:
        return None
    say = Console().say
    rewards_of: Callable[[Responses], Tensor] | None = None
    if config.environment.is_used:
        from rlhf.options.environments.responses import episode_token_rewards

        rewards_of = episode_token_rewards
    scorers: Mapping[str, TextScorer] = {}
    if engines is not None and list_scorers(config):
        from rlhf.options.scorers.text_scorer import build_text_scorers

        scorers = build_text_scorers(config, say, engines)
    parts = config.rewards
    return RewardMix(parts, tokenizer, GoldJudge(), say, rewards_of, config.run_dir, scorers)


def try_reward_parts(context: RunContext) -> None:
    """Print the warnings of methods, and try the rewards on two rows of PPO's data.

    Scorers are not loaded: their files, and the forms of all prompts, are checked.

    Raises:
        ConfigError, RewardError: if a part cannot start, or one without a fallback failed.
        CheckpointError: if the files of a scorer cannot be used.
    """
    for method in methods_in_use(context.config):
        for warning in method.warnings(context.config):
            context.console.say(f"warning: {warning}")
    data = phase_records(context, Phase.ppo)
    if list_scorers(context.config):
        from rlhf.options.scorers.text_scorer import read_scorer_forms

        for form in read_scorer_forms(context.config):
            form.check_prompts(each.prompt or "" for each in (*data.train, *data.eval))
    if (mix := build_reward_mix(context.config, context.tokenizer)) is not None:
        with closing(mix):
            mix.try_parts_on_rows(data.train[:2])


def sum_weighted_scores(parts: Mapping[str, RewardTerm], scores_BK: Tensor) -> Tensor:
    """Return the weighted sums (B,) of the parts' scores."""
    return scores_BK @ scores_BK.new_tensor([part.weight for part in parts.values()])
