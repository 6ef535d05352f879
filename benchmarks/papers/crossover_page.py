"""Write benchmarks/crossover.md from the figures: python -m papers.crossover_page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from common import BENCHMARKS, table

from papers import advice
from papers.claims import Figures
from papers.crossover import CRITIC_FIRST, FIRST, SAMPLED, STEPS, TASKS, WITHOUT_CRITIC
from papers.gradients_page import read_figures
from papers.paired import number
from rlhf.base.intervals import mean_with_interval

PAGE = BENCHMARKS / "crossover.md"
FOLDER = BENCHMARKS / "results" / "papers"
MAP, ADVICE = FOLDER / "crossover.json", FOLDER / "advice.json"
ARMS = ("PPO", CRITIC_FIRST, *WITHOUT_CRITIC, SAMPLED)
HEAD = f"""# PPO or GRPO

See which estimator learned fastest on tasks whose horizon, reward and noise are known.
`python -m rlhf_lab.advise` probes a task of your own
([algorithms](../docs/algorithms.md#ppo-or-grpo)).

```bash
make papers ONLY="crossover advice"
```

The task: count letters on from a letter, one decision for each letter, by a model of 0.4 million
weights that imitated faulty demonstrations. *Share* rewards the share of right letters, *whole*
only a whole right answer; *noisy* adds a normal error with twice the deviation of the score. All
arms see {STEPS} steps of 64 responses and no KL penalty. Cells: the true held-out score, mean over
the evaluations after every 8 steps, with its 95 % interval over {{seeds}} seeds; bold: the best of
the row, and what is less than 0.01 below it. *{CRITIC_FIRST}*: the actor rests in the first {FIRST}
of these steps. *{SAMPLED.capitalize()}*: VinePPO with 4 continuations from 4 places, which are not
counted among the responses.

"""
ADVISED = f"""
## The adviser on unseen tasks

Twenty tasks were drawn before the adviser was written; {advice.STEPS} steps, and the score as
above, mean over {{seeds}} seeds. *Loss*: of the advised arm against the best arm of the row. Right
is a loss of at most {advice.MARGIN}. The name of a reward is its error, what moves it for all
responses to a prompt, and its density; *right* is the quality of demonstrations.

"""


def crossover_page(found: Mapping[int, Figures], advised: Mapping[int, Figures]) -> str:
    """Return the page, with the tasks of the adviser if they are measured."""
    rows = []
    for task in TASKS:
        seen = {
            arm: [number(each, name) for each in found.values()]
            for arm in ARMS
            if (name := f"{task.title}: {arm}") in found[min(found)]
        }
        before = statistics.fmean(number(each, f"before, {task.title}") for each in found.values())
        rows.append([task.title, f"{before:.2f}", *_cells(seen)])
    text = HEAD.format(seeds=len(found)) + table(["task", "before", *ARMS], rows) + "\n"
    if not advised:
        return text
    rows = []
    lost = advice.losses(advised, advised)
    for task, loss in zip(advice.TASKS, lost, strict=True):
        seen = {
            arm: [number(each, f"{task.title}: {arm}") for each in advised.values()]
            for arm in advice.ARMS
        }
        names = sorted({str(each[task.title]) for each in advised.values()})
        rows.append([task.title, *_means(seen), ", ".join(names), f"{loss:.3f}"])
    columns = ["task", *advice.ARMS, "advised", "loss"]
    return text + ADVISED.format(seeds=len(advised)) + table(columns, rows) + "\n"


def _cells(seen: Mapping[str, Sequence[float]]) -> list[str]:
    means = dict(zip(seen, _means(seen), strict=True))
    halves = {arm: mean_with_interval(values).half for arm, values in seen.items()}
    return [f"{means[arm]} ± {halves[arm]:.3f}" if arm in means else "-" for arm in ARMS]


def _means(seen: Mapping[str, Sequence[float]]) -> list[str]:
    means = [statistics.fmean(values) for values in seen.values()]
    near = max(means) - 0.01
    return [f"**{mean:.3f}**" if mean > near else f"{mean:.3f}" for mean in means]


if __name__ == "__main__":
    PAGE.write_text(
        crossover_page(read_figures(MAP), read_figures(ADVICE) if ADVICE.exists() else {})
    )
