"""Downloads from the Hugging Face hub or ModelScope, or reads from their local caches; one message if neither has the
file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fivefold.errors import UserError, first_line, shown
from fivefold.files import users_umask

_CONNECT_SECONDS = 5.0
_ABSENT = "it does not answer, and its cache on this machine does not have it"
MODELSCOPE = "modelscope:"
"""Prefix of the id of a model on ModelScope."""


def model_snapshot(repository: str, wanted: Sequence[str], commit: str | None = None) -> Path:
    """Return a local directory with the files of a model's repository that match `wanted`, at `commit` or else the latest.

    `modelscope:OWNER/NAME` is a repository on ModelScope, whose commits are names of branches and tags.
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
        raise UserError(f"{repository!r} needs modelscope, {why}: pip install 'fivefold[modelscope]'") from error
    name, at = repository.removeprefix(MODELSCOPE), f" at {revision}" if revision else ""
    return _take(
        f"{name!r} is not a model that ModelScope has{at}",
        lambda cached: snapshot_download(name, revision=revision, allow_patterns=list(wanted), local_files_only=cached),
        os.environ.get("MODELSCOPE_ENDPOINT", DEFAULT_ENDPOINT),
    )


def cached_models() -> dict[str, Path]:
    """Id -> directory of each model with a config.json in the Hugging Face hub's cache on this machine."""
    from huggingface_hub import constants

    found = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json"))
    return {"/".join(path.parts[-4].split("--", 2)[1:]): path.parent for path in found}


def commit_of(snapshot: Path) -> str:
    """Return the commit of a directory from `model_snapshot`, or of a data set's parquet file."""
    return snapshot.parent.parent.name if snapshot.suffix == ".parquet" else snapshot.name


def dataset_file(repository: str, name: str) -> Path:
    """Download one file of a data set's repository."""
    from huggingface_hub import hf_hub_download

    what = f"{repository} cannot be downloaded from the hub, name local files with --source"
    return _take(what, lambda cached: hf_hub_download(repository, name, repo_type="dataset", local_files_only=cached))


def dataset_commit(repository: str, revision: str | None, line: str) -> str | None:
    """Return the commit of a data set's revision; None if the hub does not answer. `line` writes it as parquet."""
    if not _answers(None):
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except RevisionNotFoundError as error:
        raise UserError(_no_dataset(repository, f"it has no revision {revision!r}", line)) from error
    except RepositoryNotFoundError as error:
        reason = "there is none of this name, or only for users whose token is in HF_TOKEN"
        raise UserError(_no_dataset(repository, reason, line)) from error
    except Exception as error:
        # As in `_take`: the user sees one message.
        raise UserError(_no_dataset(repository, first_line(error), line)) from error


def load_dataset_splits(repository: str, config: str | None, commit: str | None, line: str) -> tuple[dict[str, Any], str]:
    """Return (split -> `datasets.Dataset`, commit); without a commit, of what the cache of `datasets` has."""
    try:
        import datasets
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "datasets"
        why = "not installed here" if is_absent else f"whose import fails: {first_line(error)}"
        raise UserError(
            f"{repository!r} is no file here, and a data set of the hub needs datasets, {why}: pip install "
            f"'fivefold[datasets]', or run where it is installed: {line}, and name that file"
        ) from error
    try:
        found = datasets.load_dataset(repository, config, revision=commit)
        commit = commit or Path(next(iter(found.values())).cache_files[0]["filename"]).parent.name
    except Exception as error:
        # The library raises many kinds of errors (no such data set, no network, no access, damaged files).
        if names := _configurations(repository, config, commit):
            listed = ", ".join(f"{repository}:{name}" for name in names)
            raise UserError(f"{repository!r} must name one of its configurations: {listed}") from error
        reason = first_line(error) if _answers(None) else _ABSENT
        raise UserError(_no_dataset(repository, reason, line)) from error
    return dict(found), commit


def _configurations(repository: str, config: str | None, commit: str | None) -> list[str]:
    """Return the configurations of a data set, unless `config` is one of them or they are not known."""
    import datasets

    try:
        names = datasets.get_dataset_config_names(repository, revision=commit)
    except Exception:
        # What went wrong is reported by the caller.
        return []
    return [] if config in names or len(names) < 2 else list(names)


def _no_dataset(repository: str, reason: str, line: str) -> str:
    return (
        f"{repository!r} is neither a file here nor a data set that the hub gives: {reason}; where the hub can be reached, "
        f"write a file and name it: {line}"
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file within this block; other processes wait for it."""
    from huggingface_hub.utils import WeakFileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(path):
        yield


def check_push(repository: str) -> None:
    """Raise ValueError if nothing can be uploaded to the hub: a wrong name, or no token."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push must be OWNER/NAME: got {shown(repository)}: {first_line(error)}") from error
    if repository.count("/") != 1:
        raise UserError(f"--push must be OWNER/NAME: got {shown(repository)}")
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push needs the hub, and HF_HUB_OFFLINE is set: unset it")
    if get_token() is None:
        raise UserError("--push needs a token that may write: `hf auth login`, or the variable HF_TOKEN")


def push(directory: Path, repository: str) -> str:
    """Upload a directory to a repository of the hub, which is created private if it does not exist; return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=directory, commit_message="Upload an export of Fivefold")
    except Exception as error:
        # The hub's client raises many kinds of errors (no network, no access, no such owner).
        raise UserError(
            f"{directory} is written, and cannot be uploaded to {repository}: {first_line(error)}; upload it with `hf "
            f"upload {repository} {directory}`"
        ) from error
    return str(url)


def _take(what: str, download: Callable[[bool], str], endpoint: str | None = None) -> Path:
    """Return the path from `download(only from the cache)`; `what` begins the message if it fails. `endpoint` is another
    hub's."""
    reachable = _answers(endpoint)
    try:
        with users_umask():
            return Path(download(not reachable))
    except Exception as error:
        # The hub's client raises many kinds of errors (no such model, no network, no access); the user sees one message.
        reason = first_line(error) if reachable else _ABSENT
        raise UserError(f"{what}: {reason}") from error


def _answers(endpoint: str | None) -> bool:
    """Whether the hub can be reached; without a network its client would retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        # Only the client can find out whether a proxy reaches the hub.
        return True
    address = urlsplit(endpoint or constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
