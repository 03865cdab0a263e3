"""Silences messages of Megatron-Core and torch: what a user must know is an exception."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(logger_name: str) -> Iterator[None]:
    """Suppress warnings, and messages of this logger below the level of an error."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
