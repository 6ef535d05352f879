"""Endpoints that answer with anything, and addresses that name none."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

from rlhf.config.choices import RewardKind
from rlhf.config.schema.keys import check_bounds
from rlhf.config.schema.rewards import RewardTerm, check_reward_term
from tests.fuzz.case import Case
from tests.fuzz.reward_functions import ROWS, SECONDS, score_batches

GOOD = json.dumps({"scores": [1.0, 2.0, 3.0]}).encode()
# Bodies, and whether each must be refused.
BODIES: dict[bytes, bool] = {
    GOOD: False,
    b'{"scores": [1, 2, 3], "more": {"a": []}}': False,
    b'{"scores": [1, 2]}': True,
    b'{"scores": [1, 2, 3, 4]}': True,
    b'{"scores": []}': True,
    b'{"scores": null}': True,
    b'{"scores": {"0": 1, "1": 2, "2": 3}}': True,
    b'{"scores": ["1", "2", "3"]}': True,
    b'{"scores": [true, false, true]}': True,
    b'{"scores": [null, 1, 2]}': True,
    b'{"scores": [[1], [2], [3]]}': True,
    b'{"scores": [1, NaN, 3]}': True,
    b'{"scores": [1, -Infinity, 3]}': True,
    b'{"scores": [1, 1e999, 3]}': True,
    b'{"scores": [1, 1e308, 3]}': True,
    b'{"scores": [1, ' + b"9" * 400 + b", 3]}": True,
    b'{"scores": [1, ' + b"9" * 5000 + b", 3]}": True,
    b'{"scores": 3}': True,
    b'{"score": [1, 2, 3]}': True,
    b"[1, 2, 3]": True,
    b'"scores"': True,
    b"": True,
    b"null": True,
    b"<html>": True,
    b"[" * 100_000: True,
    b'{"scores": [1, 2, 3]}}': True,
    b"\xff\xfe\x00": True,
    b"\x1f\x8b\x08\x00\x00\x00\x00\x00": True,
    b'{"scores": [1, 2, 3]}'.decode().encode("utf-16"): False,  # json reads it
}
HEADS = (
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 500 Oops\r\n",
    b"HTTP/1.1 429 Slow\r\nRetry-After: 99999\r\n",
    b"HTTP/1.1 503 Wait\r\nRetry-After: never\r\n",
    b"HTTP/1.1 404 None\r\n",
    b"HTTP/1.1 302 Away\r\nLocation: http://127.0.0.1:9/\r\n",
    b"HTTP/1.1 302 Away\r\nLocation: file:///etc/passwd\r\n",
    b"HTTP/1.1 204 Empty\r\n",
    b"HTTP/1.1 999 Odd\r\n",
    b"HTTP/9.9 200 OK\r\n",
    b"HTTP/1.1 twohundred OK\r\n",
    b"ICY 200 OK\r\n",
    b"\x00\x01\x02\r\n",
    b"",
)
FRAMES = ("length", "short", "long", "negative", "word", "none", "chunked", "gzip", "many", "twice")
ENDINGS = ("whole", "cut", "drip", "endless", "endless head", "silent", "continue", "reset")
URLS = (
    "http://[::1/x",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:abc/",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:-1/",
    "http://127.0.0.1:9/",
    "http://a b/x",
    "http://a..b/",
    "http:///x",
    "http://",
    "//127.0.0.1/",
    "ftp://127.0.0.1/",
    "file:///etc/passwd",
    "http://\x00/",
    "http://127.0.0.1/\r\nHost: x",
    "http://é.invalid/",
    "http://%zz/",
    "http://[fe80::1%25eth0]:9/",
    "http://1.2.3.4.5:9/",
    "http://0x7f.1:9/",
    "https://127.0.0.1:9/",
    "javascript:alert(1)",
    "",
)


def cases(draw: Random, _: Path) -> Iterator[Case]:
    """Yield answers of an endpoint that are damaged in one or more places, and addresses."""
    while True:
        if draw.random() < 0.2:
            url = draw.choice(URLS)
            at = draw.randrange(len(url) + 1)
            url = url[:at] + draw.choice(["", "", "#", "@", "[", "]", " ", "\t", "é"]) + url[at:]
            name = f"url={url!r}"
            yield Case(name, lambda u=url: asked(RewardTerm(kind=RewardKind.http, url=u)))  # type: ignore[misc]
            continue
        body = GOOD if draw.random() < 0.2 else draw.choice(list(BODIES))
        head = HEADS[0] if draw.random() < 0.6 else draw.choice(HEADS)
        frame = "length" if draw.random() < 0.5 else draw.choice(FRAMES)
        ending = "whole" if draw.random() < 0.6 else draw.choice(ENDINGS)
        # A length that is no number is ignored, as if there were none.
        is_plain = frame in {"length", "none", "negative", "word"} and ending == "whole"
        must_refuse = BODIES[body] or not is_plain or head is not HEADS[0]
        answer = framed(head, frame, body, draw)
        if draw.random() < 0.15:
            at = draw.randrange(len(answer) or 1)
            answer = answer[:at] + bytes([draw.randrange(256)]) + answer[at + 1 :]
            must_refuse = False
        if frame in {"twice", "many", "gzip", "chunked", "none", "long"} or ending == "drip":
            must_refuse = must_refuse and BODIES[body] and ending == "whole"
        retries = draw.randrange(3)
        name = f"{head[:30]!r} {frame} {ending} {body[:40]!r}"
        yield Case(
            name,
            lambda a=answer, e=ending, r=retries: served(a, e, r),  # type: ignore[misc]
            must_refuse,
        )


def framed(head: bytes, frame: str, body: bytes, draw: Random) -> bytes:
    """Return an answer whose headers describe ``body`` rightly or wrongly."""
    size = draw.choice([b"%x" % len(body), b"-5", b"ffffffffffff", b"zz", b"", b"1" * 9999])
    fields = {
        "length": b"Content-Length: %d\r\n" % len(body),
        "short": b"Content-Length: %d\r\n" % (len(body) // 2),
        "long": b"Content-Length: %d\r\n" % (len(body) + 9),
        "negative": b"Content-Length: -5\r\n",
        "word": b"Content-Length: many\r\n",
        "twice": b"Content-Length: 3\r\nContent-Length: %d\r\n" % len(body),
        "gzip": b"Content-Encoding: gzip\r\n",
        "many": b"X: y\r\n" * draw.choice([90, 101, 5000]),
        "chunked": b"Transfer-Encoding: chunked\r\n",
        "none": b"",
    }
    if frame == "chunked":
        body = size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    return head + fields[frame] + b"\r\n" + body


def served(answer: bytes, ending: str, retries: int) -> None:
    """Ask an endpoint of this process that answers every request alike."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=[server, answer, ending], daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        asked(RewardTerm(kind=RewardKind.http, url=url, retries=retries, timeout_seconds=SECONDS))


