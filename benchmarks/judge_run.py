"""What a run on the synthetic task learnt, taken apart by the task's judge.

    python benchmarks/judge_run.py RUN_DIR [RUN_DIR ...] [--prompts N] [--json FILE]

Four tables for each run directory of the three phases, measured on held-out prompts of its PPO
phase, in fp32, and with ``generate`` of transformers in the place of this program's rollouts:

1. the parts of the gold score before and after PPO, sampled and greedy, beside SFT answers whose
   *style is repaired* (a polite opening, cut at the first full stop): what manners alone are worth;
2. exactly right, by skill;
3. the reward model on minimal pairs, by flaw and skill;
4. the best of n SFT answers by the reward model, beside PPO. The KL of best-of-n is estimated from
   the probabilities of the chosen answers; log n - (n - 1) / n nats, which it would be if no answer
   could repeat, is in the table as a bound (https://arxiv.org/abs/2401.01879).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from best_of import choose_best, estimate_kl_of_best, kl_bound
from common import table
from run_prompts import RunPrompts
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.data.synthetic import (
    POLITE,
    SKILLS,
    GoldComponents,
    rate_response,
    right_answer,
    skill_of,
    split_response,
)
from rlhf.data.synthetic_pairs import FLAWS, render_response

BATCH = 200
BEST_OF = (1, 2, 4, 8, 16)
MOST = 64  # answers to each prompt, where PPO's KL asks for a larger best of n
BLOCK = 16  # answers to each prompt that are drawn at a time
MAX_TOKENS = 32  # the longest right answer of the task, politely said, has a dozen

Table = dict[str, dict[str, float]]  # row -> column -> value


class Answer(NamedTuple):
    """A response to a prompt; ``ids`` are those of both, with the end token if there is one."""

    prompt: str
    text: str
    ended: bool
    ids: list[int]
    prompt_tokens: int

    @property
    def rating(self) -> GoldComponents:
        """What the judge says of it."""
        return rate_response(self.prompt, self.text, ended=self.ended)

    @property
    def repaired(self) -> GoldComponents:
        """What the judge says of the same answer with a polite opening, cut at its full stop."""
        _, answer, _ = split_response(self.text)
        return rate_response(self.prompt, f" {POLITE[0]} {answer.strip()}.")


class Policy(NamedTuple):
    """A language model that answers."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, folder: Path) -> Policy:
        """The policy in a Hugging Face folder."""
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.padding_side = "left"
        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer)

    @torch.inference_mode()
    def answers(self, prompts: Sequence[str], *, sample: bool) -> list[Answer]:
        """One answer to each prompt: sampled at temperature 1, or of the likeliest tokens."""
        found: list[Answer] = []
        for start in range(0, len(prompts), BATCH):
            batch = list(prompts[start : start + BATCH])
            inputs = self.tokenizer(batch, return_tensors="pt", padding=True)
            ids_BS = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_TOKENS,
                do_sample=sample,
                top_k=0,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            width = inputs["input_ids"].shape[1]
            for prompt, row, ids in zip(
                batch, inputs["input_ids"], ids_BS[:, width:].tolist(), strict=True
            ):
                ended = self.tokenizer.eos_token_id in ids
                kept = ids[: ids.index(self.tokenizer.eos_token_id) + 1] if ended else ids
                asked = row[row != self.tokenizer.pad_token_id].tolist()
                text = self.tokenizer.decode(kept, skip_special_tokens=True)
                found.append(Answer(prompt, text, ended, asked + kept, len(asked)))
        return found

    @torch.inference_mode()
    def logprobs(self, answers: Sequence[Answer]) -> list[float]:
        """Log-probability of each answer, its end token included."""
        found: list[float] = []
        for start in range(0, len(answers), BATCH):
            batch = answers[start : start + BATCH]
            ids_BS = _padded([answer.ids for answer in batch])
            logits_BSV = self.model(input_ids=ids_BS[:, :-1]).logits
            taken_BS = -torch.nn.functional.cross_entropy(
                logits_BSV.transpose(1, 2), ids_BS[:, 1:], reduction="none"
            )
            found += [
                float(taken_S[answer.prompt_tokens - 1 : len(answer.ids) - 1].sum())
                for answer, taken_S in zip(batch, taken_BS, strict=True)
            ]
        return found


