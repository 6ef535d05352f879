"""What ``make release`` checks before it builds anything."""

from pathlib import Path

import pytest

from tools import release


def test_packages_and_changelog_have_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = release.check_versions()
    (tmp_path / "lab").mkdir()
    for name in ("pyproject.toml", "lab/pyproject.toml", "CHANGELOG.md"):
        text = (release.ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace(f"## {version}", "## 9.9.9"))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"9\.9\.9"):
        release.check_versions()
