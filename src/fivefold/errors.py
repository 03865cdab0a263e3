"""Errors of the user, shown as one sentence, and errors of the program, shown with their traceback."""

from __future__ import annotations

import dis
import errno
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).parent) + "/"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def describe_error(error: BaseException) -> str:
    """Return the message of an error that the user can fix, or the traceback of any other error."""
    return sentence_of(error) or "".join(traceback.format_exception(error))


def sentence_of(error: BaseException) -> str | None:
    """Return the message that the user sees for an error; None for a fault of the program.

    A ValueError or RuntimeError raised by this package says what must hold. For a refusal by the system the file's name is
    enough. All other errors (raised by Python, a library or a user's function) need their traceback.
    """
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return f"{error.filename or 'the disk'}: {error.strerror}"
    if isinstance(error, (ValueError, RuntimeError)) and _is_ours(error):
        return str(error)
    return None


def shown(value: Any, most: int = 80) -> str:
    """Return a value as text for a message, cut to `most` characters: a value from a file may have any length."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not convert numbers of more than 4,300 digits.
        text = "a number of thousands of digits"
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _is_ours(error: BaseException) -> bool:
    """Whether a `raise` statement of this package raised the error: int("x") in our code is no such statement."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and _raises(place)


def _raises(place: TracebackType) -> bool:
    code = place.tb_frame.f_code
    return code.co_filename.startswith(_PACKAGE) and code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]
