"""The frozen lake of 4 x 4 tiles: the model walks over the ice to the goal, around the holes."""

from __future__ import annotations

import random

from fivefold import Step

LAKE = ("FFFF", "FHFH", "FFFH", "HFFG")
ICE = [(row, column) for row in range(4) for column in range(4) if LAKE[row][column] == "F"]
MOVES = {"<": (0, -1), "v": (1, 0), ">": (0, 1), "^": (-1, 0)}


class FrozenLake:
    """The model says a direction at each turn, and reads the row and column of its tile; a hole ends the walk."""

    replayable = True

    async def reset(self, task: dict, seed: int) -> str:
        # Walks that begin near the goal succeed by chance, and are what the others learn from.
        self.row, self.column = random.Random(seed).choice(ICE)  # noqa: S311 - not for secrets
        return self.place()

    async def step(self, message: dict) -> Step:
        if message["content"] not in MOVES:
            return Step("?", state=self.place())
        down, right = MOVES[message["content"]]
        self.row, self.column = min(max(self.row + down, 0), 3), min(max(self.column + right, 0), 3)
        tile = LAKE[self.row][self.column]
        return Step(self.place(), reward=float(tile == "G"), done=tile in "GH", state=self.place())

    def place(self) -> str:
        return f"{self.row}{self.column}"

    def state(self) -> dict:
        return {"row": self.row, "column": self.column}

    def restore(self, state: dict) -> None:
        self.row, self.column = state["row"], state["column"]
