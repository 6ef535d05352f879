"""Ranks watch one another: when one ends before its time the others end too, and say which.

A collective waits for hours for a rank that is gone. So every rank keeps a connection to rank 0,
which passes on what happens. The kernel closes a connection with its process, and asks now and then
whether the other machine is still there, so nothing depends on what a busy rank gets round to.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

ADDRESS_KEY = "rlhf/watch"
# A machine that is gone is noticed after 5 + 3 x 3 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
# What ended one rank may be about to end this one, or to tell of it: a signal, its own words.
GRACE_S = 1.0
CONNECT_S = 60.0
LONGEST = 1 << 20  # bytes of one message


class Store(Protocol):
    """The part of torch's TCPStore that is used here."""

    def get(self, key: str, /) -> bytes:
        """The value of a key; waits for it."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""


class Watch:
    """This rank's connections to those that it watches, read by a thread of their own.

    ``on_loss`` is called there, once, with what happened to another rank; it ends the process.
    """

    def __init__(
        self, store: Store, rank: int, *, master: tuple[str, int], on_loss: Callable[[str], None]
    ) -> None:
        self._name = f"rank {rank} on {socket.gethostname()}"
        self._on_loss = on_loss
        self._is_ending = False  # by itself: what happens to others is no news any more
        self._is_over = threading.Event()
        self._loss: tuple[float, str] | None = None  # when it was noticed, and what
        self._parent = os.getppid() if _has_launcher() else None
        self._selector = selectors.DefaultSelector()
        self._token = secrets.token_hex()
        if rank == 0:
            self._listen(store, master)
        else:
            self._connect(store, master[0])
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank ends, and why."""
        self._end(failed=f"{self._name} failed: {reason}")

    def done(self) -> None:
        """Tell the others that this rank ends because all is done."""
        self._end(done=True)

    def _listen(self, store: Store, master: tuple[str, int]) -> None:
        """Rank 0 waits for the others, on the address by which it reaches the meeting point."""
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self._selector.register(server, selectors.EVENT_READ, None)
        host = "" if _is_here(master) else _route_to(master)  # empty: where all of them meet
        port = server.getsockname()[1]
        store.set(ADDRESS_KEY, json.dumps({"host": host, "port": port, "token": self._token}))

    def _connect(self, store: Store, master: str) -> None:
        """Every other rank says to rank 0 who it is."""
        address = json.loads(store.get(ADDRESS_KEY))
        there = (address["host"] or master, address["port"])
        peer = _Peer(socket.create_connection(there, timeout=CONNECT_S), name="rank 0")
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        peer.say(token=address["token"], name=self._name)

    def _peers(self) -> list[_Peer]:
        found = (key.data for key in list(self._selector.get_map().values()))
        return [peer for peer in found if peer is not None]

    def _end(self, **words: Any) -> None:
        """Say something last to all that are still there and known."""
        self._is_ending = True
        for peer in self._peers():
            if peer.is_known:
                peer.say(**words)
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(timeout=GRACE_S / 4):
                if key.data is None:
                    self._welcome(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._hear(key.data)
            if self._parent is not None and os.getppid() != self._parent:
                self._lose(f"the launcher of {self._name} was killed", at=0.0)
            if self._loss is not None and time.monotonic() > self._loss[0] + GRACE_S:
                self._follow(self._loss[1])
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _welcome(self, server: socket.socket) -> None:
        """Rank 0: another connects, which must say who it is."""
        connection, _ = server.accept()
        peer = _Peer(connection, name="", is_known=False)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _hear(self, peer: _Peer) -> None:
        """Read what ``peer`` said, or that it is gone."""
        words = peer.hear()
        for each in words or ():
            if not peer.is_known:
                if each.get("token") != self._token:
                    words = None  # a stranger
                    break
                peer.is_known, peer.name = True, str(each["name"])
                peer.say(name=self._name)
            peer.name = str(each.get("name", peer.name))
            peer.is_done = peer.is_done or bool(each.get("done"))
            if "failed" in each:
                self._lose(str(each["failed"]), at=0.0)
        if words is None:
            self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.is_known and not peer.is_done:
                self._lose(
                    f"{peer.name} ended without a word: it was killed, or its node is gone",
                    at=time.monotonic(),
                )

    def _lose(self, what: str, *, at: float) -> None:
        """Keep what happened first; a rank's own words count before its end was noticed."""
        if self._loss is None or at < self._loss[0]:
            self._loss = (at, what)

    def _follow(self, what: str) -> None:
        if not self._is_ending:
            self._end(failed=what)
            self._on_loss(what)


class _Peer:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket, *, name: str, is_known: bool = True) -> None:
        self.socket = connection
        self.name = name
        self.is_known = is_known
        self.is_done = False
        self._unread = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # macOS calls the first one otherwise
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        connection.settimeout(CONNECT_S)

    def say(self, **words: Any) -> None:
        """Send one object; that the other is gone shows when it is read from."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]] | None:
        """The objects that have come whole; None when the connection has ended."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        if not data or len(self._unread) > LONGEST:
            return None
        try:
            words = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return words if all(isinstance(each, dict) for each in words) else None


def _has_launcher() -> bool:
    """Whether torchrun's agent or the DeepSpeed launcher is this process's parent."""
    return bool({"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys())


def _route_to(master: tuple[str, int]) -> str:
    """This machine's own address towards ``master``; nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_here(master: tuple[str, int]) -> bool:
    """Whether ``master`` is this machine: then the way to it starts where it ends."""
    there = {info[4][0] for info in socket.getaddrinfo(*master)}
    return _route_to(master) in there
