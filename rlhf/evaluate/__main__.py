"""Evaluate the models of a finished run on its held-out prompts.

    python -m rlhf.evaluate RUN_DIR [--against OTHER_RUN ...]

Each answer, and the margin of each held-out pair, is written to a file in RUN_DIR/evaluation. All
figures except perplexities and those of --best-of are computed from these files. The figures are
written to evaluation.json and to a section of RUN_DIR/report.html, and the terminal shows a table.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from rlhf.base.command import Result, build_command_parser, run_to_exit_code
from rlhf.base.errors import ConfigError
from rlhf.base.finite_numbers import restore_nan
from rlhf.base.metrics import perplexity
from rlhf.base.stored_files import ANSWERS, EVALUATION, METRICS, PAIRS
from rlhf.base.user_paths import expand_user_path
from rlhf.config.choices import Phase
from rlhf.config.freeze import read_frozen_keys
from rlhf.config.run_dir import find_run_dir, lock_run_dir, refuse_links
from rlhf.evaluate.answer_rows import (
    AnswerRow,
    Decoding,
    Evaluator,
    last_trained_policy,
    policy_folders,
)
from rlhf.evaluate.best_of import read_responses, score_rows
from rlhf.evaluate.figures import (
    RankedRow,
    answer_statistics,
    best_of_k_statistics,
    reward_model_statistics,
    win_rates,
)
from rlhf.phases.reward_evaluation import held_out_margins
from rlhf.phases.sft import held_out_loss
from rlhf.phases.shared.context import phase_tokens
from rlhf.report.run_page import model_rows, win_rate_rows, write_report
from rlhf.run.console import Console
from rlhf.run.jsonl import JsonlWriter
from rlhf.run.results import write_json

TABLE_COLUMNS = ("score", "right", "gold", "KL, nats", "tokens", "perplexity")
START = "start"  # name of the initial policy of a run without an SFT phase
CURVE_METRICS = ("ppo/eval_kl", "ppo/eval_score", "ppo/eval_gold")  # over-optimisation


def evaluate(
    run_dir: Path,
    *,
    against: Sequence[Path] = (),
    num_prompts: int | None = None,
    samples: int = 1,
    temperatures: Sequence[float] = (),
    best_of: Path | None = None,
    trusts_run: bool = False,
) -> dict[str, Any]:
    """Evaluate a run's policies and reward model; write and return evaluation.json.

    ``num_prompts`` is ppo.eval_prompts by default; ``samples`` answers to each are sampled. The
    last policies of the runs ``against`` are evaluated too.

    Raises:
        CheckpointError: if a run has not finished or has no policy.
        ConfigError: if a policy is an adapter or has another tokenizer, or the run has no reward
            model that could choose among the responses in ``best_of``.
        DataError: if a row of the file ``best_of`` lacks a prompt, good or bad responses.
    """
    choices = read_responses(best_of) if best_of else []
    evaluator = Evaluator(run_dir, trusts_run=trusts_run)
    if choices and evaluator.reward_model is None:
        raise ConfigError(f"--best-of {best_of}: {run_dir} has no reward model to choose with")
    context, config = evaluator.context, evaluator.config
    folders = policy_folders(run_dir)
    for other in against:
        name, folder = last_trained_policy(other)
        folders[f"{other.name}/{name}"] = folder
    more = (Decoding(f"temperature {t:g}", t) for t in temperatures)
    decoders = [*evaluator.default_decodings, *more]
    count = num_prompts or config.ppo.eval_prompts
    perplexities: dict[str, float] = {}
    answers = _open_empty_file(run_dir / ANSWERS)
    starts = () if Phase.sft in config.phase.order else (START,)
    for name in (*starts, *folders):
        source = folders.get(name)
        context.console.say(f"{name}: {source or config.model.path}")
        policy = evaluator.load_policy(source) if source else evaluator.load_start_model()
        for decoder in decoders:
            for sample in range(1 if decoder.greedy else samples):
                numbers = {"num_prompts": count, "sample": sample}
                for row in evaluator.generate_answers(name, policy, decoder, **numbers):
                    answers.write(row)
        if len(examples := phase_tokens(context, Phase.sft).eval):
            loss = held_out_loss(context, policy, examples, micro=evaluator.plan.micro)
            perplexities[name] = perplexity(loss)
        policy.close()
    answers.close()
    _write_margins(evaluator, run_dir / PAIRS)
    ranked: list[RankedRow] = []
    if (scorer := evaluator.reward_model) is not None:
        ranked = list(score_rows(context, scorer, choices, micro=evaluator.plan.micro))
    evaluator.close()
    judges = [name for name, part in config.rewards.items() if part.weight == 0]
    figures = compute_statistics(run_dir, perplexities, judges)
    if ranked:
        figures["best_of_k"] = best_of_k_statistics(ranked)
    write_json(run_dir / EVALUATION, figures)
    return figures


def _write_margins(evaluator: Evaluator, path: Path) -> None:
    """Write chosen minus rejected score of each held-out pair, if a reward phase learned pairs."""
    pairs, scorer, config = _open_empty_file(path), evaluator.reward_model, evaluator.config
    learned_pairs = Phase.reward in config.phase.order and config.reward.unpaired is None
    if scorer is not None and learned_pairs:
        examples = phase_tokens(evaluator.context, Phase.reward).eval
        micro = evaluator.plan.micro
        for margin in held_out_margins(evaluator.context, scorer, examples, micro=micro):
            pairs.write({"margin": margin})
    pairs.close()


def compute_statistics(
    run_dir: Path, perplexities: Mapping[str, float], judges: Sequence[str] = ()
) -> dict[str, Any]:
    """Compute statistics from the stored answers, margins and metrics; add ``perplexities``.

    ``judges`` are the names of the parts of ``rewards`` with weight 0.
    """
    rows: list[AnswerRow] = [
        restore_nan(line) | {"right": line["right"]} for line in ANSWERS.read_lines(run_dir)
    ]
    models: dict[str, Any] = {}
    for (name, decoder), group in groupby(rows, key=lambda row: (row["model"], row["decoder"])):
        decoders = models.setdefault(name, {"decoders": {}})["decoders"]
        decoders[decoder] = answer_statistics(list(group), judges)
    for name, value in perplexities.items():
        models[name]["perplexity"] = value
    sampled = [row for row in rows if row["decoder"] == "sampled"]
    figures: dict[str, Any] = {"models": models, "win_rates": win_rates(sampled, list(models))}
    margins = [row["margin"] for row in PAIRS.read_lines(run_dir)]
    if margins:
        figures["reward_model"] = reward_model_statistics(margins)
    curve = [
        {"step": line["step"]} | {name: line[name] for name in CURVE_METRICS if name in line}
        for line in METRICS.read_lines(run_dir)
        if "ppo/eval_score" in line
    ]
    return figures | {"over_optimisation": curve}


def _open_empty_file(path: Path) -> JsonlWriter:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return JsonlWriter(path)


def main(arguments: Sequence[str]) -> int:
    """Evaluate the run that the command names; return the exit code."""
    parser = build_command_parser("rlhf.evaluate", __doc__, uses_run=True, has_json=True)
    parser.add_argument("run_dir", nargs="?", help="default: runs/latest")
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="runs to compare with")
    parser.add_argument("--prompts", type=int, help="default: ppo.eval_prompts of the run")
    parser.add_argument("--samples", type=int, default=1, help="answers per prompt, for pass@k")
    parser.add_argument("--temperature", type=float, nargs="+", default=[], help="also sample so")
    parser.add_argument("--best-of", type=Path, metavar="FILE", help="responses to rank")
    options = parser.parse_args(arguments)
    return run_to_exit_code(lambda: _evaluate(options), as_json=options.json)


@contextmanager
def lock_evaluation(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run's evaluation, so that no other command writes the same files.

    Raises:
        CheckpointError: if there is no run, RUN_DIR/evaluation is a link, or its lock is held.
    """
    read_frozen_keys(run_dir)
    folder = (run_dir / EVALUATION).parent
    refuse_links(run_dir, [folder.name])
    folder.mkdir(exist_ok=True)
    with lock_run_dir(folder):
        yield


