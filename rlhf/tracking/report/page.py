"""The frame of a report: one HTML page that holds its style and scripts, and loads nothing."""

from __future__ import annotations

from importlib.resources import files

from rlhf.tracking.report.markup import Markup, joined, tag

# The page's own style and scripts may run; everything else is blocked, so nothing is ever loaded.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def document(title: str, body: Markup, *, script: str) -> str:
    """Return the whole page; ``script`` names the file beside this module that it runs."""
    head = joined(
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        tag("title", title),
        tag("style", _asset("report.css")),
    )
    page = tag(
        "html", tag("head", head), tag("body", body, tag("script", _asset(script))), lang="en"
    )
    return f"<!DOCTYPE html>\n{page}\n"


def section(title: str, *content: Markup) -> Markup:
    """Return a part of the page with its heading."""
    return tag("section", tag("h2", title), *content)


def scrolled(name: str, table: Markup) -> Markup:
    """Return a table in a region that scrolls on narrow screens, with the keyboard too."""
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=name)


def _asset(name: str) -> Markup:
    return Markup((files(__package__) / name).read_text(encoding="utf-8"))
