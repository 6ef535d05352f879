"""Ranks that monitor one another, here all in one process."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from rlhf.runtime import peer_monitor
from rlhf.runtime.peer_monitor import ADDRESS_KEY, PeerMonitor
from tests.runs import wait_for

pytestmark = pytest.mark.slow

HOST = socket.gethostname()
MASTER = ("localhost", 29999)


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_monitor, "GRACE_S", 0.2)


class Ranks:
    """Three ranks and the losses that each of them noticed."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.losses: list[list[str]] = [[], [], []]
        self.monitors = [
            PeerMonitor(
                self.store,
                rank,
                name=f"rank {rank} on {HOST}",
                master=MASTER,
                on_loss=self.losses[rank].append,
            )
            for rank in range(3)
        ]
        wait_for(lambda: [len(monitor._peers) for monitor in self.monitors] == [2, 1, 1])

    def lose(self, rank: int) -> None:
        """End the connections of a rank, as the kernel does with those of a killed process."""
        for peer in list(self.monitors[rank]._peers):
            peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, and wait for the threads that close them."""
        for monitor in self.monitors:
            monitor._send_and_disconnect(done=True)
        wait_for(lambda: not any(monitor._peers for monitor in self.monitors))


def test_on_one_machine_only_its_own_ranks_can_connect() -> None:
    store = HashStore()
    monitor = PeerMonitor(
        store, 0, name="rank 0", master=MASTER, on_loss=lambda _: None, is_one_machine=True
    )
    address = json.loads(store.get(ADDRESS_KEY))
    assert address["host"] == "127.0.0.1"
    assert monitor._server.getsockname()[0] == "127.0.0.1"
    monitor._server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


@pytest.fixture
def ranks(no_launcher: None) -> Iterator[Ranks]:
    three = Ranks()
    yield three
    three.close()


@pytest.mark.parametrize("failed", [0, 1])
def test_the_words_of_one_rank_reach_all_others(failed: int, ranks: Ranks) -> None:
    ranks.monitors[failed].announce_failure("ValueError: broken")
    others = {0, 1, 2} - {failed}
    wait_for(lambda: all(ranks.losses[rank] for rank in others))
    news = [f"rank {failed} on {HOST} failed: ValueError: broken"]
    assert ranks.losses == [[] if rank == failed else news for rank in range(3)]


def test_words_count_before_the_loss_that_comes_with_them(ranks: Ranks) -> None:
    ranks.lose(2)
    ranks.monitors[1].announce_failure("the cause")
    wait_for(lambda: bool(ranks.losses[0]))
    assert ranks.losses[0] == [f"rank 1 on {HOST} failed: the cause"]


def test_a_rank_that_ends_without_a_word_is_named(ranks: Ranks) -> None:
    began = time.monotonic()
    ranks.lose(2)
    wait_for(lambda: bool(ranks.losses[0] and ranks.losses[1]))
    news = [f"rank 2 on {HOST} ended without an error: it was killed, or its node is down"]
    assert ranks.losses[:2] == [news, news]
    assert time.monotonic() - began >= peer_monitor.GRACE_S, (
        "what ended that rank may be ending this one, too"
    )


def test_probes_find_within_15_seconds_that_the_machine_of_a_peer_is_gone(ranks: Ranks) -> None:
    for peer in (peer for monitor in ranks.monitors for peer in monitor._peers):
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (peer.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        assert idle + interval * count < 15


def test_the_end_of_a_run_is_no_loss(ranks: Ranks) -> None:
    for rank in (2, 0, 1):
        ranks.monitors[rank].announce_success()
        time.sleep(0.4)  # the connection is closed, and what it means is clear
    assert ranks.losses == [[], [], []]


def test_strangers_are_not_listened_to(ranks: Ranks) -> None:
    port = json.loads(ranks.store.get(ADDRESS_KEY))["port"]
    for words in (
        b"GET / HTTP/1.1\n\n",
        b'{"failed": "all"}\n',
        b'{"token": "x", "failed": "y"}\n',
    ):
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.settimeout(5)
            stranger.sendall(words)
            assert stranger.recv(1) == b"", "the connection is closed"
    time.sleep(0.4)
    assert ranks.losses == [[], [], []]


@pytest.mark.usefixtures("no_launcher")
def test_a_rank_whose_launcher_is_gone_says_so() -> None:
    ranks = Ranks()
    threading.Thread(target=ranks.monitors[1]._watch_launcher, args=(os.getppid() + 1,)).start()
    wait_for(lambda: all(ranks.losses))
    assert ranks.losses == [[f"the launcher of rank 1 on {HOST} was killed"]] * 3
    ranks.close()
