"""Hooks of the documentation site, which ``tools/docs/mkdocs.yml`` names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Pages outside docs/, and their names in the site.
TOP = {
    "README.md": "index.md",
    "AGENTS.md": "AGENTS.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
REST = "*"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and put pages that it lacks into the navigation."""
    for source, name in TOP.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=without_folder(text)))
    for path in sorted(ROOT.glob("benchmarks/*.md")):
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        files.append(File.generated(config, f"benchmarks/{path.name}", content=text))
    for path in (ROOT / "LICENSE", Path(__file__).with_name("site.css")):
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    for path in ROOT.glob("examples/*.py"):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    pages = sorted(each.src_uri for each in files.documentation_pages())
    config.nav = with_rest(config.nav, pages)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the text of a page with links to pages outside docs/ as they are in the site."""
    is_in_folder = "/" in page.file.src_uri
    return markdown if is_in_folder else markdown.replace("](../", "](")


def without_folder(text: str) -> str:
    """Return the Markdown ``text`` of a page at the top with links as they are inside docs/.

    Folders that are not in the site become plain text.
    """
    inside = re.sub(r"(\]\(|=\")docs/", r"\1", text)
    return re.sub(r"\[([^]]+)\]\([\w/]+/\)", r"\1", inside)


def with_rest(nav: Any, pages: list[str]) -> Any:
    """Return ``nav`` with ``REST`` replaced by the ``pages`` that no line of it names."""
    named = set(_leaves(nav))
    rest = [page for page in pages if page not in named]

    def filled(node: Any) -> Any:
        match node:
            case dict():
                return {title: filled(each) for title, each in node.items()}
            case list():
                return [new for each in node for new in (rest if each == REST else [filled(each)])]
        return node

    return filled(nav)


def _leaves(node: Any) -> list[str]:
    """Return the pages that a navigation names."""
    match node:
        case dict():
            return [leaf for each in node.values() for leaf in _leaves(each)]
        case list():
            return [leaf for each in node for leaf in _leaves(each)]
    return [node]
