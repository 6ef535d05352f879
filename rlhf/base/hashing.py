"""The hash that identifies files and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def sha256_of(data: bytes | Iterable[bytes]) -> str:
    """Return the SHA-256 of ``data``, or of all its parts joined, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in [data] if isinstance(data, bytes) else data:
        digest.update(part)
    return digest.hexdigest()
