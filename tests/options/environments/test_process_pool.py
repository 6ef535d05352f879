"""Environments that misbehave in a process pool: counted exactly, and unnoticed by others.

tests/rewards/test_supervisor.py kills a run whose processes have the same supervisor.
"""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.base.errors import ConfigError
from rlhf.config.schema.keys import YEAR_S
from rlhf.options.environments.interface import Observation, Reply
from rlhf.options.environments.keys import FailureName
from rlhf.options.environments.process_pool import ProcessPool, build_pool
from tests.options.environments.test_factories import config_of
from tests.runs import wait_for

MODULE = '''
import math, os, random, socket, sys, time
def write_pid():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} ")

class Unruly:
    """Misbehave as the text or the row says; otherwise count the turns."""

    def reset(self, *, seed, row):
        self.turns = 0
        if row.get("word"):
            return self.answer(row["word"])[0]
        return f"begin {seed} {random.random()}"

    def step(self, text):
        print("this must not reach the answers")
        self.turns += 1
        return self.answer(text)

    def answer(self, text):
        match text:
            case "sleep": time.sleep(600)
            case "raise": raise KeyError("no such\\nthing")
            case "leave": sys.exit("bye")
            case "die": os._exit(3)
            case "fork": os.fork()
            case "closes": os.closerange(3, 99)
            case "set": return (str({str(i) for i in range(50)}), 0.0)
            case "late": os.system(f"(sleep 0.3; kill -9 {os.getpid()}) &")
            case "writes":
                for fd in os.listdir("/proc/self/fd"):
                    try: os.write(int(fd), b"[1]\\n")
                    except OSError: pass
            case "nan": return ("a", math.nan)
            case "megabytes": return ("a" * 2_000_000, 0.0)
            case "none": return None
            case "number": return (5, 0.0)
            case "half": return ("\\ud800", 0.0)
            case "end": return ("over", 1, True, False, {"success": True, "odd": {1, 2}})
            case "differs" if os.path.exists("differs"): return ("other", 0.0)
            case "differs": open("differs", "w").close()
        return (f"turn {self.turns} {random.random()}", 0.5)

class Refused:
    def __init__(self):
        raise ValueError("no licence")
    def reset(self, *, seed, row): ...
    def step(self, text): ...

class Pids(Unruly):
    def __init__(self):
        write_pid()
        if os.fork() == 0:
            os.setsid()
            write_pid()
            time.sleep(600)
'''


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("games")
    (folder / "unruly_games.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
        patch.chdir(folder)
        yield


def pool_of(name: str = "Unruly", **keys: Any) -> ProcessPool:
    target = f"unruly_games:{name}"
    pool = build_pool(config_of("custom", target=target, run_code=True, **keys))
    assert isinstance(pool, ProcessPool)
    return pool


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    """A pool for several tests: each begins its episodes anew."""
    made = pool_of(step_seconds=1.5)
    yield made
    made.close()


def one(pool: ProcessPool) -> Reply:
    (reply,) = pool.replies(wait=True)
    return reply


def begun(pool: ProcessPool, episode: int, word: str = "") -> Reply:
    pool.reset(episode, seed=episode, row={"word": word})
    return one(pool)


def answered(pool: ProcessPool, episode: int, text: str) -> Reply:
    pool.step(episode, text)
    return one(pool)


FAILURES = [
    ("sleep", "timeout", "it took more than 1.5 s"),
    ("raise", "exception", "KeyError: 'no such\\nthing'"),
    ("leave", "exception", "SystemExit: bye"),
    ("die", "died", "its process ended"),
    ("closes", "died", "its process ended"),
    ("writes", "died", "its process ended"),
    ("nan", "invalid", "the reward is nan: must be a finite number up to 1e15"),
    ("megabytes", "invalid", "the observation has 2000000 characters > 1000000"),
    ("half", "invalid", "the observation is not valid Unicode"),
]


def test_each_failure_has_its_name_and_leaves_the_neighbours_alone(pool: ProcessPool) -> None:
    undisturbed = [begun(pool, 1000).step, answered(pool, 1000, "a").step]
    undisturbed += [answered(pool, 1000, "b").step]
    assert undisturbed[0].observation.text.startswith("begin 1000 0.")
    for text, name, problem in FAILURES:
        found = [begun(pool, 1000).step, answered(pool, 1000, "a").step]
        begun(pool, 7)
        failure = answered(pool, 7, text)
        assert (failure.failure, failure.problem) == (FailureName(name), problem), text
        with pytest.raises(KeyError, match="episode 7 has not begun, or has ended"):
            pool.step(7, "again")
        assert [*found, answered(pool, 1000, "b").step] == undisturbed, text


def test_a_reset_can_fail_too(pool: ProcessPool) -> None:
    failures = {"die": "died", "raise": "exception", "number": "invalid", "none": "exception"}
    for word, name in failures.items():
        assert begun(pool, 0, word).failure == name
        assert begun(pool, 0).failure is None


def test_an_episode_can_end_and_begin_again(pool: ProcessPool) -> None:
    first = begun(pool, 3)
    end = answered(pool, 3, "end")
    assert end.step[:4] == (Observation("over"), 1.0, True, False)
    assert end.step.info == {"success": True, "odd": "{1, 2}"}
    with pytest.raises(KeyError):
        pool.step(3, "more")
    assert begun(pool, 3) == first
    assert pool.replies(wait=True) == pool.replies(wait=False) == []


def test_a_forked_process_answers_only_once(pool: ProcessPool) -> None:
    begun(pool, 0)
    assert answered(pool, 0, "fork").failure is None
    assert answered(pool, 0, "x").step.observation.text.startswith("turn 2")


def test_a_process_that_ends_between_calls_fails_no_episode(pool: ProcessPool) -> None:
    undisturbed = [begun(pool, 0), answered(pool, 0, "late x"), answered(pool, 0, "x")]
    found = [begun(pool, 0), answered(pool, 0, "late")]
    time.sleep(1)
    found.append(answered(pool, 0, "x"))
    assert found == undisturbed


def test_sets_have_the_same_order_after_a_replay(pool: ProcessPool) -> None:
    begun(pool, 0)
    assert answered(pool, 0, "set").failure is None
    begun(pool, 1)
    assert answered(pool, 1, "die").failure == "died"
    assert answered(pool, 0, "x").failure is None


def test_an_episode_that_cannot_be_replayed_fails(pool: ProcessPool) -> None:
    begun(pool, 0)
    assert answered(pool, 0, "differs").failure is None
    begun(pool, 1)
    assert answered(pool, 1, "die").failure == "died"
    reply = answered(pool, 0, "x")
    assert reply.failure == "invalid"
    assert "answered differently when it was replayed" in reply.problem


def test_a_new_episode_takes_the_place_of_one_whose_call_runs(pool: ProcessPool) -> None:
    undisturbed = begun(pool, 0)
    pool.step(0, "sleep")
    pool.reset(0, seed=0, row={})
    assert one(pool) == undisturbed


WORDS = ["a", "sleep", "raise", "die", "nan", "endless", "end"]


@pytest.mark.slow
def test_environments_that_misbehave_are_counted_exactly() -> None:
    """Play 12 turns: episode e says WORDS[e % 7] in turn e % 3, and "go on" in the others."""
    pool = pool_of(processes=3, step_seconds=2.0)
    counts: Counter[str] = Counter()
    turns = dict.fromkeys(range(21), 0)
    waiting, until = len(turns), time.monotonic() + 120
    for episode in turns:
        pool.reset(episode, seed=episode, row={})
    while waiting:
        assert time.monotonic() < until, "the pool hangs"
        for reply in pool.replies(wait=True):
            episode = reply.episode
            if reply.failure is not None or reply.step.terminated:
                counts[reply.failure or "end"] += 1
                del turns[episode]
            elif turns[episode] < 12:
                said = WORDS[episode % 7] if turns[episode] == episode % 3 else "go on"
                if turns[episode] > 0:
                    text = reply.step.observation.text
                    assert text.startswith(f"turn {turns[episode]} "), "it lost a turn"
                turns[episode] += 1
                pool.step(episode, said)
                continue
            waiting -= 1
    pool.close()
    assert counts == Counter(timeout=3, exception=3, died=3, invalid=3, end=3)
    assert turns == {e: 12 for e in range(21) if WORDS[e % 7] in ("a", "endless")}


def test_a_call_that_hangs_delays_no_other_process() -> None:
    pool = pool_of(processes=2, step_seconds=5.0)
    begun(pool, 0)
    begun(pool, 1)
    pool.step(0, "sleep")
    started = time.monotonic()
    assert answered(pool, 1, "x").episode == 1
    assert time.monotonic() - started < 4
    pool.close()


def test_an_environment_that_cannot_be_made_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="ValueError: no licence"):
        pool_of("Refused")
    with pytest.raises(ConfigError, match=r"environment\.run_code=true"):
        build_pool(config_of("custom", target="unruly_games:Refused"))


def pids(least: int) -> list[Path]:
    """The processes that environments have noted, when there are this many."""
    wait_for(lambda: len(Path("pids").read_text().split()) >= least, seconds=10)
    return [Path("/proc", pid) for pid in Path("pids").read_text().split()]


def test_no_process_outlives_the_pool() -> None:
    Path("pids").unlink(missing_ok=True)
    pool = pool_of("Pids", processes=2, step_seconds=YEAR_S)
    begun(pool, 0)
    left = pids(least=4)
    pool.close()
    wait_for(lambda: not any(process.exists() for process in left), seconds=10)
