"""The wheels of wheels.txt: a member's text, never a module of theirs. `python -m tests.eras.archives` fetches what is missing."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

PINS = Path(__file__).with_name("wheels.txt")
CACHE = Path(__file__).parents[2] / ".eras"
"""Git ignores it."""


def pins() -> list[tuple[str, str]]:
    """(name, version) of every wheel."""
    pairs = (line.split("==", 1) for line in PINS.read_text().split())
    return [(name, version) for name, version in pairs]


def wheel(name: str, version: str) -> Path | None:
    """The fetched wheel; None where it is missing."""
    fetched = sorted(CACHE.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    return fetched[0] if fetched else None


@cache
def archive(name: str, version: str) -> zipfile.ZipFile:
    place = wheel(name, version)
    if place is None:
        raise FileNotFoundError(f"no wheel of {name} {version} in {CACHE}: `make test-eras` fetches it")
    return zipfile.ZipFile(place)


def text(name: str, version: str, member: str) -> str | None:
    """The text of a file in a wheel; None where the wheel lacks it."""
    there = archive(name, version)
    return there.read(member).decode() if member in there.NameToInfo else None


def fetch() -> None:
    missing = [f"{name}=={version}" for name, version in pins() if wheel(name, version) is None]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(CACHE)]
    # Two versions of a project cannot be in one request.
    for pin in missing:
        subprocess.run([*download, "--no-deps", "--only-binary", ":all:", "--python-version", "3.12", pin], check=True)
    print(f"{len(pins())} wheels, {len(missing)} of them fetched now")


if __name__ == "__main__":
    fetch()
