"""What comes from the Hugging Face hub or ModelScope, or from their caches here; one sentence where neither has it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fivefold.errors import first_line
from fivefold.files import users_umask

_CONNECT_SECONDS = 5.0
MODELSCOPE = "modelscope:"
"""Before the id of a model that ModelScope has."""


def model_snapshot(repository: str, wanted: Sequence[str], commit: str | None = None) -> Path:
    """The files of a model's repository that match `wanted`, in a local directory; at its newest commit when left out.

    `modelscope:OWNER/NAME` is a repository of ModelScope, whose commits are names of its branches and tags.
    """
    if repository.startswith(MODELSCOPE):
        return _from_modelscope(repository, wanted, commit)
    from huggingface_hub import snapshot_download

    what = f"{repository!r} is neither a directory here nor a model that the hub gives" + (
        f" at commit {commit}" if commit else ""
    )
    return _take(
        what,
        lambda cached: snapshot_download(repository, revision=commit, allow_patterns=list(wanted), local_files_only=cached),
    )


def _from_modelscope(repository: str, wanted: Sequence[str], revision: str | None) -> Path:
    try:
        from modelscope import snapshot_download
        from modelscope_hub.constants import DEFAULT_ENDPOINT
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "modelscope"
        why = "not installed here" if is_absent else f"whose import fails: {first_line(error)}"
        raise ValueError(f"{repository!r} needs modelscope, {why}: pip install 'fivefold[modelscope]'") from error
    name, at = repository.removeprefix(MODELSCOPE), f" at {revision}" if revision else ""
    return _take(
        f"{name!r} is no model that ModelScope gives{at}",
        lambda cached: snapshot_download(name, revision=revision, allow_patterns=list(wanted), local_files_only=cached),
        os.environ.get("MODELSCOPE_ENDPOINT", DEFAULT_ENDPOINT),
    )


def cached_models() -> dict[str, Path]:
    """Id -> directory of each model that the Hugging Face hub's cache on this machine has a config.json of."""
    from huggingface_hub import constants

    found = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json"))
    return {"/".join(path.parts[-4].split("--", 2)[1:]): path.parent for path in found}


def commit_of(snapshot: Path) -> str:
    """The commit of a directory that `model_snapshot` gave: the cache keeps it under that name."""
    return snapshot.name


def dataset_file(repository: str, name: str) -> Path:
    """One file of a data set's repository."""
    from huggingface_hub import hf_hub_download

    what = f"{repository} cannot be downloaded from the hub, name local files with --source"
    return _take(what, lambda cached: hf_hub_download(repository, name, repo_type="dataset", local_files_only=cached))


def _take(what: str, download: Callable[[bool], str], endpoint: str | None = None) -> Path:
    """What `download(only from the cache)` gives; `what` begins the sentence where it fails. `endpoint` is another hub's."""
    reachable = _answers(endpoint)
    try:
        with users_umask():
            return Path(download(not reachable))
    except Exception as error:
        # Whatever the hub's client raises (no such model, no network, no access), the user has one thing to look at.
        reason = first_line(error) if reachable else "it does not answer, and its cache on this machine does not have it"
        raise ValueError(f"{what}: {reason}") from error


def _answers(endpoint: str | None) -> bool:
    """The hub can be connected to; without a network its client would try again for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        # Whether a proxy reaches it only the client can find out.
        return True
    address = urlsplit(endpoint or constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
