"""PPO iterations with an environment that takes 0, 10 or 100 ms, beside single responses.

    python benchmarks/episodes.py [--shape tiny] [--rounds 3]

64 episodes of four turns of 16 tokens, beside 64 responses of 64 tokens: equally many tokens of the
policy. After each of the first three turns an observation of 24 tokens is added, which counts in
tokens/s too. The ways take turns; each turn is a new process, whose first two iterations are not
counted. Weights are random.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from common import BENCHMARKS, Way, finish, medians, parser, table, take_turns
from shapes import SHAPES, Work, make_models

TURNS, TOKENS, ROWS = 4, 64, 64
SINGLE = "single responses"
PROCESSES = {0: 2, 10: 16, 100: 64}  # by the milliseconds of a step
PARTS = ("generate", "iteration")


def overrides(ms: int) -> list[str]:
    """The configuration of episodes with an environment of ``ms`` milliseconds."""
    return [
        "data=environment",
        "environment=custom",
        "environment.target=waiting:Waiting",
        "environment.run_code=true",
        f"++environment.options={{ms: {ms}}}",
        f"environment.processes={PROCESSES[ms]}",
        f"environment.max_turns={TURNS}",
        f"environment.max_tokens={TOKENS + 24 * TURNS}",
        f"rollout.max_response_tokens={TOKENS // TURNS}",
        "rollout.min_response_tokens=0",
        "++rewards={learned: {kind: model}, environment: {kind: environment}}",
    ]


def main() -> None:
    """Measure every way in turn, and print the table."""
    parsed = parser(__doc__, shape="tiny")
    parsed.add_argument("--ms", type=int, nargs="+", choices=PROCESSES, default=[*PROCESSES])
    options = parsed.parse_args()
    shape, work = SHAPES[options.shape], Work(sequences=ROWS, response_tokens=TOKENS)
    path = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    ways = {SINGLE: []} | {f"episodes, {ms} ms a step": overrides(ms) for ms in options.ms}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder), shape)
        shared = {"folder": folder, "repeats": options.repeats, "vocab": shape.policy.vocab}
        tasks = {
            name: shared | {"work": asdict(work), "overrides": chosen, "episodes": name != SINGLE}
            for name, chosen in ways.items()
        }
        found = take_turns(
            {
                name: Way(
                    script=BENCHMARKS / "ppo_parts.py",
                    task=task,
                    environment={"PYTHONPATH": path},
                )
                for name, task in tasks.items()
            },
            options.rounds,
        )
    rows = []
    for name, samples in found.items():
        middle = medians(samples)
        rate = middle["tokens_with_observations"] / middle["generate"]
        row = {"way": name, "tokens_per_second": rate} | {part: middle[part] for part in PARTS}
        row["policy_tokens_per_second"] = middle["tokens"] / middle["generate"]
        rows.append(row | {"samples": samples})
        rows[-1]["times_single"] = rate / rows[0]["tokens_per_second"]
    header = ("way", "tokens/s", "x single", "policy tokens/s", "generate, s", "iteration, s")
    keys = ("way", "tokens_per_second", "times_single", "policy_tokens_per_second", *PARTS)
    finish(options, table(header, [[row[key] for key in keys] for row in rows]), {"rows": rows})


if __name__ == "__main__":
    main()
