"""Keys in conf/base are explained by the schema's own words."""

from dataclasses import dataclass
from pathlib import Path

from rlhf.config.choices import When
from rlhf.config.schema.supervised import SftConfig
from rlhf.jobs.launch_command import field_docstrings
from tools.docs.conf_comments import explained, renew


@dataclass
class Inner:
    """Below."""

    depth: int
    """How deep."""


@dataclass
class Outer:
    """A group."""

    size: int
    """Number of
    things; 0: none."""
    when: When
    """At what time."""
    inner: Inner
    """More keys."""


def test_explanations_stand_above_keys_and_replace_old_comments() -> None:
    text = "# Title.\n\n# old\nsize: 1  # old\nwhen: auto\ninner:\n  depth: 2\n"
    assert explained(text, Outer) == (
        "# Title.\n\n# Number of things; 0: none.\nsize: 1\n"
        "# At what time.\nwhen: auto\n# More keys.\ninner:\n  # How deep.\n  depth: 2\n"
    )
    assert explained(explained(text, Outer), Outer) == explained(text, Outer)


def test_a_field_of_a_base_class_is_explained_too() -> None:
    assert {"lr", "epochs"} <= field_docstrings(SftConfig).keys()


def test_files_are_up_to_date() -> None:
    for path, text in renew(Path(__file__).parents[2] / "conf").items():
        assert path.read_text() == text, f"{path}: run python -m tools.docs.conf_comments"
