"""What tests of the core do without the lab: those that need its keys or commands are skipped."""

import re
from importlib.metadata import entry_points

import pytest

from rlhf.config.hydra_errors import missing_package

REASON = "rlhf-lab is not installed"  # its folder is on the path of tests all the same
LAB_IS_INSTALLED = any(
    each.dist and each.dist.name == "rlhf-lab" for each in entry_points(group="rlhf.methods")
)
needs_lab = pytest.mark.skipif(not LAB_IS_INSTALLED, reason=REASON)
TEXTS = ("belongs to rlhf-lab, which is not installed", "No module named 'rlhf_lab'")


def lacks_lab(text: str) -> bool:
    """Return True if an error is about a key, an option or a module of the lab, which is absent."""
    if LAB_IS_INSTALLED:
        return False
    keys = re.findall(r"Could not override '([^']+)'", text)
    options = ["=".join(each) for each in re.findall(r"Could not find '(\w+)/(\w+)'", text)]
    return any(each in text for each in TEXTS) or any(map(missing_package, [*keys, *options]))
