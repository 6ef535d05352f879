"""Read the tables of the package that are YAML files beside the module that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml


def read_yaml_beside(module_file: str, name: str) -> Any:
    """Return the content of the file ``name`` in the folder of ``module_file``."""
    text = Path(module_file).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def merge_tables(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one table with the entries of all ``tables``; nested tables are merged, too."""
    merged: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            has_both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = merge_tables((merged[name], value)) if has_both else value
    return merged
