"""Generate benchmarks/environments.md: ``python -m tools.docs.environments_page``.

It plays every environment of the packages that are installed, twice and in two processes, and
compares the two episodes. Sections of packages that are not installed stay as they are: GEM needs
an environment of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.options.environments.interface import Observation, Step
from rlhf.options.environments.keys import EnvironmentConfig, EnvironmentKind, FailureRewards
from rlhf.options.environments.process_pool import ProcessPool

PAGE = Path("benchmarks/environments.md")
PACKAGES = {  # kind -> module, and distribution
    EnvironmentKind.gymnasium: ("gymnasium", "gymnasium"),
    EnvironmentKind.textarena: ("textarena", "textarena"),
    EnvironmentKind.reasoning_gym: ("reasoning_gym", "reasoning-gym"),
    EnvironmentKind.gem: ("gem", "gem-llm"),
}
SEEDS, MOST_TURNS, SECONDS = (1, 2), 12, 30.0
EXAMPLES = re.compile(r"\[[^\[\]\n]{1,12}\]|\\boxed\{[^{}\n]{1,12}\}")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CANNED = ("42", "yes", "[1]", "[0 1]", "[A1]", "\\boxed{3}")  # if the text shows no example
LONGEST_REASON = 160  # characters
HEAD = "| environment | turns | replays equal | note |\n| --- | --- | --- | --- |\n"


class Trial(NamedTuple):
    """What came of one environment."""

    name: str
    turns: int  # in the episodes of all seeds
    note: str
    is_equal: bool


def single_player_games() -> list[str]:
    """Return the ids of textarena whose class is written for one player."""
    arena = import_module("textarena")
    folder = Path(str(arena.__file__)).parents[1]
    registry = import_module("textarena.envs.registration").ENV_REGISTRY
    found = []
    for name, spec in registry.items():
        file = folder / (spec.entry_point.partition(":")[0].replace(".", "/") + ".py")
        is_variant = name.endswith(("-raw", "-train"))  # the same game in other wrappers
        if not is_variant and file.exists() and "SinglePlayerState" in file.read_text():
            found.append(name)
    return found


def environment_names(kind: EnvironmentKind) -> list[str]:
    """Return the names of the package's environments that are made for one player and text."""
    if kind is EnvironmentKind.textarena:
        return single_player_games()
    if kind is EnvironmentKind.reasoning_gym:
        return list(import_module("reasoning_gym.factory").DATASETS)
    if kind is EnvironmentKind.gem:
        import_module("gem")
        registry = import_module("gem.envs.registration").ENV_REGISTRY
        return [name for name in registry if name.startswith("game:")]
    registry = import_module("gymnasium").registry
    return [n for n, spec in registry.items() if ".toy_text" in str(spec.entry_point)]


def next_turn(observations: list[str], rng: Random) -> str:
    """Return a turn that the texts so far show as an example, or a canned one."""
    actions, mark, _ = observations[0].partition("? ")
    if mark and "\n" not in actions and ", " in actions:
        return str(rng.choice(actions.split(", ")))
    examples = sorted({str(found) for text in observations for found in EXAMPLES.findall(text)})
    return rng.choice(examples or CANNED)


def play_one(pool: ProcessPool, episode: int, seed: int) -> list[Step]:
    """Play an episode and return its steps.

    Raises:
        RuntimeError: if it fails.
    """
    rng, texts, steps = Random(seed), [], []
    pool.reset(episode, seed=seed, row={})
    while True:
        (reply,) = pool.replies(wait=True)
        if reply.failure is not None:
            raise RuntimeError(f"{reply.failure}: {reply.problem}")
        steps.append(reply.step)
        if reply.step.terminated or reply.step.truncated or len(steps) > MOST_TURNS:
            return steps
        texts.append(Observation(*reply.step.observation).text)
        pool.step(episode, next_turn(texts, rng))


def try_environment(kind: EnvironmentKind, name: str | None) -> Trial:
    """Play an environment in two processes, and compare the episodes of the same seeds."""
    rewards = dict.fromkeys(FailureRewards.__dataclass_fields__, 0.0)
    config = EnvironmentConfig(
        kind=kind,
        id=name,
        target=None,
        run_code=False,
        options={},
        max_turns=MOST_TURNS,
        max_tokens=1,
        step_seconds=SECONDS,
        processes=2,
        max_failures=0,
        failure_rewards=FailureRewards(**rewards),
    )
    title, turns = name or kind.value, 0
    try:
        pool = ProcessPool(config)
    except ConfigError as error:
        return Trial(title, 0, str(error).partition("environment.options ")[2] or str(error), False)
    try:
        for seed in SEEDS:
            first, second = play_one(pool, 0, seed), play_one(pool, 1, seed)
            turns += len(first) - 1
            if first != second:
                return Trial(title, turns, f"two episodes with seed {seed} differ", False)
    except RuntimeError as error:
        return Trial(title, turns, str(error), False)
    finally:
        pool.close()
    note = "" if pool.facts.optimum is None else f"optimum {pool.facts.optimum:g}"
    return Trial(title, turns, note, True)


def section_of(kind: EnvironmentKind, trials: list[Trial]) -> str:
    """Return the trials of a package as a section of Markdown."""
    distribution = PACKAGES[kind][1]
    equal = sum(trial.is_equal for trial in trials)
    title = (
        f"## {kind}\n\n{distribution} {version(distribution)}: {equal} of {len(trials)} run and "
    )
    rows = (
        f"| `{trial.name}` | {trial.turns} | {'yes' if trial.is_equal else 'no'} | "
        f"{COLOURS.sub('', trial.note).replace('|', ' ')[:LONGEST_REASON]} |\n"
        for trial in trials
    )
    return f"{title}replay equal.\n\n{HEAD}{''.join(rows)}"


def replace_section(page: str, kind: EnvironmentKind, section: str) -> str:
    """Return ``page`` with the section of ``kind`` replaced, or added at the end."""
    pattern = re.compile(rf"^## {kind}\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
    if pattern.search(page):
        return pattern.sub(lambda _: section + "\n", page).rstrip() + "\n"
    return f"{page.rstrip()}\n\n{section}"


def installed_kinds() -> Iterator[EnvironmentKind]:
    """Yield the kinds whose package is installed."""
    yield from (kind for kind, (module, _) in PACKAGES.items() if find_spec(module) is not None)


def renew_environment_table(path: Path, kinds: list[str]) -> None:
    """Play the environments of the installed packages, or of ``kinds``; rewrite their sections."""
    for kind in installed_kinds():
        if kinds and kind not in kinds:
            continue
        trials = []
        for name in environment_names(kind):
            trials.append(try_environment(kind, name))
            print(kind, *trials[-1], file=sys.stderr)
        page = path.read_text(encoding="utf-8")
        path.write_text(replace_section(page, kind, section_of(kind, trials)), encoding="utf-8")


if __name__ == "__main__":
    renew_environment_table(PAGE, sys.argv[1:])
