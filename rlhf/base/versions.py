"""Versions of packages."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str:
    """Return the version of ``package``, or "not installed", as for a checkout on PYTHONPATH."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
