"""The planner beside the published times, prices and sizes, and the page that shows them."""

import shutil
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.config.choices import Phase
from tests.runs import soaked
from tools.docs import planner_page as published
from tools.docs.planner_page import (
    CELLS,
    FITTED,
    LARGEST,
    TABLE_MARK,
    largest,
    plan_of_cell,
    predictions,
    renew_page,
    scaling,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
PAGE = ROOT / "benchmarks" / "planner.md"


OFFLOADING = "a100_80g"  # the quickest to plan with offloading; make soak plans all


def memory_rows(_: Path) -> tuple[list[str], list[list[str]]]:
    """Return what the page has; tests/plan/test_traced_memory.py compares it."""
    table = PAGE.read_text().partition("## Planned and traced memory\n\n")[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return lines[0], lines[2:]


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
            plan = plan_of_cell(CONF, cell.experiment)
            assert off(published.dollars(plan) / cell.dollars) <= 0.35, cell.experiment


def test_what_the_paper_does_not_fit_is_refused() -> None:
    refused = [cell.experiment for cell in CELLS if cell.hours is None]
    assert refused == ["table1_opt_66b_8xa100_40g"]
    plan = plan_of_cell(CONF, refused[0])
    assert plan.misfit_reason is not None
    assert "66b" not in plan.misfit_reason
    assert "GiB on each rank" in plan.misfit_reason


@pytest.mark.parametrize(("hardware", "size"), LARGEST.items())
def test_the_largest_model_on_one_gpu(hardware: str, size: str) -> None:
    found = largest(CONF, hardware)
    assert found.size == size
    assert found.option == "adapters, recomputed activations"


def test_more_gpus_pay_more_than_in_proportion_until_the_batch_binds() -> None:
    scales = scaling(CONF)
    for model in ("OPT-13B", "OPT-66B"):
        per_gpu = {scale.gpus: scale.per_gpu for scale in scales if scale.model == model}
        assert max(per_gpu) == 1024
        assert per_gpu[16] > 1.05
        assert per_gpu[32] > 1.05
        falling = [per_gpu[gpus] for gpus in (64, 128, 256, 512, 1024)]
        assert falling == sorted(falling, reverse=True)
        assert per_gpu[256] < 0.55 * per_gpu[64]


@pytest.mark.parametrize("all_offload", soaked([False, True], True))
def test_the_page_is_up_to_date(
    all_offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(conf: Path, hardware: str, *more: str) -> Any:
        if not more or all_offload or hardware == OFFLOADING:
            return largest(conf, hardware, *more)
        *_, row = [line for line in PAGE.read_text().splitlines() if f"| {hardware} |" in line]
        return SimpleNamespace(size=row.strip("| ").split(" | ")[-1])

    monkeypatch.setattr(published, "largest", found)
    monkeypatch.setattr(published, "memory_rows", memory_rows)
    page = Path(shutil.copy(PAGE, tmp_path))
    renew_page(page, CONF)
    assert page.read_text() == PAGE.read_text()
    assert TABLE_MARK in page.read_text()
