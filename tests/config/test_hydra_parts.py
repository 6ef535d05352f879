"""Private parts of Hydra and OmegaConf: each with the reason, all in one module, all installed."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest

from rlhf.base.packaged_yaml import read_yaml_beside
from rlhf.config import hydra_parts
from tests.structure.parsed import nodes_of

ROOT = Path(__file__).parents[2]
MODULE = "rlhf/config/hydra_parts.py"
FILES = [*sorted(ROOT.glob("rlhf/**/*.py")), *sorted(ROOT.glob("lab/**/*.py")), ROOT / "launch.py"]
# What Hydra documents; of a module, all that it has.
PUBLIC = ("hydra.main", "hydra.compose", "hydra.initialize_config_dir", "hydra.conf")
PUBLIC += ("hydra.core.config_store.ConfigStore", "hydra.core.hydra_config.HydraConfig")
PUBLIC += ("hydra.core.utils.JobReturn", "hydra.plugins.launcher", "hydra.plugins.sweeper")
PUBLIC += ("hydra.errors", "hydra.types", "omegaconf.errors")

PARTS = {
    f"{owner}.{name}": reason
    for owner, names in read_yaml_beside(__file__, "hydra_parts.yaml").items()
    for name, reason in names.items()
}


def lacks(part: str) -> bool:
    """Return True if a module, class, method or field does not exist, as installed."""
    names = part.split(".")
    for count in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for name in names[count:]:
            if not hasattr(found, name):
                return not (inspect.isclass(found) and f"{name}:" in fields_of(found))
            found = getattr(found, name)
        return False
    return True


def fields_of(kind: type) -> str:
    """Return the fields that a class declares, and those that its methods set, as ``NAME:``."""
    source = inspect.getsource(kind)
    targets = [n.targets[0] for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assign)]
    set_by_methods = [target.attr for target in targets if isinstance(target, ast.Attribute)]
    return "".join(f"{name}:" for name in [*set_by_methods, *inspect.get_annotations(kind)])


def test_the_installed_hydra_and_omegaconf_have_every_part() -> None:
    missing = [f"{part} ({reason})" for part, reason in PARTS.items() if lacks(part)]
    assert not missing, f"Hydra {hydra.__version__} lacks what {MODULE} uses: {missing}"
    assert lacks("hydra.errors.HydraException.nothing")
    assert lacks("hydra.nothing")


def test_hydra_still_says_what_its_errors_are_recognised_by() -> None:
    texts = [hydra_parts.NO_TEXT, hydra_parts.FLAGS_CONFLICT, hydra_parts.RESOLVE_ALONE]
    texts += [hydra_parts.MALFORMED, hydra_parts.NO_SUCH_KEY, hydra_parts.CHOSEN_TWICE]
    texts += hydra_parts.SWEPT
    said = "".join(path.read_text() for path in Path(hydra.__file__).parent.rglob("*.py"))
    assert [text for text in texts if text not in said] == []


def private_parts(source: str) -> Iterator[str]:
    """Yield what a file imports of both packages beside ``PUBLIC``, and their private members."""
    imported = False
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        names = [name for name in names if name.split(".")[0] in {"hydra", "omegaconf"}]
        imported |= bool(names)
        for name in names:
            of_omegaconf = name.startswith("omegaconf.") and name.count(".") == 1
            is_public = name == "hydra" or name.startswith(PUBLIC) or of_omegaconf
            if not is_public or "._" in name:
                yield name
    for node in nodes_of(source) if imported else ():
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[1] != "_":
            owner = ast.unparse(node.value)
            if owner not in {"self", "os", "sys"} and not owner.startswith("self._"):
                yield f"{owner}.{node.attr}"


def test_only_one_file_touches_private_parts() -> None:
    broken = {
        path.relative_to(ROOT).as_posix(): parts
        for path in FILES
        if (parts := [*private_parts(path.read_text())])
    }
    own = broken.pop(MODULE)
    assert broken == {}, f"move what they use to {MODULE}, and name it in hydra_parts.yaml"
    unnamed = [part for part in own if not any(name.startswith(part) for name in PARTS)]
    assert unnamed == [], "name these in hydra_parts.yaml, with the reason"


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("from hydra._internal.utils import now", "hydra._internal.utils.now"),
        ("from hydra.core.plugins import Plugins", "hydra.core.plugins.Plugins"),
        ("from omegaconf.base import Box", "omegaconf.base.Box"),
        ("from omegaconf import DictConfig\ndef f(c): return c._content", "c._content"),
    ],
)
def test_a_private_part_is_seen(source: str, part: str) -> None:
    assert [*private_parts(source)] == [part]
