"""The page: a prompt, two anonymous answers, and a button for each choice.

The page gets plain text and a number. Which model gave which answer stays in this process until the
last pair is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf.compare.answer_pairs import AnswerPair
from rlhf.compare.preference_file import PreferenceFile, Verdict, WinRate
from rlhf.errors import CapabilityError, ConfigError, RlhfError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOST = "127.0.0.1"
# The browser loads nothing from elsewhere, and no other site may show the page in a frame.
HEADERS = {
    b"content-security-policy": b"default-src 'self' 'unsafe-inline' data: blob:; "
    b"script-src 'self' 'unsafe-inline' blob:; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
}
BUTTONS = {
    "A is better": Verdict.a,
    "B is better": Verdict.b,
    "Tie": Verdict.tie,
    "Both bad": Verdict.both_bad,
    "Skip": None,
}


class Comparison:
    """Pairs to judge one after the other, and where the choices are kept."""

    def __init__(
        self, pairs: Sequence[AnswerPair], models: tuple[str, str], file: PreferenceFile
    ) -> None:
        done = {(each.prompt, each.answers) for each in file.judged()}
        self._pairs = [pair for pair in pairs if pair.key not in done]
        self._models = models
        self._file = file
        self._place = 0

    @property
    def place(self) -> int:
        """Return how many pairs have been judged or skipped."""
        return self._place

    @property
    def pair(self) -> AnswerPair | None:
        """Return the pair to judge; None after the last."""
        return self._pairs[self._place] if self._place < len(self._pairs) else None

    @property
    def progress(self) -> str:
        """Return which pair is shown."""
        return f"{self._place + 1} of {len(self._pairs)}"

    @property
    def result(self) -> WinRate:
        """Return the win rate of the first model, over all choices in the file."""
        return WinRate.of(self._models, list(self._file.judged()))

    def judge(self, verdict: Verdict | None, *, place: int) -> None:
        """Keep the verdict on the pair at ``place``, unless that was judged already; None: skip.

        Raises:
            RlhfError: if the choice cannot be written.
        """
        if place == self._place and self.pair is not None:
            if verdict is not None:
                self._file.add(self.pair, verdict)
            self._place += 1


def build_page(comparison: Comparison) -> Any:
    """Return gradio's page.

    Raises:
        CapabilityError: if gradio is not installed.
    """
    gr = _gradio()
    with gr.Blocks(title="Compare answers", analytics_enabled=False) as page:
        with gr.Column() as question:
            place = gr.Number(visible=False)
            progress = gr.Textbox(label="Pair", interactive=False)
            prompt = gr.Textbox(label="Prompt", lines=2, max_lines=15, interactive=False)
            with gr.Row():
                a = gr.Textbox(label="Answer A", lines=8, max_lines=30, interactive=False)
                b = gr.Textbox(label="Answer B", lines=8, max_lines=30, interactive=False)
            with gr.Row():
                buttons = {label: gr.Button(label) for label in BUTTONS}
        result = gr.Textbox(label="Result", lines=4, interactive=False, visible=False)
        outputs = [question, place, progress, prompt, a, b, result]
        show = partial(_shown, comparison, gr.update)
        page.load(show, outputs=outputs, api_visibility="private")
        for label, button in buttons.items():
            button.click(
                partial(_judge, comparison, show, gr.Error, BUTTONS[label]),
                inputs=[place],
                outputs=outputs,
                api_visibility="private",
                concurrency_id="choices",  # one at a time
                show_progress="hidden",
            )
    return page


def serve(page: Any, port: int | None) -> str:
    """Serve the page to this machine only, in threads of this process; return its address.

    Raises:
        ConfigError: if the port is taken.
    """
    gr = _gradio()
    from starlette.middleware import Middleware

    fonts = [gr.themes.Font("system-ui"), gr.themes.Font("sans-serif")]
    try:
        _, address, _ = page.launch(
            server_name=HOST,
            server_port=port,
            share=False,
            theme=gr.themes.Base(font=fonts, font_mono=[gr.themes.Font("monospace")]),
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            quiet=True,
            prevent_thread_lock=True,
            app_kwargs={"middleware": [Middleware(_Closed)], "docs_url": None, "redoc_url": None},
        )
    except OSError as error:
        raise ConfigError(f"--port {port}: taken by another program; choose another") from error
    return str(address)


class _Closed:
    """A layer of the server that sends ``HEADERS`` with every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        await self._app(scope, receive, send_more)


def _shown(comparison: Comparison, update: Callable[..., Any]) -> list[Any]:
    """Return the values of the page: the next pair, or the result after the last."""
    if (pair := comparison.pair) is None:
        result = update(value=_encodable(str(comparison.result)), visible=True)
        return [update(visible=False), comparison.place, "", "", "", "", result]
    texts = [_encodable(text) for text in (pair.prompt.strip(), pair.a.text, pair.b.text)]
    return [update(), comparison.place, comparison.progress, *texts, update()]


def _judge(
    comparison: Comparison,
    show: Callable[[], list[Any]],
    refusal: type[Exception],
    verdict: Verdict | None,
    place: float,
) -> list[Any]:
    try:
        comparison.judge(verdict, place=int(place))
    except RlhfError as error:
        raise refusal(str(error)) from error
    return show()


def _encodable(text: str) -> str:
    """Return ``text`` without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _gradio() -> Any:
    try:
        import gradio
    except ImportError as error:
        raise CapabilityError(
            "the comparison page needs the package gradio: pip install -e '.[compare]'"
        ) from error
    return gradio
