"""Bounds on what reading another system's files may take, so that no script or YAML holds up the reader."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import UserError
from fivefold.files import read_text

LONGEST = 1 << 18
"""Characters of a file, a value or an array."""
LONGEST_KEY = 400
_MOST_WORK = 8_000_000
_MOST_FILES = 64


class TooMuchError(UserError):
    """A file, or a value in it, is beyond what any run's configuration needs."""


class Work:
    """Characters and files that may still be read for one command."""

    def __init__(self) -> None:
        self.left = _MOST_WORK
        self.files = _MOST_FILES

    def spend(self, characters: int) -> None:
        """Count characters that are read once more."""
        self.left -= characters
        if self.left < 0:
            raise TooMuchError(
                f"reading this takes more than {_MOST_WORK} steps: give the key=value settings of the command itself"
            )

    def value(self, text: str, name: str) -> str:
        """The text, which becomes a value."""
        self.spend(len(text))
        if len(text) > LONGEST:
            raise TooMuchError(f"the value of {name[:LONGEST_KEY]} is longer than {LONGEST} characters")
        return text

    def text(self, place: Path) -> str:
        """The text of a file, which must be a regular one of at most LONGEST bytes."""
        self.files -= 1
        if self.files < 0:
            raise TooMuchError(f"{place} is one file more than {_MOST_FILES}: give the command that starts training")
        text = read_text(place, LONGEST)
        self.spend(len(text))
        return text


def is_file(place: Path) -> bool:
    """Whether there is a file; a name that cannot be one names none."""
    try:
        return place.is_file()
    except (OSError, ValueError):
        return False


def whole_number(text: str) -> int | None:
    """The number of at most 18 digits that a text is; None for any other text."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
