"""Under ZeRO-3 the chunks of a policy's output layer see its whole weight, in both passes."""

from pathlib import Path

import pytest
import torch

from tests.runs import TORCHRUN, python

pytestmark = pytest.mark.slow


def test_a_sharded_policy_has_the_loss_and_the_gradient_of_a_whole_one(tmp_path: Path) -> None:
    run = python(*TORCHRUN, "-m", "tests.models.language_model_rank", tmp_path)
    assert run.returncode == 0, run.stderr
    for plain, sharded, norm, sharded_norm, after in torch.load(tmp_path / "found.pt"):
        assert sharded == pytest.approx(plain, rel=1e-5)
        assert sharded_norm == pytest.approx(norm, rel=1e-5)
        assert after != pytest.approx(plain, rel=1e-2), "the step has moved the weights"
