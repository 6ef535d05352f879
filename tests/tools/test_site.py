"""The documentation builds as a site, without a warning and without requests to other hosts."""

import re
from pathlib import Path

import pytest

from tests.runs import ROOT, python

pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = ["build", "--strict", "--config-file", ROOT / "tools/docs/mkdocs.yml"]
    site = tmp_path / "site"
    build = python("-m", "mkdocs", *words, "--site-dir", site, NO_MKDOCS_2_WARNING=1)
    assert build.returncode == 0, build.stderr
    pages = {page.stem for page in ROOT.glob("docs/*.md")}
    assert {page.stem for page in site.glob("*.html")} >= pages | {"index", "SECURITY"}
    loaded = r'<(?:script|img)[^>]*src="(http[^"]*)"|<link[^>]*stylesheet[^>]*href="(http[^"]*)"'
    for page in site.glob("*.html"):
        assert not re.findall(loaded, page.read_text()), page.name