def _evaluate(options: argparse.Namespace) -> Result:
    for name in ("prompts", "samples"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be 1 or more")
    for value in options.temperature:
        if not 0 < value < math.inf:
            raise ConfigError(f"--temperature {value}: must be finite and above 0")
    run_dir = find_run_dir(options.run_dir)
    against = [expand_user_path(path, key="--against") for path in options.against]
    with lock_evaluation(run_dir):
        figures = evaluate(
            run_dir,
            against=against,
            num_prompts=options.prompts,
            samples=options.samples,
            temperatures=options.temperature,
            best_of=options.best_of and expand_user_path(options.best_of, key="--best-of"),
            trusts_run=options.trust_run,
        )
    console = Console()
    console.print_table("models", model_rows(figures, TABLE_COLUMNS))
    console.print_table("win rates by score, sampled answers", win_rate_rows(figures))
    if "reward_model" in figures:
        scorer = figures["reward_model"]
        low, high = scorer["accuracy_ci"]
        console.say(
            f"reward model: accuracy {scorer['accuracy']:.3f} ({low:.3f} to {high:.3f}) on "
            f"{scorer['pairs']} pairs, calibration error {scorer['calibration_error']:.3f}"
        )
    if "best_of_k" in figures:
        columns = ("prompts", "responses", "chance", "accuracy", "ties_score")
        table = [
            {"subset": subset} | {n: f"{values[n]:.4g}" for n in columns if n in values}
            for subset, values in figures["best_of_k"].items()
        ]
        console.print_table("reward model: best of k", table)
    console.say(f"wrote {run_dir / EVALUATION}, answers.jsonl beside it")
    console.say(f"wrote {write_report(run_dir)}")
    return Result(figures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
