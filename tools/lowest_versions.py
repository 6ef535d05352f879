"""Print the lower bounds of pyproject.toml as constraints of pip, for ``make test-lowest``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest_versions(pyproject: str) -> list[str]:
    """Return "name==version" for the lower bound of each package that a run needs."""
    bounds = tomllib.loads(pyproject)["project"]["dependencies"]
    return [re.sub(r"^([\w.-]+)>=([\w.]+).*", r"\1==\2", bound) for bound in bounds]


if __name__ == "__main__":
    print("\n".join(lowest_versions(PYPROJECT.read_text(encoding="utf-8"))))
