"""Write example code in Python that loads a saved policy and prints an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

LONGEST = 100  # characters of a question on one line
QUESTION = re.compile(r"\bHuman:\s*((?:(?!Human:).)+?)\s*Assistant:\s*\Z", re.DOTALL)


def python_example(folder: str, prompts: Iterable[str], *, has_chat_template: bool) -> list[str]:
    """Return lines of Python that load the model and print its answer to the shortest prompt.

    With a chat template the question is a message; without, it is the prompt itself.
    """
    if has_chat_template:
        found = [match[1] for prompt in prompts if (match := QUESTION.search(prompt))]
        question = _quote_shortest_text(found, "Your question")
        argument, answer = f'[{{"role": "user", "content": {question}}}]', '[-1]["content"]'
    else:
        argument, answer = _quote_shortest_text(prompts, "Your prompt"), ""
    return [
        "from transformers import pipeline",
        f'model = pipeline("text-generation", {json.dumps(folder)})',
        f'print(model({argument})[0]["generated_text"]{answer})',
    ]


def _quote_shortest_text(texts: Iterable[str], otherwise: str) -> str:
    short = min((text for text in texts if len(text) <= LONGEST), key=len, default=otherwise)
    return json.dumps(short, ensure_ascii=False)
