"""A mark for tests of the core whose examples are keys, presets or metrics of the lab."""

from importlib.util import find_spec

import pytest

needs_lab = pytest.mark.skipif(not find_spec("rlhf_lab"), reason="rlhf-lab is not installed")
