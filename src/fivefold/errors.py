"""Errors of the user, shown as one sentence, and errors of the program, shown with their traceback."""

from __future__ import annotations

import errno
import traceback
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that is full, of a quota, and of a limit on the size of files."""


class UserError(ValueError):
    """Error that a user caused and can fix: a key, a file, an argument. Its message is all that is shown."""


class RunError(RuntimeError):
    """Failure of a run: a server or a machine is gone, or a check stops the run. Its message is all that is shown."""


def describe_error(error: BaseException) -> str:
    """Return the message of an error that the user can fix, or the traceback of any other error."""
    return sentence_of(error) or "".join(traceback.format_exception(error))


def sentence_of(error: BaseException) -> str | None:
    """Return the message that the user sees for an error; None for a fault of the program, which needs its traceback.

    For a refusal by the system the file's name is enough. Errors of Python, of a library or of a user's function are faults.
    """
    if isinstance(error, OSError) and (error.filename is not None or error.errno in FULL):
        return f"{error.filename or 'the disk'}: {error.strerror}"
    return str(error) if isinstance(error, (UserError, RunError)) else None


def shown(value: Any, most: int = 80) -> str:
    """Return a value as text for a message, cut to `most` characters: a value from a file may have any length."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not convert numbers of more than 4,300 digits.
        text = "a number of thousands of digits"
    except RecursionError:
        text = "a value of hundreds of levels"
    except Exception:
        # A class of a user may raise anything.
        text = f"a value of the class {type(value).__name__}, which cannot be shown"
    return text if len(text) <= most else text[: most - 3] + "..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
