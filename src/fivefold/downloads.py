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
from collections.abc import Mapping
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.data.data_sets import cache_of, hub_names, local_file
from fivefold.errors import RunError, UserError, sentence_of
from fivefold.hub import model_snapshot

_TOKENIZER_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "tokenizer*")
_MODEL_FILES = ("*.safetensors", *_TOKENIZER_FILES)
_REFUSED = 2


def models_read(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return directory or hub id of every model that the run reads -> patterns of the files that it reads there."""
    model, roles = config.model, config.roles
    judge = [config.reward.judge.model] if config.may_generate and config.reward.judge_layout else []
    adapters = [role.settings.lora.path for role in roles.learners.values() if role.settings.lora.rank]
    paths = [path for path in [model.path, *(role.path for role in roles.values()), *judge, *adapters] if path]
    described = dict.fromkeys([model.tokenizer_path, *map(model.described_by, paths)], _TOKENIZER_FILES)
    files = {**described, **dict.fromkeys(paths, _MODEL_FILES)}
    if model.trust_remote_code:
        files[model.tokenizer_path] = (*files[model.tokenizer_path], "*.py")
    return files


def download(config: RunConfig, commits: Mapping[str, str]) -> None:
    """Download what the run reads into this machine's caches, at the commit in `commits` or else the latest."""
    models = [(name, wanted, commits.get(name)) for name, wanted in models_read(config).items() if not Path(name).is_dir()]
    cache = str(cache_of(config.data))
    data = [(name, key, cache, commits.get(name)) for key, name in hub_names(config.data)]
    if not models and not data:
        return
    words = [sys.executable, "-m", "fivefold.downloads", json.dumps([models, data])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.read() if process.stdout else ""
    if process.returncode == _REFUSED:
        raise UserError(said.strip())
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
