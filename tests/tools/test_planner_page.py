"""The planner beside the published times, prices and sizes, and the page that shows them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from rlhf.config.choices import Phase
from rlhf.plan.plan import plan_run
from tools.docs import planner_page as published
from tools.docs.pages import composed
from tools.docs.planner_page import (
    CELLS,
    FITTED,
    LARGEST,
    TABLE_MARK,
    largest,
    renew_page,
    scaling,
)
from tools.docs.planner_page import predictions as computed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


@pytest.fixture(scope="module", autouse=True)
def _composed_once() -> Iterator[None]:
    """The tests and the page ask for the same configs, which do not change meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "composed", cache(composed))
        patch.setattr(published, "predictions", predictions)
        yield


@cache
def predictions(conf: Path) -> list[published.Prediction]:
    """Return what the page shows, computed once."""
    return computed(conf)


def off(ratio: float) -> float:
    """How far a ratio is from 1, the same for x and 1/x."""
    return max(ratio, 1 / ratio) - 1


def test_step_3_of_tables_that_nothing_was_fitted_to() -> None:
    errors = [
        off(each.ratio)
        for each in predictions(CONF)
        if each.phase is Phase.ppo and each.cell.table != FITTED
    ]
    assert len(errors) == 7
    assert median(errors) <= 0.2
    assert max(errors) <= 0.7


def test_the_fitted_table() -> None:
    errors = [off(each.ratio) for each in predictions(CONF) if each.cell.table == FITTED]
    assert len(errors) == 7
    assert max(errors) <= 0.3


def test_prices() -> None:
    for cell in CELLS:
        if cell.dollars is not None:
            plan = plan_run(composed(CONF, f"experiment=tables/{cell.experiment}"))
            assert plan.price is not None
            assert off(plan.price / cell.dollars) <= 0.35, cell.experiment


def test_what_the_paper_does_not_fit_is_refused() -> None:
    refused = [cell.experiment for cell in CELLS if cell.hours is None]
    assert refused == ["table1_opt_66b_8xa100_40g"]
    plan = plan_run(composed(CONF, f"experiment=tables/{refused[0]}"))
    assert plan.misfit_reason is not None
    assert "66b" not in plan.misfit_reason
    assert "GiB on each rank" in plan.misfit_reason


@pytest.mark.parametrize(("hardware", "size"), LARGEST.items())
def test_the_largest_model_on_one_gpu(hardware: str, size: str) -> None:
    found = largest(CONF, hardware)
    assert found.size == size
    assert found.option == "adapters, recomputed activations"


def test_more_gpus_pay_more_than_in_proportion_until_the_batch_binds() -> None:
    scales = list(scaling(CONF))
    for model in ("OPT-13B", "OPT-66B"):
        per_gpu = {scale.gpus: scale.per_gpu for scale in scales if scale.model == model}
        assert max(per_gpu) == 1024
        assert per_gpu[16] > 1.05
        assert per_gpu[32] > 1.05
        falling = [per_gpu[gpus] for gpus in (64, 128, 256, 512, 1024)]
        assert falling == sorted(falling, reverse=True)
        assert per_gpu[256] < 0.55 * per_gpu[64]


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    page = Path(shutil.copy(ROOT / "benchmarks" / "planner.md", tmp_path))
    renew_page(page, CONF)
    assert page.read_text() == (ROOT / "benchmarks" / "planner.md").read_text()
    assert TABLE_MARK in page.read_text()
