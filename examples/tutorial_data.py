"""Write the data of docs/tutorial.md: answers.jsonl and pairs.jsonl, about the hours of shops."""

import itertools
import json
import random

SHOPS = (
    "bakery bank bar butcher cafe cinema clinic florist garage gym hotel kiosk library market "
    "museum office pharmacy pool school theatre"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
QUESTIONS = [
    "When does the {shop} open on {day}?",
    "{day}: from when is the {shop} open?",
    "How early can I go to the {shop} on {day}?",
    "What time does the {shop} open, if it is {day}?",
    "I need the {shop} on {day}. When?",
    "Hello! Opening time of the {shop}, {day}?",
    "Is there a {day} hour for the {shop}?",
    "The {shop}, please: when on {day}?",
]
draw = random.Random(1)
hours = {shop: draw.randint(6, 11) for shop in SHOPS}


def answers(shop: str, hour: int) -> list[str]:
    """Return possible answers, the best first."""
    wrong = draw.choice([each for each in range(6, 12) if each != hour])
    full = "The {shop} opens at {hour}."
    return [
        full.format(shop=shop, hour=hour),
        f"At {hour}.",
        full.format(shop=shop, hour=wrong),
        "Look it up yourself!",
    ]


rows = []
for shop, day, question in itertools.product(SHOPS, DAYS, QUESTIONS):
    better, worse = sorted(draw.sample(range(4), 2))
    texts = answers(shop, hours[shop])
    rows.append((question.format(shop=shop, day=day), texts[better], texts[worse]))
draw.shuffle(rows)
with open("answers.jsonl", "w", encoding="utf-8") as file:
    for prompt, better, _ in rows:
        file.write(json.dumps({"prompt": prompt, "response": better}) + "\n")
with open("pairs.jsonl", "w", encoding="utf-8") as file:
    for prompt, better, worse in rows:
        turns = {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": better}],
            "rejected": [{"role": "assistant", "content": worse}],
        }
        file.write(json.dumps(turns) + "\n")
print(f"{len(rows)} answers in answers.jsonl, {len(rows)} pairs in pairs.jsonl")
