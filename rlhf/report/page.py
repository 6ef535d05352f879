"""Render pages from templates: text is escaped, and each page is one file that loads nothing."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# The scripts that draw charts, in the order in which a page has them.
CHART_SCRIPTS = ("uplot/uPlot.iife.min.js", "numbers.js", "marks.js", "chart_data.js", "charts.js")


class Headline(NamedTuple):
    """The line at the top of a page, which the page marks if the results are doubtful."""

    text: str
    is_doubtful: bool


def render_template(template: str, *, package: str = __package__, **values: object) -> str:
    """Return a template of ``package`` with ``values`` filled in; a missing value is an error."""
    return jinja_environment(package).get_template(template).render(values)


def jinja_environment(package: str = __package__) -> Environment:
    """Return a jinja2 environment that escapes all values.

    It has the templates of ``package``, and of this package those with other names.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The filter tojson escapes <, >, & and ', so no text of a model can close the HTML element.
    made.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    made.globals |= {"asset": read_asset, "chart_scripts": CHART_SCRIPTS}
    return made


def read_asset(name: str, package: str = __package__) -> Markup:
    """Return the text of a style or script of ``package``, unescaped."""
    from markupsafe import Markup

    return Markup((files(package) / name).read_text(encoding="utf-8"))
