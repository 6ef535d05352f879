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
PAIRS = 4  # of each question
draw = random.Random(1)
hours = {shop: draw.randint(6, 11) for shop in SHOPS}


def answers(shop: str) -> list[str]:
    """Return possible answers, the best first; the fourth is about another shop."""
    full = "The {} opens at {}."
    wrong = draw.choice([each for each in range(6, 12) if each != hours[shop]])
    other = draw.choice([each for each in SHOPS if each != shop])
    return [
        full.format(shop, hours[shop]),
        f"At {hours[shop]}.",
        full.format(shop, wrong),
        full.format(other, hours[other]),
        "Look it up yourself!",
    ]


def write(path: str, rows: list[dict[str, object]]) -> None:
    """Write one JSON object per line."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} rows in {path}")


def pair(prompt: str, better: str, worse: str, right: str) -> dict[str, object]:
    """Return a row of pairs.jsonl."""
    turns = {"prompt": ("user", prompt), "chosen": ("assistant", better)}
    turns["rejected"] = ("assistant", worse)
    row: dict[str, object] = {
        name: [{"role": role, "content": text}] for name, (role, text) in turns.items()
    }
    return row | {"answer": right}


pairs, demonstrations = [], []
for shop, day, question in itertools.product(SHOPS, DAYS, QUESTIONS):
    prompt, texts = question.format(shop=shop, day=day), answers(shop)
    demonstrations.append({"prompt": prompt, "response": draw.choice(texts[:3])})
    for better, worse in draw.sample(list(itertools.combinations(texts, 2)), PAIRS):
        pairs.append(pair(prompt, better, worse, texts[0]))
draw.shuffle(demonstrations)
draw.shuffle(pairs)
write("answers.jsonl", demonstrations)
write("pairs.jsonl", pairs)
