"""Write sums and differences, half of them answered wrongly: ``python examples/arithmetic.py``.

The file has the columns ``prompt``, ``completion`` (the demonstration for supervised fine-tuning)
and ``answer`` (the right number, which only a reward by rule reads). Imitation learns the mistakes
too; GRPO on ``experiment=arithmetic`` learns what is right from the rule alone.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

LARGEST = 9
WRONG = 0.5  # share of the demonstrations that are off by one or two
PHRASES = ("What is {}?", "{} = ?", "How much is {}?", "Tell me {}.", "{} please.", "Compute {}.")
SUMS = ("{a} + {b}", "{a} plus {b}")
DIFFERENCES = ("{a} - {b}", "{a} minus {b}")


def rows(rng: random.Random) -> list[dict[str, str]]:
    """Return one row for each question, in random order."""
    made = []
    for a in range(LARGEST + 1):
        for b in range(LARGEST + 1):
            for forms, right in ((SUMS, a + b), (DIFFERENCES, a - b)):
                for phrase, form in product(PHRASES, forms):
                    shown = right + rng.choice((-2, -1, 1, 2)) * (rng.random() < WRONG)
                    question = phrase.format(form.format(a=a, b=b))
                    prompt = f"\n\nHuman: {question}\n\nAssistant:"
                    made.append({"prompt": prompt, "completion": f" {shown}", "answer": str(right)})
    rng.shuffle(made)
    return made


if __name__ == "__main__":
    lines = [json.dumps(row) + "\n" for row in rows(random.Random(1))]
    Path("arithmetic.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"arithmetic.jsonl: {len(lines)} questions")
