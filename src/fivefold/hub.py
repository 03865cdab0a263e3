"""Downloads from the Hugging Face hub or ModelScope, or reads from their local caches; one message if neither has the
file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fivefold.errors import FULL, UserError, first_line, shown
from fivefold.files import read_json, users_umask

_CONNECT_SECONDS = 5.0
_PROGRESS_SECONDS = 5.0
_OFFLINE = "HF_HUB_OFFLINE is set"
_SOURCE = "; or name local files with --source"
_BRANCH = "master"
"""ModelScope's default."""
_COMMIT = re.compile("[0-9a-f]{40}")
_REVISION = re.compile(r"[\w.+-][\w.+/-]*")
_INDEX = "model.safetensors.index.json"
MODELSCOPE = "modelscope:"
"""Prefix of the id of a model on ModelScope."""


@dataclass(frozen=True)
class _Hub:
    """A hub as its client sees it in this environment."""

    address: str
    pages: str
    """Path of the repositories' pages."""
    folder: str
    """Folder of a repository in the cache, with {} for its id."""
    cache: Path
    cache_variable: str
    """Variable that moves the cache."""
    token: str
    """Variable with the user's token."""

    @property
    def fault(self) -> str | None:
        """Why no request is made or answered; without a network the clients would retry for half a minute."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return _OFFLINE
        if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
            # Only the client can find out whether a proxy reaches the hub.
            return None
        address = urlsplit(self.address)
        try:
            port = address.port or (80 if address.scheme == "http" else 443)
            socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
        except OSError:
            return "it does not answer"
        return None


def _hugging_face(kind: str = "models") -> _Hub:
    from huggingface_hub import constants

    pages = "" if kind == "models" else f"{kind}/"
    return _Hub(constants.ENDPOINT, pages, f"{kind}--{{}}", Path(constants.HF_HUB_CACHE), "HF_HOME", "HF_TOKEN")


def model_snapshot(name: str, wanted: Sequence[str], commit: str | None = None) -> Path:
    """Return a local directory with the files of a model's repository that match `wanted`.

    `name` is OWNER/NAME or modelscope:OWNER/NAME, with `@REVISION` at the end for another than the latest; `commit` takes
    its place.
    """
    repository, _, revision = name.partition("@")
    check_revision(name, revision)
    version = commit or revision or None
    if repository.startswith(MODELSCOPE):
        # Without a revision and a network its client takes any that the cache has.
        directory = _from_modelscope(name, repository.removeprefix(MODELSCOPE), wanted, version or _BRANCH)
        if commit is None and not _COMMIT.fullmatch(commit_of(directory)):
            note = "the commit of these files is not known, so a run that resumes reads the latest ones"
            print(f"download {name}: {note}", file=sys.stderr, flush=True)
        return directory
    from huggingface_hub import snapshot_download

    problem = f"{name!r} is no directory here, and the model cannot be read"
    with _asking(problem, _hugging_face(), repository, version) as cached:
        directory = snapshot_download(repository, revision=version, allow_patterns=list(wanted), local_files_only=cached)
        return _with_weights(Path(directory), wanted)


def check_revision(name: str, revision: str | None) -> None:
    """Raise UserError for a revision that is no branch, tag or commit: clients write its name as a path in their caches."""
    if revision and (not _REVISION.fullmatch(revision) or not set(revision.split("/")).isdisjoint(("", ".", ".."))):
        raise UserError(f"a revision must be a branch, a tag or a commit: got {shown(revision)} in {shown(name)}")


def _modelscope(name: str, kind: str) -> tuple[Any, _Hub]:
    """Return ModelScope's client and its hub for `models` or `datasets`; raise ValueError if the client is not installed."""
    try:
        # modelscope itself imports torch and transformers.
        import modelscope_hub
        import modelscope_hub.compat
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "modelscope_hub"
        why = "not installed here" if is_absent else f"whose import fails: {first_line(error)}"
        raise UserError(f"{name!r} needs modelscope, {why}: pip install 'fivefold[modelscope]'") from error
    settings = modelscope_hub.HubConfig()
    # Its client draws a bar for each file, and logs what the error says too.
    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)
    variables = "MODELSCOPE_CACHE", "MODELSCOPE_API_TOKEN"
    return modelscope_hub, _Hub(str(settings.endpoint), f"{kind}/", f"{kind}/{{}}", settings.cache_dir, *variables)