class RewardModel(NamedTuple):
    """A model that scores a prompt with its answer, at the last token."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, folder: Path) -> RewardModel:
        """The reward model in a Hugging Face folder."""
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        return cls(model, AutoTokenizer.from_pretrained(folder))

    @torch.inference_mode()
    def scores(self, rows: Sequence[list[int]]) -> list[float]:
        """The score of each row of token ids."""
        found: list[float] = []
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            hidden_BSH = self.model.base_model(input_ids=_padded(batch)).last_hidden_state
            last_B = torch.tensor([len(ids) - 1 for ids in batch])
            found += self.model.score(hidden_BSH[range(len(batch)), last_B])[:, 0].tolist()
        return found

    def of_texts(self, texts: Sequence[str]) -> list[float]:
        """The score of each text, ended."""
        ids = self.tokenizer([text + self.tokenizer.eos_token for text in texts])["input_ids"]
        return self.scores(ids)


def _padded(rows: Sequence[list[int]]) -> Tensor:
    """Token ids (B, S), 0 after the end: no model here looks ahead."""
    return pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)


def judge(run_dir: Path, num_prompts: int | None) -> dict[str, Table]:
    """The tables of one run, by their titles."""
    torch.manual_seed(0)
    prompts = RunPrompts.of(run_dir).held_out
    if num_prompts is not None and num_prompts > len(prompts):
        raise SystemExit(f"--prompts {num_prompts}: {run_dir} holds out only {len(prompts)}")
    prompts = prompts[:num_prompts]
    print(f"{run_dir}: {len(prompts)} held-out prompts")
    before, after = Policy.of(run_dir / "sft" / "model"), Policy.of(run_dir / "ppo" / "actor")
    reward = RewardModel.of(run_dir / "reward" / "model")
    answers = {
        f"{name}, {how}": policy.answers(prompts, sample=how == "T=1")
        for name, policy in (("SFT", before), ("PPO", after))
        for how in ("T=1", "greedy")
    }
    sampled = answers["PPO, T=1"]
    told = zip(after.logprobs(sampled), before.logprobs(sampled), strict=True)
    kl = statistics.fmean(new - old for new, old in told)
    return {
        "Parts of the gold score": gold_parts(answers),
        "Exactly right, by skill": exact_by_skill(answers),
        "Right answers that score above their copy with one flaw": minimal_pairs(reward, prompts)
        | {"right, polite above PPO's wrong answer": preferred_to_wrong(reward, sampled)},
        "Best of n SFT answers by the reward model, beside PPO": best_of_n(
            before, reward, prompts, sampled, kl
        ),
    }


def gold_parts(answers: dict[str, list[Answer]]) -> Table:
    """Means of the judge's parts; the last row is what manners alone gain."""
    found = {name: _mean_parts(a.rating for a in given) for name, given in answers.items()}
    repaired = _mean_parts(answer.repaired for answer in answers["SFT, T=1"])
    start, end = found["SFT, T=1"]["gold"], found["PPO, T=1"]["gold"]
    found["SFT, T=1, style repaired"] = repaired
    share = (repaired["gold"] - start) / (end - start) if end > start else math.nan
    found["gain by repair over PPO's gain"] = {"gold": share}
    return found


def _mean_parts(ratings: Iterable[GoldComponents]) -> dict[str, float]:
    rated = [
        {"gold": each.gold, "exactly right": float(each.is_exact), **each._asdict()}
        for each in ratings
    ]
    return {name: statistics.fmean(each[name] for each in rated) for name in rated[0]}


def exact_by_skill(answers: dict[str, list[Answer]]) -> Table:
    """Share of prompts of each skill that are answered exactly right."""
    return {
        name: _by_skill((answer.prompt, answer.rating.is_exact) for answer in given)
        for name, given in answers.items()
    }


