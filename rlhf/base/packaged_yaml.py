"""Read the tables of the package that are YAML files beside the module that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml_beside(module_file: str, name: str) -> Any:
    """Return the content of the file ``name`` in the folder of ``module_file``."""
    text = Path(module_file).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
