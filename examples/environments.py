"""Two environments of your own: one with reset and step, one whose methods are tools.

python launch.py experiment=environment environment=custom environment.run_code=true \
    environment.target=environments:Countdown
"""

from __future__ import annotations

from random import Random

from rlhf.options.environments.interface import Step


class Countdown:
    """Say the number below the last one, until 0 is reached."""

    optimum = 1.0

    def reset(self, *, seed: int, row: dict) -> str:  # noqa: ARG002 - needs no data
        """Begin an episode; return what the policy reads first."""
        self.number = Random(seed).randint(2, 5)
        return f"count down from {self.number}"

    def step(self, text: str) -> Step:
        """Answer a turn of the policy."""
        self.number -= 1
        if text.strip() != str(self.number):
            return Step("wrong", reward=0.0, terminated=True, info={"success": False})
        done = self.number == 0
        return Step("go on", reward=float(done), terminated=done, info={"success": done})

    def demonstration(self) -> str:
        """The expert, from which SFT learns; without it, start from a model (phase=ppo)."""
        return str(self.number - 1)


class Library:
    """Find out where a book is; the form is that of TRL's environment_factory."""

    def reset(self, seed: int = 0, **row: object) -> str:  # noqa: ARG002 - needs no data
        """Begin an episode; return what the policy reads first."""
        self.shelf = Random(seed).randint(1, 9)
        self.answer: int | None = None
        return "On which shelf is the blue book?"

    def look_up(self, title: str) -> str:
        """Look a book up in the catalogue.

        Args:
            title: title of the book
        """
        return f"{title} is on shelf {self.shelf}"

    def say_shelf(self, shelf: int) -> str:
        """Say on which shelf the book is.

        Args:
            shelf: number of the shelf
        """
        self.answer = shelf
        return "thank you"

    def get_reward(self) -> float:
        """Reward the turn without a call that ends the episode."""
        return float(self.answer == self.shelf)
