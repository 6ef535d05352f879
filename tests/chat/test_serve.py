"""Folders of a run in transformers' server, asked by the real OpenAI client on this machine."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.runs import start

MISSING = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"pip install -e '.[serve]' for {MISSING}"),
]
PAGE = Path(__file__).parents[2] / "docs/use.md"
COMMAND = re.search(r"^transformers serve (\S+) (.*)$", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def served(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """A client of the documented server over the actor of a short run, and the actor's folder."""
    from openai import OpenAI  # here: only the worker that runs these tests imports it, for seconds

    assert COMMAND
    folder = COMMAND[1].replace("runs/latest", str(tiny_run))
    words = ["-m", "transformers.cli.transformers", "serve", folder, *COMMAND[2].split()]
    with start(*words, "--port=0", cwd=tmp_path_factory.mktemp("served")) as server:
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            pytest.fail("".join(lines))
        try:
            with OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0) as client:
                yield client, folder
        finally:
            server.terminate()
            server.communicate()


def answers(served: tuple[Any, str], **options: Any) -> list[str]:
    """The pieces of a streamed answer."""
    client, folder = served
    asked = [{"role": "user", "content": "Say it backwards: zebra tunnel apple."}]
    stream = client.chat.completions.create(
        model=folder, messages=asked, max_tokens=24, stream=True, **options
    )
    pieces = [chunk.choices[0].delta.content for chunk in stream]
    return [piece for piece in pieces if piece]


def test_the_client_streams_an_answer(served: tuple[Any, str]) -> None:
    assert len(answers(served, seed=1)) > 1


def test_requests_are_sampled_as_in_training_unless_they_say_otherwise(
    served: tuple[Any, str],
) -> None:
    def texts(**options: Any) -> set[str]:
        return {"".join(answers(served, seed=seed, **options)) for seed in range(2)}

    assert len(texts()) == 2
    assert len(texts(temperature=0)) == 1
    assert texts(temperature=2) != texts()
