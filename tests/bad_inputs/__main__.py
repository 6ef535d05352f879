"""Write docs/bad_input.md."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hydra import compose, initialize_config_dir

from tests.bad_inputs import all_answers, page

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Try all inputs and write the page."""
    logging.disable()
    os.environ.update(HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu")
    before = dict(os.environ)

    def set_environment(variables: Mapping[str, str]) -> None:
        os.environ.clear()
        os.environ.update(before, **variables)

    with (
        tempfile.TemporaryDirectory() as folder,
        initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
    ):
        answers = all_answers(
            lambda words: compose("config", words), Path(folder) / "in", set_environment
        )
    (ROOT / "docs" / "bad_input.md").write_text(page(answers))


if __name__ == "__main__":
    main()
