"""A guessing game: the environment thinks of a digit, and answers each guess with a hint."""

from __future__ import annotations

import random

from fivefold import Step


class Guess:
    """The model guesses a digit; the answer to a wrong guess says on which side of it the digit lies."""

    async def reset(self, task: dict, seed: int) -> str:
        self.secret = random.Random(seed).randrange(10)  # noqa: S311 - not for secrets
        return task["prompt"]

    async def step(self, message: dict) -> Step:
        guess = message["content"]
        if not guess.isdigit():
            return Step("?")
        if int(guess) == self.secret:
            return Step(reward=1.0, done=True)
        return Step(">" if self.secret > int(guess) else "<", state=guess)
