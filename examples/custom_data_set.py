"""PPO on prompts from an SQLite table: python examples/custom_data_set.py.

Any iterator of texts is a data set. A prompt ends where the response begins.
"""

import random
import sqlite3
from collections.abc import Iterator

from rlhf import PPOTrainer, RLHFEngine, load_run


def make_table(database: sqlite3.Connection) -> None:
    """Fill a table as your application would."""
    database.execute("create table tickets (question text, is_answered integer)")
    rows = [(f"Where is parcel {number}?", number % 3 == 0) for number in range(300)]
    database.executemany("insert into tickets values (?, ?)", rows)


def batches(database: sqlite3.Connection, size: int, *, seed: int) -> Iterator[list[str]]:
    """Yield batches of prompts for ever, in another order on each pass over the table."""
    query = "select question from tickets where not is_answered"
    prompts = [f"\n\nHuman: {question}\n\nAssistant:" for (question,) in database.execute(query)]
    order = random.Random(seed)
    while True:
        order.shuffle(prompts)
        for start in range(0, len(prompts) - size + 1, size):
            yield prompts[start : start + size]


database = sqlite3.connect(":memory:")
make_table(database)
config = load_run("runs/latest")
engine = RLHFEngine(config)
trainer = PPOTrainer(engine, config.ppo)
size = config.ppo.rollout_batch_size // config.ppo.responses_per_prompt
for step, prompts in zip(range(2), batches(database, size, seed=config.seed), strict=False):
    rollout = trainer.generate_experience(engine.prompts(prompts, step=step))
    stats = trainer.train_rlhf(rollout)
    print(f"step {step}: {len(prompts)} prompts, such as {prompts[0].split(chr(10))[2]!r}")
engine.close()
