"""The pools of a rank's environments: in the rank's process, or in processes that may fail.

A process and its host exchange lines of JSON. The host sends the configuration, and the process
answers with the environment's facts or an error. For each call, the host sends ``{"episode": e,
"start": [seed, row]}``, ``{"episode": e, "text": turn}`` or ``{"episode": e, "player": name}``, and
the process answers with the fields of a ``Reply``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait as wait_for_any
from random import Random
from typing import Any

from rlhf.base.errors import ConfigError, RlhfError
from rlhf.base.isolated_process import failure_reason, import_user_object, serve_messages
from rlhf.options.environments.adapters import (
    GemText,
    GymnasiumText,
    ReasoningQuestion,
    SeparateRandomness,
    TextArenaGame,
    seed_global_random,
)
from rlhf.options.environments.embedded import Blackjack, Calculator, NumberGuessing
from rlhf.options.environments.environment_host import Host
from rlhf.options.environments.environment_rules import check_environment_keys
from rlhf.options.environments.interface import (
    Environment,
    EnvironmentFacts,
    EpisodeStart,
    Player,
    Reply,
    Step,
    call_environment,
    parse_observation,
    parse_step,
)
from rlhf.options.environments.keys import EnvironmentConfig, EnvironmentKind, FailureRewards
from rlhf.options.environments.tools import ToolEnvironment, has_tools

# The name of the environment's method that chooses a turn for each player.
TURN_METHODS = {Player.expert: "demonstration", Player.random: "random_turn"}
LONGEST_WAIT = 1000.0  # seconds; poll takes milliseconds, which must fit into a C int


def read_environment_facts(environment: Environment) -> EnvironmentFacts:
    """Return the optimum of an environment, and the players for which it has methods."""
    optimum = getattr(environment, "optimum", None)
    players = tuple(player for player, name in TURN_METHODS.items() if hasattr(environment, name))
    return EnvironmentFacts(optimum, players)


class EpisodeEnvironments:
    """The environments of this process's episodes; each is dropped when its episode ends."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._environments: dict[int, tuple[Environment, Random]] = {}

    def reset(self, episode: int, start: EpisodeStart) -> Reply:
        """Make a new environment, and begin the episode in it."""

        def make_and_reset() -> Step:
            environment = self._make()
            self._environments[episode] = environment, Random(f"random {start.seed}")
            return Step(parse_observation(environment.reset(seed=start.seed, row=start.row)))

        return self._drop_if_ended(call_environment(episode, make_and_reset))

    def step(self, episode: int, turn: str | Player) -> Reply:
        """Send a turn, or let a player choose the turn; raise KeyError if the episode has ended."""
        environment, rng = self._environments[episode]
        text = ""

        def take_step() -> Step:
            nonlocal text
            text = self._choose_turn(turn, environment, rng)
            return parse_step(environment.step(text))

        reply = call_environment(episode, take_step)
        if isinstance(turn, Player):
            reply = reply._replace(turn=text)
        return self._drop_if_ended(reply)

    def _choose_turn(self, turn: str | Player, environment: Any, rng: Random) -> str:
        match turn:
            case Player.expert:
                return str(environment.demonstration())
            case Player.random:
                return str(environment.random_turn(rng))
            case text:
                return text

    def _drop_if_ended(self, reply: Reply) -> Reply:
        if reply.has_ended:
            self._environments.pop(reply.episode, None)
        return reply


class LocalPool:
    """A pool whose environments run in this process, without a time limit for their calls."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.facts = read_environment_facts(make())  # a wrong configuration raises here
        self._episodes = EpisodeEnvironments(make)
        self._replies: list[Reply] = []

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin the episode with this number; drop an earlier episode of the same number."""
        self._replies.append(self._episodes.reset(episode, EpisodeStart(seed, row)))

    def step(self, episode: int, turn: str | Player) -> None:
        """Send a turn of the policy to an episode, or let a player choose the turn."""
        self._replies.append(self._episodes.step(episode, turn))

    def replies(self, *, wait: bool) -> list[Reply]:  # noqa: ARG002 - calls are answered at once
        """Return the replies to all calls since ``replies`` was last called."""
        new, self._replies = self._replies, []
        return new

    def close(self) -> None:
        """Drop the replies that have not been read."""
        self._replies = []


