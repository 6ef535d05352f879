"""Hashes of bytes and files, and the comparison of secrets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from io import BufferedReader


def sha256_of(data: bytes | Iterable[bytes]) -> str:
    """Return the SHA-256 of ``data``, or of all its parts joined, as 64 hexadecimal digits."""
    found = hashlib.sha256()
    for part in [data] if isinstance(data, bytes) else data:
        found.update(part)
    return found.hexdigest()


def sha256_of_file(file: BufferedReader) -> str:
    """Return the SHA-256 of an open file, which is read to its end."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def blake2b_of(data: bytes) -> bytes:
    """Return the BLAKE2b of ``data`` as 16 bytes; it is faster than SHA-256."""
    return hashlib.blake2b(data, digest_size=16).digest()


def is_same_secret(given: str, secret: str) -> bool:
    """Return True if both texts are equal; the time taken does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), secret.encode())
