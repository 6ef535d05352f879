"""Files that are not Python are part of an installed wheel."""

import tomllib
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
BYTECODE = "*/__pycache__/*"


def test_every_file_of_the_package_is_installed() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [
        f"{package.replace('.', '/')}/{pattern}".removeprefix("rlhf/program/").replace("**/", "")
        for package, names in setup["package-data"].items()
        for pattern in names
    ]
    paths = chain(*(ROOT.glob(f"{folder}/**/*.*") for folder in ("rlhf", "conf", "sweeps")))
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    data = [path for path in files if not path.endswith(".py") and not fnmatch(path, BYTECODE)]
    assert data
    assert [path for path in data if not any(fnmatch(path, each) for each in patterns)] == []
    assert [each for each in patterns if not any(fnmatch(path, each) for path in data)] == []