def serve(server: socket.socket, answer: bytes, ending: str) -> None:
    """Accept connections until the process ends."""
    while True:
        connection, _ = server.accept()
        threading.Thread(target=answer_one, args=[connection, answer, ending], daemon=True).start()


def answer_one(connection: socket.socket, answer: bytes, ending: str) -> None:
    """Read a request, and answer it to the end, or not."""
    opening = {
        "endless": answer.partition(b"\r\n")[0] + b"\r\n\r\n",
        "endless head": b"HTTP/1.1 200 OK\r\nX: ",
        "continue": b"",
    }
    with suppress(OSError), connection:
        if not connection.recv(1 << 20):
            return  # the check that something listens
        if ending == "silent":
            time.sleep(60)
        if ending == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return
        if ending in opening:
            connection.sendall(opening[ending])
        while ending in opening:
            connection.sendall(b"HTTP/1.1 100 Go\r\n\r\n" if ending == "continue" else b"x" * 65536)
        for byte in answer if ending == "drip" else ():
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
        connection.sendall({"cut": answer[: len(answer) // 2], "drip": b""}.get(ending, answer))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def asked(part: RewardTerm) -> None:
    """Check the keys of a part, and score with it, as a run does."""
    check_bounds(part, "rewards.remote.")
    check_reward_term("rewards.remote", part)
    score_batches({"remote": part}, batches=1)


assert len(json.loads(GOOD)["scores"]) == ROWS