class ProcessPool:
    """A pool of ``config.processes`` processes; episode e runs in process e % config.processes.

    If a call takes more than ``config.step_seconds``, the process and the call's episode are ended.
    Other episodes of this process are replayed in a new process before their next turn.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the processes; raise ConfigError if one of them cannot make the environment."""
        self._hosts = [Host(config) for _ in range(config.processes)]
        self._failures: list[Reply] = []  # replies to calls that could not be sent
        try:
            for host in self._hosts:
                host.start()
            for host in self._hosts:
                host.wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.facts = self._hosts[0].facts

    def reset(self, episode: int, *, seed: int, row: Mapping[str, Any]) -> None:
        """Begin the episode with this number; drop an earlier episode of the same number."""
        self._failures += self._host(episode).begin_episode(episode, EpisodeStart(seed, row))

    def step(self, episode: int, turn: str | Player) -> None:
        """Send a turn of the policy to an episode, or let a player choose the turn."""
        self._failures += self._host(episode).send_turn(episode, turn)

    def replies(self, *, wait: bool) -> list[Reply]:
        """Return new replies; with ``wait``, at least one, unless all calls have been answered."""
        new, self._failures = self._failures, []
        while True:
            running: dict[Any, Host] = {
                host.process.fileno(): host for host in self._hosts if host.process
            }
            deadline = min(host.deadline for host in self._hosts)
            seconds = min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT)
            seconds = seconds if wait and not new else 0.0
            is_open = any(host.has_open_calls for host in self._hosts)
            for readable in wait_for_any([*running], seconds if is_open else 0.0):
                new += running[readable].receive_replies()
            for host in self._hosts:
                new += host.end_if_expired()
            if new or not wait or not any(host.has_open_calls for host in self._hosts):
                return new

    def close(self) -> None:
        """End all processes."""
        for host in self._hosts:
            host.close()

    def _host(self, episode: int) -> Host:
        return self._hosts[episode % len(self._hosts)]


def build_pool(config: EnvironmentConfig) -> LocalPool | ProcessPool:
    """Return one rank's pool of environments; the pool's processes have started."""
    if config.processes > 0:
        return ProcessPool(config)
    return LocalPool(build_environment_factory(config))


def serve_environments(descriptor: int) -> None:
    """Run the calls that arrive on the socket, and send replies, until its other end is closed."""
    serve_messages(descriptor, _answer_messages)


def _answer_messages(messages: Iterator[Any]) -> Iterator[dict[str, Any]]:
    config = next(messages, None)
    if config is None:
        return
    try:
        kind, rewards = EnvironmentKind(config["kind"]), FailureRewards(**config["failure_rewards"])
        typed = EnvironmentConfig(**config | {"kind": kind, "failure_rewards": rewards})
        make = build_environment_factory(typed)
        facts = read_environment_facts(make())
    except RlhfError as error:
        yield {"error": str(error)}
        return
    except BaseException as error:  # the user's class may raise anything
        yield {"error": f"environment.target={config['target']}: {failure_reason(error, None)}"}
        return
    yield facts._asdict()
    episodes = EpisodeEnvironments(make)
    for call in messages:
        if "start" in call:
            reply = episodes.reset(call["episode"], EpisodeStart(*call["start"]))
        else:
            turn = Player(call["player"]) if "player" in call else call["text"]
            reply = episodes.step(call["episode"], turn)
        yield reply._asdict()


EMBEDDED: dict[EnvironmentKind, Callable[..., Environment]] = {
    EnvironmentKind.number_guessing: NumberGuessing,
    EnvironmentKind.calculator: Calculator,
    EnvironmentKind.blackjack: Blackjack,
}
ADAPTERS: dict[EnvironmentKind, Callable[..., Environment]] = {
    EnvironmentKind.gymnasium: GymnasiumText,
    EnvironmentKind.textarena: TextArenaGame,
    EnvironmentKind.reasoning_gym: ReasoningQuestion,
    EnvironmentKind.gem: GemText,
}


def build_environment_factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Return a function that makes environments; a user's code is imported only once, here."""
    kind = config.kind
    if not config.is_used:
        raise ConfigError(f"environment.kind={kind}: there is no environment to make")
    check_environment_keys(config)
    if kind in EMBEDDED:
        return lambda: _make_environment(f"environment.kind={kind}", EMBEDDED[kind], config)
    if kind in ADAPTERS:
        key = f"environment.id={config.id}"
        return lambda: SeparateRandomness(
            _make_environment(key, ADAPTERS[kind], config, id=config.id)
        )
    return _build_user_factory(config)


def _build_user_factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    user_class, _ = import_user_object("environment.target", str(config.target))
    key = f"environment.target={config.target}"
    if not inspect.isclass(user_class):
        raise ConfigError(f"{key}: must be a class, such as my_games:Chess")
    has_steps = all(callable(getattr(user_class, name, None)) for name in ("reset", "step"))
    if config.kind is EnvironmentKind.custom and has_steps:
        return lambda: SeparateRandomness(_make_environment(key, user_class, config))
    if not has_tools(user_class):
        methods = "reset(self, **row) and a public method for each tool"
        if config.kind is EnvironmentKind.custom:
            methods = f"reset(self, *, seed, row) and step(self, text), or {methods}"
        raise ConfigError(f"{key}: must have the methods {methods}")
    return lambda: SeparateRandomness(ToolEnvironment(_make_environment(key, user_class, config)))


def _make_environment(
    key: str, factory: Callable[..., Any], config: EnvironmentConfig, **arguments: Any
) -> Any:
    """Call ``factory`` with ``environment.options``; raise ConfigError if it refuses them.

    The global random generators start from seed 0, so that all calls draw the same numbers.
    """
    try:
        inspect.signature(factory).bind(**arguments, **config.options)
    except TypeError as error:
        raise ConfigError(
            f"environment.options={config.options}: {key} does not take them ({error}); it takes "
            f"{inspect.signature(factory)}"
        ) from error
    with seed_global_random(0):
        return factory(**arguments, **config.options)
