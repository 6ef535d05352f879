"""Learn from scores of single responses: python examples/graded_responses.py [SEED].

Writes scores.jsonl, single responses of the generated task with their gold scores, and pairs.jsonl,
pairs of responses to other prompts. Then train a reward model on the scores, and measure it on the
pairs:

    python launch.py phase=reward data=local data.path=scores.jsonl 'data.split=[0,1,0]' \\
        reward.loss=regression reward.groups_path=pairs.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlhf.data.synthetic_pairs import generate_records, rate_response

RESPONSES, PAIRS = 9000, 500

records = generate_records(RESPONSES + PAIRS, seed=int(sys.argv[1]) if sys.argv[1:] else 0)
with Path("scores.jsonl").open("w") as file:
    for number, (prompt, chosen, rejected, *_) in enumerate(records[:RESPONSES]):
        # One response for each prompt: scored responses to the same prompt would be read as pairs.
        response = chosen if number % 2 else rejected
        score = rate_response(prompt, response).gold
        row = {"prompt": prompt, "completion": response, "score": score}
        file.write(json.dumps(row) + "\n")
with Path("pairs.jsonl").open("w") as file:
    for prompt, chosen, rejected, *_ in records[RESPONSES:]:
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "group": "pairs"}
        file.write(json.dumps(row) + "\n")
print(f"{RESPONSES:,} responses with scores, and {PAIRS} pairs")
