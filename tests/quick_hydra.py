"""Hydra composes some 40 files for every run that a test starts or plans; here it is quicker."""

from __future__ import annotations

import yaml
from hydra._internal import defaults_list


def compose_quickly() -> None:
    """Let Hydra read YAML with libyaml, and look for no interpolations in defaults lists.

    Those of this project have none; one would fail with an AttributeError. A quarter of the time of
    a composition went into the names that it could refer to.
    """
    yaml.SafeLoader = yaml.CSafeLoader
    defaults_list._create_interpolation_map = lambda *_: None