def _by_skill(found: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """Share of True over all, and of each skill that occurs."""
    groups: defaultdict[str, list[bool]] = defaultdict(list)
    for prompt, is_so in found:
        groups["all"].append(is_so)
        groups[skill_of(prompt)].append(is_so)
    return {
        name: statistics.fmean(groups[name]) if name in groups else math.nan
        for name in ("all", *SKILLS)
    }


def minimal_pairs(reward: RewardModel, prompts: Sequence[str]) -> Table:
    """Share of right, polite answers that score above the same answer with one flaw."""
    rows: Table = {}
    for name, flaw in FLAWS.items():
        rng = random.Random(name)
        pairs = []
        for prompt in prompts:
            right = right_answer(prompt)
            flawed = flaw(right, rng)
            if flawed and flawed != right:
                pairs.append((prompt, _politely(prompt, right), _politely(prompt, flawed)))
        scores = (reward.of_texts([pair[i] for pair in pairs]) for i in (1, 2))
        above = zip((prompt for prompt, *_ in pairs), *scores, strict=True)
        rows[name.replace("_", " ")] = _by_skill((prompt, a > b) for prompt, a, b in above)
    return rows


def _politely(prompt: str, items: list[str]) -> str:
    return prompt + render_response(items, (POLITE[0], ""))


def preferred_to_wrong(reward: RewardModel, sampled: list[Answer]) -> dict[str, float]:
    """Share of wrong answers that score below the right, polite answer to the same prompt."""
    wrong = [answer for answer in sampled if not answer.rating.is_exact]
    right = reward.of_texts([_politely(a.prompt, right_answer(a.prompt)) for a in wrong])
    scores = zip(wrong, right, reward.scores([answer.ids for answer in wrong]), strict=True)
    return _by_skill((answer.prompt, a > b) for answer, a, b in scores)


def best_of_n(
    policy: Policy,
    reward: RewardModel,
    prompts: Sequence[str],
    sampled: list[Answer],
    kl: float,
) -> Table:
    """What the reward model's choice of n answers is worth, and PPO at its own KL.

    Answers are drawn until best of n has PPO's KL, or ``MOST`` are.
    """
    groups: list[list[Candidate]] = [[] for _ in prompts]
    while (n := len(groups[0])) < MOST and (n < max(BEST_OF) or _estimated_kl(groups, n) < kl):
        drawn = draw_candidates(policy, reward, [p for p in prompts for _ in range(BLOCK)])
        for number, group in enumerate(groups):
            group.extend(drawn[number * BLOCK : (number + 1) * BLOCK])
    equal = next((size for size in range(1, n) if _estimated_kl(groups, size) >= kl), n)
    sizes = {f"best of {size}": size for size in BEST_OF} | {"best of n at PPO's KL": equal}
    rows: Table = {}
    for name, size in sizes.items():
        chosen = _chosen(groups, size)
        rows[name] = {"n": size, "KL at most": kl_bound(size)} | _worth(
            _estimated_kl(groups, size), [c.answer for c in chosen], [c.score for c in chosen]
        )
    rows["PPO"] = _worth(kl, sampled, reward.scores([answer.ids for answer in sampled]))
    return rows


class Candidate(NamedTuple):
    """An answer that the reward model may choose."""

    answer: Answer
    score: float
    probability: float  # under the policy that drew it


def draw_candidates(policy: Policy, reward: RewardModel, prompts: Sequence[str]) -> list[Candidate]:
    """One sampled answer to each prompt, with its score and its probability."""
    answers = policy.answers(prompts, sample=True)
    scores = reward.scores([answer.ids for answer in answers])
    probabilities = (math.exp(each) for each in policy.logprobs(answers))
    return [Candidate(*each) for each in zip(answers, scores, probabilities, strict=True)]


def _chosen(groups: Sequence[Sequence[Candidate]], n: int) -> list[Candidate]:
    return [group[choose_best([each.score for each in group], n)] for group in groups]


def _estimated_kl(groups: Sequence[Sequence[Candidate]], n: int) -> float:
    return statistics.fmean(estimate_kl_of_best(c.probability, n) for c in _chosen(groups, n))


def _worth(kl: float, answers: list[Answer], scores: list[float]) -> dict[str, float]:
    parts = _mean_parts(answer.rating for answer in answers)
    return {"KL, nats": kl, "score": statistics.fmean(scores)} | parts


def joined(runs: Sequence[Table]) -> str:
    """One table of several runs: means, with the least and the largest value behind them."""
    columns = list(
        dict.fromkeys(column for rows in runs for row in rows.values() for column in row)
    )
    names = list(dict.fromkeys(name for rows in runs for name in rows))

    def cell(name: str, column: str) -> str:
        values = [rows[name][column] for rows in runs if column in rows.get(name, {})]
        if not values or any(map(math.isnan, values)):
            return "-"
        mean = f"{statistics.fmean(values):.3f}"
        if len(values) == 1:
            return mean
        return f"{mean} ({min(values):.2f}-{max(values):.2f})"

    return table(["", *columns], ([name, *(cell(name, c) for c in columns)] for name in names))


def main() -> None:
    """Judge the runs of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", nargs="+", type=Path)
    parser.add_argument("--prompts", type=int, help="default: all held-out prompts of PPO")
    parser.add_argument("--json", type=Path, help="also write the values of every run here")
    options = parser.parse_args()
    runs = {}
    for run_dir in options.run_dirs:
        runs[str(run_dir)] = judge(run_dir, options.prompts)
        if options.json:
            options.json.write_text(json.dumps(runs, indent=1) + "\n")
    tables = list(runs.values())
    for title in tables[0]:
        print(f"\n{title}\n\n{joined([found[title] for found in tables])}")


if __name__ == "__main__":
    main()
