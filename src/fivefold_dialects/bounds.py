"""Limit the work of reading another system's files, so that no script or YAML file can block the reader."""

from __future__ import annotations

from pathlib import Path

from fivefold.errors import UserError
from fivefold.files import read_text

LONGEST = 1 << 18
"""Most characters of a file, a value or an array."""
LONGEST_KEY = 400
_MOST_WORK = 8_000_000
_MOST_FILES = 64


class TooMuchError(UserError):
    """Error for a file, or a value in it, that is larger than any run's configuration needs."""


class Work:
    """Count of the characters and files that may still be read for one command."""

    def __init__(self) -> None:
        self.left = _MOST_WORK
        self.files = _MOST_FILES

    def spend(self, characters: int) -> None:
        """Count characters that are read; raise TooMuchError above the limit."""
        self.left -= characters
        if self.left < 0:
            raise TooMuchError(
                f"reading this takes more than {_MOST_WORK} steps: give the key=value settings of the command itself"
            )

    def value(self, text: str, name: str) -> str:
        """Return a text that becomes the value of `name`; raise TooMuchError if it is too long."""
        self.spend(len(text))
        if len(text) > LONGEST:
            raise TooMuchError(f"the value of {name[:LONGEST_KEY]} is longer than {LONGEST} characters")
        return text

    def text(self, place: Path) -> str:
        """Return the text of a file, which must be a regular file of at most LONGEST bytes."""
        self.files -= 1
        if self.files < 0:
            raise TooMuchError(f"{place} is one file more than {_MOST_FILES}: give the command that starts training")
        text = read_text(place, LONGEST)
        self.spend(len(text))
        return text


def is_file(place: Path) -> bool:
    """Return whether a file exists at this place; False also for a name that the system does not allow."""
    try:
        return place.is_file()
    except (OSError, ValueError):
        return False


def whole_number(text: str) -> int | None:
    """Return the whole number in a text of at most 18 digits; None for any other text."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 18 else None
