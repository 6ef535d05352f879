"""Render a look as one page, in the style of the reports."""

from __future__ import annotations

from dataclasses import asdict

from rlhf.look.inspection import Look
from rlhf.report.page import Headline, render_template


def render_look(look: Look, command: str) -> str:
    """Return the HTML of a look; ``command`` started it."""
    count = len(look.findings)
    told = f"{count} thing{'s' if count > 1 else ''} to look at" if count else "nothing was found"
    return render_template(
        "look.html",
        package=__package__ or "",
        title=f"Data: {', '.join(str(dataset['name']) for dataset in look.datasets)}",
        verdict=Headline(told, is_doubtful=bool(count)),
        place=command,
        look=look,
        grades=[asdict(each) for each in look.grades],
    )
