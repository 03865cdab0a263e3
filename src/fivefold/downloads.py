"""Models and data sets that a run reads from a hub. No torch here.

As a program it downloads them, for the launcher: it holds no library of a hub then, and an interrupt ends the download.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from fivefold.config.schema import DataConfig
from fivefold.data.data_sets import cache_of, hub_names, local_file
from fivefold.errors import RunError, UserError, sentence_of
from fivefold.hub import model_snapshot

_REFUSED = 2


def download(models: Mapping[str, Sequence[str]], data: DataConfig, commits: Mapping[str, str]) -> None:
    """Download models (id -> patterns of files) and data sets into this machine's caches, at `commits` or the latest."""
    wanted = [(name, files, commits.get(name)) for name, files in models.items() if not Path(name).is_dir()]
    cache = str(cache_of(data))
    sets = [(name, key, cache, commits.get(name)) for key, name in hub_names(data)]
    if not wanted and not sets:
        return
    words = [sys.executable, "-m", "fivefold.downloads", json.dumps([wanted, sets])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        output = process.stdout.read() if process.stdout else ""
    if process.returncode == _REFUSED:
        raise UserError(output.strip())
    if process.returncode:
        raise RunError(f"the download ended with exit code {process.returncode}")


def main() -> int:
    """Download the models and data sets of the first argument; print why that fails, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The clients finish what they have begun before they raise anything, which may take an hour.
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    models, data = json.loads(sys.argv[1])
    try:
        for name, wanted, commit in models:
            model_snapshot(name, wanted, commit)
        for name, key, cache, commit in data:
            local_file(name, key, Path(cache), commit)
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        print(sentence)
        return _REFUSED
    return 0


def _end_with_launcher() -> None:
    """End this process when the launcher closes its end of the pipe, or is gone."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
