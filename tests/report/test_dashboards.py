"""Dashboards: a panel for every metric that the report shows, on the axis of its phase."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.report import dashboards
from rlhf.run.metric_table import METRICS, PANELS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_every_health_metric_has_a_panel_on_the_steps_of_its_phase() -> None:
    from wandb_workspaces.reports.v2 import LinePlot

    views = dashboards.build_dashboards("team", "zoo")
    assert [view.name for view in views] == [
        "RLHF: PPO health",
        "RLHF: SFT, reward model and DPO",
        "RLHF: Sweeps",
    ]
    (main, *_), *_ = (view.sections for view in views)
    assert [panel.title for panel in main.panels][2:4] == [
        "KL to the reference (objective/kl)",
        "Response length (response_length)",
    ]
    shown = {
        name: panel.x
        for view in views
        for section in view.sections
        for panel in section.panels
        if isinstance(panel, LinePlot)
        for name in panel.y
    }
    panels = {name for panels in PANELS.values() for p in panels for name in p.metrics}
    assert set(shown) == panels, "name the section of PANELS in build_dashboards"
    healthy = {name for name, info in METRICS.items() if info.healthy_range is not None}
    assert healthy <= set(shown)
    for name, axis in shown.items():
        prefix = name.partition("/")[0]
        assert axis == f"{prefix if prefix in {'sft', 'reward', 'dpo'} else 'ppo'}/step"


class Server:
    """Views that were saved, by their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from wandb_workspaces.workspaces import interface, internal

        self.views: dict[str, Any] = {}
        self.ids: list[str] = []
        monkeypatch.setattr(internal, "get_view_dict", self.get)
        monkeypatch.setattr(internal, "upsert_view2", self.upsert)
        monkeypatch.setattr(interface, "get_app_url", lambda _: "https://wandb.example")
        monkeypatch.setattr(interface.wandb, "Api", lambda: None)

    def get(self, entity: str, project: str, name: str) -> dict[str, str]:
        if name not in self.views:
            raise ValueError(f"Workspace `{name}` not found in project `{project}`")
        return {"id": self.views[name]}

    def upsert(self, view: Any) -> dict[str, Any]:
        name = view.name.removeprefix("nw-").removesuffix("-v")
        self.views[name] = view.id or f"id-{len(self.views)}"
        self.ids.append(self.views[name])
        return {"upsertView": {"view": {"id": self.views[name], "name": view.name}}}


def test_the_same_command_again_replaces_what_it_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(monkeypatch)
    assert dashboards.main(["team/zoo"]) == 0
    first = capsys.readouterr().out
    assert first.splitlines()[0] == "https://wandb.example/team/zoo?nw=rlhfppo"
    assert dashboards.main(["team/zoo"]) == 0
    assert capsys.readouterr().out == first
    assert server.ids == ["id-0", "id-1", "id-2"] * 2


def test_a_run_saves_views_once_and_again_if_they_have_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path))
    server = Server(monkeypatch)
    for project, saved in (("team/zoo", 3), ("team/zoo", 3), ("team/farm", 6)):
        assert dashboards.main([project, "--once"]) == 0
        assert capsys.readouterr().out.startswith(f"https://wandb.example/{project}?nw=rlhfppo\n")
        assert len(server.ids) == saved
    monkeypatch.setattr(dashboards, "PANELS", {**PANELS, "PPO": PANELS["PPO"][:1]})
    assert dashboards.main(["team/zoo", "--once"]) == 0
    assert len(server.ids) == 9


def test_without_an_account_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from wandb_workspaces.workspaces import internal

    def refuse(*_: object) -> None:
        raise RuntimeError("No API key configured")

    monkeypatch.setattr(internal, "get_view_dict", refuse)
    assert dashboards.main(["team/zoo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: team/zoo: Weights & Biases refused (No API key configured)")
    assert "`wandb login`" in error
    assert dashboards.main(["zoo"]) == 2
    assert "error: zoo: must be ENTITY/PROJECT" in capsys.readouterr().err


def test_without_the_package_the_way_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("wandb_workspaces")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert dashboards.main(["team/zoo"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: dashboards need the package wandb-workspaces: pip install")
