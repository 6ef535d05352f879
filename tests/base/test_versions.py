"""Versions of packages, installed or not."""

from importlib.metadata import version

from rlhf.base.versions import installed_version


def test_a_package_that_is_not_installed_has_a_version_too() -> None:
    """A checkout on PYTHONPATH ended with a traceback when it had trained its first model."""
    assert installed_version("torch") == version("torch")
    assert installed_version("rlhf-of-nobody") == "not installed"
