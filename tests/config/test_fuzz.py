"""Every key with values that make no sense: accepted, or refused with one message."""

import zlib
from pathlib import Path

import pytest

from rlhf.config.freeze import read_frozen_keys, write_frozen_config
from rlhf.config.typed import to_run_config
from tests.config.test_commands import refusal
from tests.conftest import Compose

VALUES = ["nan", "inf", "-inf", "-1", "0", "1e400", "[1,2]", "{a: 1}", "text", "''", "null"]
VALUES += ["99999999999999999999", "true", "🙂", "../../etc", "${oops}", "???"]
FOUND = [  # that ended with a traceback once
    "model.learning_rates.actor=???",
    "model.architecture.max_position_embeddings=[1,2]",
    "model.architecture.max_position_embeddings=null",
    "model.vocab_size=99999999999999999999",
]


@pytest.mark.slow
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_no_value_of_any_key_ends_with_a_traceback(
    every: int, compose: Compose, tmp_path: Path
) -> None:
    write_frozen_config(to_run_config(compose([])), tmp_path)
    # A value for every sixth key, chosen by its name, so that all values meet all kinds of keys.
    keys = list(read_frozen_keys(tmp_path))[::every]
    drawn = [f"{key}={VALUES[zlib.crc32(key.encode()) % len(VALUES)]}" for key in keys]
    assert len(drawn) > 40
    refused = [word for word in drawn + FOUND if refusal(compose, [word])]
    assert set(FOUND) <= set(refused)
    assert len(refused) > 0.7 * len(drawn)
