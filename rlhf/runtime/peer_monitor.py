"""Monitor the other ranks: if a rank ends early, all others end too and name that rank.

A collective waits for hours for a rank that has died. Therefore every rank keeps a connection to
rank 0, which forwards failures. The kernel closes a connection together with its process, and
keepalive probes find a machine that is gone, so nothing depends on how busy a rank is.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ADDRESS_KEY = "rlhf/peer_monitor"
# A machine that is gone is noticed after 5 + 3 * 3 seconds.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}
# Seconds for which this rank continues after it has lost another rank.
# The same signal may end this rank too, or a message of a rank may name the cause.
GRACE_S = 1.0
CONNECT_S = 60.0  # time limit of a connection to rank 0, seconds
LOOPBACK = "127.0.0.1"
MAX_MESSAGE_BYTES = 1 << 20


class PeerMonitor:
    """This rank's connections: to rank 0, or from rank 0 to all others; one thread reads each.

    ``name`` names this rank in messages. ``on_loss`` is called once, from a thread, with the reason
    why another rank or the launcher ended, and must end the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        name: str,
        master: tuple[str, int],
        on_loss: Callable[[str], None],
        is_one_machine: bool = False,
    ) -> None:
        self._name = name
        self._on_loss = on_loss
        self._peers: set[socket.socket] = set()
        self._cause: str | None = None  # why this rank is about to end
        self._is_over = threading.Event()
        self._lock = threading.RLock()
        if rank == 0:
            self._listen(store, master, is_one_machine=is_one_machine)
        else:
            self._connect(store, master[0])
        if {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys():  # torchrun, DeepSpeed
            _start_thread(self._watch_launcher, os.getppid())

    def announce_failure(self, reason: str) -> None:
        """Send the other ranks the reason for which this rank ends."""
        self._send_and_disconnect(failed=f"{self._name} failed: {reason}")

    def announce_success(self) -> None:
        """Notify the other ranks that this rank has finished."""
        self._send_and_disconnect(done=True)

    def _listen(self, store: Store, master: tuple[str, int], *, is_one_machine: bool) -> None:
        """Accept connections of other ranks: from this machine only, or from any machine."""
        dual = socket.has_dualstack_ipv6() and not is_one_machine
        family = socket.AF_INET6 if dual else socket.AF_INET
        interface = LOOPBACK if is_one_machine else ""
        self._server = socket.create_server(
            (interface, 0), family=family, backlog=1024, dualstack_ipv6=dual
        )
        token, port = secrets.token_hex(), self._server.getsockname()[1]
        # If the host is empty, the other ranks connect to the rendezvous address.
        host = interface or ("" if _is_this_machine(master) else _find_own_address(master))
        _start_thread(self._accept_connections, token)
        store.set(ADDRESS_KEY, json.dumps({"host": host, "port": port, "token": token}))

    def _accept_connections(self, token: str) -> None:
        with self._server, contextlib.suppress(OSError):  # shutdown() ends the loop
            while True:
                _start_thread(self._read_messages, self._server.accept()[0], token)

    def _connect(self, store: Store, master: str) -> None:
        address = json.loads(store.get(ADDRESS_KEY))
        listener = (address["host"] or master, address["port"])
        peer = socket.create_connection(listener, timeout=CONNECT_S)
        _send(peer, token=address["token"], name=self._name)
        _start_thread(self._read_messages, peer, None)

    def _read_messages(self, peer: socket.socket, token: str | None) -> None:
        """Read messages until ``peer`` disconnects; disconnect a peer without the ``token``."""
        name, is_lost = "rank 0", False
        _enable_keepalive(peer)
        with peer, peer.makefile("rb") as lines, contextlib.suppress(OSError, ValueError):
            if token is not None:
                hello = json.loads(lines.readline(MAX_MESSAGE_BYTES))
                if not isinstance(hello, dict) or hello.get("token") != token:
                    return
                name = str(hello["name"])
                _send(peer, name=self._name)
            is_lost = True  # until the peer reports that it is done
            with self._lock:
                self._peers.add(peer)
            while line := lines.readline(MAX_MESSAGE_BYTES):
                news = json.loads(line)
                name, is_lost = news.get("name", name), is_lost and "done" not in news
                if "failed" in news:
                    self._end_this_rank(str(news["failed"]))
        with self._lock:
            self._peers.discard(peer)
        if is_lost:
            self._end_after_loss(
                f"{name} ended without an error: it was killed, or its node is down"
            )

    def _end_after_loss(self, cause: str) -> None:
        """End this rank after the grace period, unless another rank sends its error before then."""
        with self._lock:
            self._cause = self._cause or cause
        if not self._is_over.wait(GRACE_S):
            self._end_this_rank(self._cause)

    def _end_this_rank(self, cause: str) -> None:
        """End this rank because another rank or the launcher ended; only the first cause counts."""
        with self._lock:
            if self._is_over.is_set():
                return
            self._send_and_disconnect(failed=cause)
        self._on_loss(cause)

    def _send_and_disconnect(self, **news: Any) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._is_over.set()
            for peer in self._peers:
                _send(peer, **news)
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_WR)
            if hasattr(self, "_server"):
                self._server.shutdown(socket.SHUT_RDWR)

    def _watch_launcher(self, parent: int) -> None:
        """End this rank if its launcher, which is the parent process, has ended."""
        while not self._is_over.wait(GRACE_S / 4):
            if os.getppid() != parent:
                self._end_this_rank(f"the launcher of {self._name} was killed")


def _start_thread(target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=target, args=arguments, name="peer monitor", daemon=True).start()


def _send(peer: socket.socket, **news: Any) -> None:
    """Send a JSON object as a line; ignore a lost peer, which the reading thread notices."""
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(news).encode() + b"\n")


def _enable_keepalive(peer: socket.socket) -> None:
    """Enable keepalive probes, with which the kernel detects that the other machine is gone."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _find_own_address(master: tuple[str, int]) -> str:
    """Return this machine's address on the route to ``master``; nothing is sent."""
    family, socket_type, _, _, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket_type) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_this_machine(master: tuple[str, int]) -> bool:
    """Return True if ``master`` is this machine: the route to it begins at its own address."""
    addresses = {info[4][0] for info in socket.getaddrinfo(*master)}
    return _find_own_address(master) in addresses
