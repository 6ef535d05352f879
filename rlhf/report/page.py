"""Render pages from templates, and serve pages to the user of this machine, and to nobody else.

Text is escaped, and each page is one file that loads nothing. Other sites that the browser shows,
and other users of this machine, must neither read a served page nor use it: the address holds a
random token, and requests with a foreign Host header (DNS rebinding) or from pages of other sites
are refused.
"""

from __future__ import annotations

import hmac
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from rlhf.base.errors import ConfigError
from rlhf.base.program import name_commands

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# The scripts that draw charts, in the order in which a page contains them.
CHART_SCRIPTS = ("uplot/uPlot.iife.min.js", "numbers.js", "marks.js", "chart_data.js", "charts.js")
QUESTION = re.compile(r"Human: ((?:(?!\nHuman: ).)*?)\s*Assistant:", re.DOTALL)
HOST = "127.0.0.1"
PORTS = range(7860, 7960)
HOST_NAMES = (HOST, "localhost")  # requests with other names in the Host header are refused
TIMEOUT = 10  # seconds after which a connection that sends nothing is closed
HEADERS = {
    "Referrer-Policy": "same-origin",  # with no-referrer, the page's form would send Origin: null
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Headline(NamedTuple):
    """The line at the top of a page, which is highlighted if the results are doubtful."""

    text: str
    is_doubtful: bool | None  # None: there is neither a result nor an alarm yet
    has_best: bool = True  # False on the page of a comparison in which no setting is best


def render_template(template: str, *, package: str = __package__, **values: object) -> str:
    """Return a template of ``package``, filled in with ``values``; a missing value is an error."""
    return build_jinja_environment(package).get_template(template).render(values)


def build_jinja_environment(package: str = __package__) -> Environment:
    """Return a jinja2 environment that escapes all values.

    It loads a template from ``package`` or, if ``package`` lacks the template, from this package.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The filter tojson escapes <, >, & and ', so text of a model cannot close the HTML element.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters["question"] = unframe_prompt
    environment.globals |= {"asset": read_asset, "chart_scripts": CHART_SCRIPTS}
    environment.globals["name_commands"] = name_commands
    return environment


def unframe_prompt(prompt: str) -> str:
    """Return "Hi." for the prompt "Human: Hi. Assistant:"; other prompts keep all their words."""
    match = QUESTION.fullmatch(prompt.strip())
    return match[1] if match else prompt.strip()


def read_asset(name: str, package: str = __package__) -> Markup:
    """Return the text of a style sheet or script of ``package``, which jinja2 does not escape."""
    from markupsafe import Markup

    return Markup((files(package) / name).read_text(encoding="utf-8"))


class LocalServer(ThreadingTCPServer):
    """A server for this machine only, with a ``path`` in its address that no other user can guess.

    If ``port`` is None, it takes the first free port of ``PORTS``.

    Raises:
        ConfigError: if the port is taken or may not be used.
    """

    daemon_threads = True
    request_queue_size = 128  # half-open connections must not block other connections
    allow_reuse_address = True

    def __init__(self, handler: type[LocalRequest], port: int | None) -> None:
        self.path = f"/{secrets.token_urlsafe(16)}"
        self._bind_first_free_port(handler, PORTS if port is None else [port])
        self.address = f"http://{HOST}:{self.server_address[1]}{self.path}"

    def _bind_first_free_port(self, handler: type[LocalRequest], ports: Sequence[int]) -> None:
        for port in ports:
            try:
                return super().__init__((HOST, port), handler)
            except (OSError, OverflowError) as error:
                reason = error
        raise ConfigError(f"--port {ports[-1]}: {reason}; choose another") from reason

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of a bug; ignore errors of the connection, which browsers close."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class LocalRequest(BaseHTTPRequestHandler):
    """A request to a ``LocalServer``; subclasses answer it if ``refusal_status`` returns None."""

    server: LocalServer
    timeout = TIMEOUT
    policy: ClassVar[str]  # the Content-Security-Policy of the subclass's responses

    def refusal_status(self, path: str) -> HTTPStatus | None:
        """Return the HTTP status that refuses a request to ``path``; None if it is allowed."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host.partition(":")[0] not in HOST_NAMES or origin not in {None, f"http://{host}"}:
            return HTTPStatus.FORBIDDEN
        if not hmac.compare_digest(path.encode(), self.server.path.encode()):
            return HTTPStatus.NOT_FOUND
        return None

    def send(
        self,
        status: HTTPStatus,
        text: str,
        *,
        mime_type: str = "text/html",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a response with the body ``text``, and with ``headers`` besides the usual ones."""
        body = text.encode(errors="replace")  # a model's text may have lone surrogates
        self.send_response(status)
        own = {"Content-Type": f"{mime_type}; charset=utf-8"}
        own["Content-Security-Policy"] = self.policy
        for name, value in {**own, **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return the value of the header Server, which reveals nothing about this machine."""
        return "rlhf"

    def log_message(self, *_: object) -> None:
        """Print nothing; the base class prints a line for each request."""