def _from_modelscope(name: str, repository: str, wanted: Sequence[str], revision: str) -> Path:
    client, hub = _modelscope(name, "models")
    problem = f"{name!r}, a model of ModelScope, cannot be read"
    known = hub.cache / hub.folder.format(repository.replace("/", "--")) / "refs" / revision
    with _asking(problem, hub, repository, revision) as cached, redirect_stderr(StringIO()):
        if not cached and not _COMMIT.fullmatch(revision):
            _note_commit(client, repository, revision, known)
        commit = known.read_text() if known.is_file() else revision
        load = client.compat.snapshot_download
        directory = load(repository, revision=commit, allow_patterns=list(wanted), local_files_only=cached)
        return _with_weights(Path(directory), wanted)


def _listed(client: Any, repository: str, kind: str, revision: str) -> list[dict[str, Any]]:
    """Return what ModelScope says of each file of a `model` or `dataset`."""
    endpoint = client.HubApi().resolve_endpoint_for_read(repository, repo_type=kind)
    listed = client.HubApi(endpoint=endpoint).legacy.list_repo_files(repository, kind, revision=revision)
    return [file for file in listed if file.get("Type") != "tree"]


def _content(files: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((file["Path"], file["Sha256"]) for file in files)


def _note_commit(client: Any, repository: str, revision: str, known: Path) -> None:
    """Write the commit of a branch or tag of ModelScope into a file, if the hub has these files under it."""
    files = _listed(client, repository, "model", revision)
    # The hub names the commit of each file only. The latest is the branch's, unless a file was removed after it.
    commit = max(files, key=lambda file: file.get("CommittedDate") or 0, default={}).get("Revision") or ""
    is_same = False
    if _COMMIT.fullmatch(commit):
        with suppress(Exception):
            is_same = _content(_listed(client, repository, "model", commit)) == _content(files)
    if is_same:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(commit)
    else:
        known.unlink(missing_ok=True)


def _with_weights(snapshot: Path, wanted: Sequence[str]) -> Path:
    """Return the snapshot; raise FileNotFoundError if it lacks wanted weights: clients return what a cache has a part of."""
    if "*.safetensors" in wanted:
        index = snapshot / _INDEX
        names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["*.safetensors"]
        if missing := [name for name in names if not any(snapshot.glob(name))]:
            raise FileNotFoundError(f"it has no {missing[0]}")
    return snapshot


def cached_models() -> dict[str, Path]:
    """Id -> directory of each model with a config.json in the Hugging Face hub's cache on this machine."""
    from huggingface_hub import constants

    configs = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*/snapshots/*/config.json"))
    return {"/".join(path.parts[-4].split("--", 2)[1:]): path.parent for path in configs}


def commit_of(snapshot: Path) -> str:
    """Return the commit of a directory from `model_snapshot`, or of a data set's parquet file."""
    if snapshot.suffix == ".parquet":
        return snapshot.parent.parent.name
    # Caches of ModelScope's first client have one revision, without its name.
    return snapshot.name if snapshot.parent.name == "snapshots" else _BRANCH


def dataset_file(repository: str, name: str) -> Path:
    """Download one file of a data set's repository."""
    from huggingface_hub import hf_hub_download

    with _asking(f"{repository} cannot be downloaded", _hugging_face("datasets"), repository, way_round=_SOURCE) as cached:
        return Path(hf_hub_download(repository, name, repo_type="dataset", local_files_only=cached))


def dataset_commit(repository: str, revision: str | None, line: str) -> str | None:
    """Return the commit of a data set's revision, for ModelScope a hash of its files; None if the hub does not answer.
    `line` writes it as parquet."""
    check_revision(repository, revision)
    plain_name = repository.removeprefix(MODELSCOPE)
    client, hub = (None, _hugging_face("datasets")) if plain_name == repository else _modelscope(repository, "datasets")
    if hub.fault is not None:
        return None
    from huggingface_hub import HfApi

    try:
        if client is None:
            return str(HfApi().dataset_info(repository, revision=revision).sha)
        # Its lists name the commit of each file only.
        files = _content(_listed(client, plain_name, "dataset", revision or _BRANCH))
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:40]
    except Exception as error:
        # As in `_asking`: the user sees one message.
        raise UserError(_no_dataset(repository, _reason(error, hub, plain_name, revision), line)) from error


def load_dataset_splits(
    repository: str, config: str | None, revision: str | None, commit: str | None, line: str
) -> tuple[dict[str, Any], str]:
    """Return (split -> `datasets.Dataset`, commit); without a commit, of what the cache of `datasets` has."""
    from huggingface_hub import utils

    try:
        import datasets
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "datasets"
        why = "not installed here" if is_absent else f"whose import fails: {first_line(error)}"
        raise UserError(
            f"{repository!r} is no file here, and a data set of the hub needs datasets, {why}: pip install "
            f"'fivefold[datasets]', or run where it is installed: {line}, and name that file"
        ) from error
    if repository.startswith(MODELSCOPE):
        return _splits_from_modelscope(repository, config, revision, commit, line)
    hub = _hugging_face("datasets")
    offline = hub.fault
    with nullcontext() if offline is None else _without_requests(datasets.config):
        try:
            with _without_bars(datasets.utils), _without_bars(utils), _progress(repository, hub):
                splits = datasets.load_dataset(repository, config, revision=commit)
            commit = commit or Path(next(iter(splits.values())).cache_files[0]["filename"]).parent.name
        except Exception as error:
            # The library raises many kinds of errors (no such data set, no network, no access, damaged files).
            if names := _configurations(repository, config, commit):
                listed = ", ".join(f"{repository}:{name}" for name in names)
                raise UserError(f"{repository!r} must name one of its configurations: {listed}") from error
            # The network may have failed meanwhile.
            offline = offline or hub.fault
            refusal = None if offline else _refusal(repository)
            reason = _why(refusal or error, hub, repository, commit, offline)
            raise UserError(_no_dataset(repository, reason, line)) from error
    return dict(splits), commit


def _splits_from_modelscope(
    name: str, config: str | None, revision: str | None, commit: str | None, line: str
) -> tuple[dict[str, Any], str]:
    """Return (split -> `datasets.Dataset`, hash of the files) of a data set of ModelScope."""
    import datasets

    (client, hub), repository = _modelscope(name, "datasets"), name.removeprefix(MODELSCOPE)
    branch = revision or _BRANCH
    if commit is None:
        raise UserError(
            _no_dataset(name, _why(OSError(), hub, repository, revision, hub.fault or "it did not answer"), line)
        )
    if commit != branch and (now := dataset_commit(name, revision, line)) not in (commit, None):
        raise UserError(
            f"{name!r} has changed: the run began with its files of hash {commit}, and it has those of {now} now; name "
            "local files, or begin another run"
        )
    problem = f"{name!r}, a data set of ModelScope, cannot be read"
    with _asking(problem, hub, repository, revision) as cached, redirect_stderr(StringIO()):
        folder = client.compat.dataset_snapshot_download(repository, revision=branch, local_files_only=cached)
    try:
        with _without_bars(datasets.utils):
            # In its usual cache the library would find earlier rows of the same folder.
            cache = Path(datasets.config.HF_DATASETS_CACHE) / f"modelscope-{commit}"
            return dict(datasets.load_dataset(folder, config, cache_dir=str(cache))), commit
    except Exception as error:
        # As in `load_dataset_splits`.
        if names := _configurations(folder, config, None):
            listed = ", ".join(f"{name}:{configuration}" for configuration in names)
            raise UserError(f"{name!r} must name one of its configurations: {listed}") from error
        raise UserError(_no_dataset(name, first_line(error), line)) from error


def _refusal(repository: str) -> Exception | None:
    """Return the hub's error if the user has no access to a data set: `datasets` does not pass it on."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().auth_check(repository, repo_type="dataset")
    except Exception as error:
        return error if isinstance(error, RepositoryNotFoundError) else None
    return None


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


@contextmanager
def _asking(problem: str, hub: _Hub, repository: str, revision: str | None = None, way_round: str = "") -> Iterator[bool]:
    """Yield whether only the cache can be read; an error within the block becomes a sentence that `problem` begins."""
    from huggingface_hub import utils

    offline = hub.fault
    try:
        with users_umask(), _without_bars(utils), _progress(repository, hub):
            yield offline is not None
    except Exception as error:
        # The clients raise many kinds of errors (no such model, no network, no access); the user sees one message.
        reason = _why(error, hub, repository, revision, offline)
        raise UserError(f"{problem} from {hub.address}: {reason}{way_round}") from error


def _why(error: Exception, hub: _Hub, repository: str, revision: str | None, offline: str | None) -> str:
    """Return why a download failed, and what to do; `offline` says why only the cache was read."""
    if offline is not None:
        return f"{offline}, and its cache in {hub.cache} does not have all of it"
    return _reason(error, hub, repository, revision)


_REASONS = {
    "GatedRepoError AuthenticationError PermissionDeniedError":
        "access to it is restricted: accept its license at {page}, then set {token} to a token of that account",
    "RevisionNotFoundError": "it has no revision {revision!r}",
    "RemoteEntryNotFoundError": "it has no such file",
    "RepositoryNotFoundError": "there is none of this name, or it is private (then set {token} to a token that may read it)",
    "NotExistError": "there is none of this name{at}, or it is private (then set {token} to a token that may read it)",
    "TransportError ConnectionError Timeout RequestTimeoutError":
        "the connection broke off ({first}); run the same command again: files that are complete stay in {cache}",
}  # fmt: skip
"""Names of the clients' errors -> reason. The clients are imported only if they are used, so names stand for classes."""
_STATUSES = {
    401: "it refuses the token in {token}: set another one, or none",
    403: "the token in {token} may not read it",
    429: "it takes no more requests for now ({first}): try again later, or set {token}",
}


def _reason(error: BaseException, hub: _Hub, repository: str, revision: str | None) -> str:
    """Return why the hub did not return the files, and what to do."""
    causes = list(_causes(error))
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    statuses = [getattr(cause, "status_code", None) or _status(cause) for cause in causes]
    status = next((known for known in statuses if known), 0)
    values = {
        "page": f"{hub.address}/{hub.pages}{repository}",
        "token": hub.token,
        "cache": hub.cache,
        "revision": revision,
        "at": f" with revision {revision!r}" if revision not in (None, _BRANCH) else "",
        "first": first_line(causes[-1]),
    }
    if any(isinstance(cause, OSError) and cause.errno in FULL for cause in causes):
        return f"the disk of {hub.cache} is full: make room, or set {hub.cache_variable} to a directory on another one"
    for kinds, reason in _REASONS.items():
        if not names.isdisjoint(kinds.split()):
            return reason.format(**values)
    if status >= 500:
        return f"it answers with status {status}: try again later"
    return _STATUSES[status].format(**values) if status in _STATUSES else first_line(error)


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it; of ModelScope's for several files, that of the first."""
    now: BaseException | None = error
    while now is not None:
        yield now
        files = getattr(now, "failed_files", None)
        now = next(iter(files.values())) if files else now.__cause__ or now.__context__


@contextmanager
def _progress(repository: str, hub: _Hub) -> Iterator[None]:
    """Print every few seconds how much of a repository has arrived in the cache, whatever client downloads it."""
    folder, out = hub.cache / hub.folder.format(repository.replace("/", "--")), sys.stderr
    is_done = threading.Event()

    def report() -> None:
        begin, first = time.monotonic(), _size(folder)
        before = first
        while not is_done.wait(_PROGRESS_SECONDS):
            if (size := _size(folder)) > before + 1e6:
                megabytes, seconds = (size - first) / 1e6, time.monotonic() - begin
                line = f"download {repository}: {megabytes:,.0f} MB so far, {megabytes / seconds:,.1f} MB/s"
                print(line, file=out, flush=True)
                before = size

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _size(folder: Path) -> int:
    """Return the bytes of a folder's files; they may be renamed meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size
    return total


@contextmanager
def _without_requests(*settings: Any) -> Iterator[None]:
    """Let Hugging Face's clients read only their caches within this block: without a network they would retry for a
    minute. `settings` are modules with copies of the client's setting."""
    from huggingface_hub import constants

    before = [(module, module.HF_HUB_OFFLINE) for module in (constants, *settings)]
    for module, _ in before:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in before:
            module.HF_HUB_OFFLINE = value


@contextmanager
def _without_bars(library: Any) -> Iterator[None]:
    """Turn off the library's progress bars within this block: they draw with control characters."""
    was_off = library.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            library.enable_progress_bars()
