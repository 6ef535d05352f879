"""The interfaces in rlhf/base/seams.py are those of the options' modules."""

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from rlhf.base import seams
from rlhf.options import OPTIONS, modules_of

# The class that describes each seam, by the name of the seam.
SEAMS = {
    found[1]: each
    for each in vars(seams).values()
    if inspect.isclass(each) and (found := re.match(r"``(\w+)``: ", each.__doc__ or ""))
}


def members_of(seam: str) -> dict[str, Any]:
    """The functions and the other values that a seam declares."""
    declared = SEAMS[seam]
    names = [*vars(declared), *inspect.get_annotations(declared)]
    return {name: getattr(declared, name, None) for name in names if not name.startswith("_")}


def plugged_into(seam: str) -> Iterator[tuple[str, ModuleType]]:
    for module in modules_of(seam):
        yield module.__name__.split(".")[2], module


@pytest.mark.parametrize("seam", SEAMS)
def test_options_have_what_the_seam_declares(seam: str) -> None:
    members, used = members_of(seam), set[str]()
    for option, module in plugged_into(seam):
        shared = {name for name in members if hasattr(module, name)}
        assert shared or seam == "keys", f"{option} does not use the seam"
        used |= shared
        for name in shared:
            if inspect.isfunction(members[name]):
                _, *declared = inspect.signature(members[name]).parameters.values()
                by_name = [each.name for each in declared if each.kind is each.KEYWORD_ONLY]
                values = [None] * (len(declared) - len(by_name))
                inspect.signature(getattr(module, name)).bind(*values, **dict.fromkeys(by_name))
    assert used == set(members), "a member that no option has"


@pytest.mark.parametrize("seam", SEAMS)
def test_the_seam_names_its_users(seam: str) -> None:
    """But for the seams of every option."""
    (said,) = re.findall(r"Used by (.*?)\.(?:\s|$)", re.sub(r"\s+", " ", SEAMS[seam].__doc__ or ""))
    known = {option.name for option in OPTIONS}
    named = [name for name in re.split(r", | and ", said) if name in known]
    if named:
        assert sorted(named) == sorted({option for option, _ in plugged_into(seam)})
