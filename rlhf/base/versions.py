"""Versions of packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """Return the version of ``package``, or "not installed", for example for a source checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
