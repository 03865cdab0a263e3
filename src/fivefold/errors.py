"""Whose an error is: the user's, who gets a sentence, or the program's, which shows its traceback."""

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
    """The sentence of an error that is the user's to mend, the traceback of any other."""
    return sentence_of(error) or "".join(traceback.format_exception(error))


def sentence_of(error: BaseException) -> str | None:
    """What the user is told of an error; None where it is a fault of the program.

    A ValueError or RuntimeError that this package itself raised says what must hold. Of what the system refused the name of
    the file is enough. Everything else (what Python, a library or a user's function raised) needs its traceback.
    """
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return f"{error.filename or 'the disk'}: {error.strerror}"
    if isinstance(error, (ValueError, RuntimeError)) and _is_ours(error):
        return str(error)
    return None


def shown(value: Any, most: int = 80) -> str:
    """A value as a message shows it: what a file holds may be of any length."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no number of more than 4,300 digits.
        text = "a number of thousands of digits"
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """What a library says of an error, in one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _is_ours(error: BaseException) -> bool:
    """Whether a `raise` statement of this package raised it: int("x") in our code is no such statement."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and _raises(place)


def _raises(place: TracebackType) -> bool:
    code = place.tb_frame.f_code
    return code.co_filename.startswith(_PACKAGE) and code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]
