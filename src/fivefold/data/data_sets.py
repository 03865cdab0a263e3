"""Names of data sets -> local files: files and directories here, data sets of Hugging Face and ModelScope. No torch here.

A data set of the hub is written as parquet into a cache on the machine, one file for each split of a commit. A second
process waits for the first one and then reads the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fivefold.config.schema import DataConfig
from fivefold.data.rows import bounds_of, part_of
from fivefold.errors import UserError
from fivefold.files import read_json, read_text, users_umask, write_whole
from fivefold.hub import MODELSCOPE, dataset_commit, load_dataset_splits, locked
from fivefold.tables import DATA_SETS, write_data_set

FORMS = (
    "a parquet or jsonl file, a directory of `save_to_disk`, or [modelscope:]OWNER/NAME[:CONFIG][/SPLIT][@REVISION] of a hub"
)
"""What a name may be."""
_SUFFIXES = (".parquet", ".jsonl", ".json")
_NAME = re.compile(
    rf"(?P<repository>({MODELSCOPE})?\w[\w.-]*/\w[\w.-]*)(:(?P<config>[^/@:]+))?(/(?P<split>\w[\w.-]*))?(@(?P<revision>[^@]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubDataSet:
    """A data set of a hub, named as [modelscope:]OWNER/NAME[:CONFIG][/SPLIT][@REVISION]."""

    repository: str
    """OWNER/NAME, with the prefix `modelscope:` for ModelScope."""
    config: str | None
    split: str | None
    revision: str | None

    @classmethod
    def parse(cls, name: str) -> HubDataSet | None:
        """Return the data set that a name stands for; None for a path."""
        file = name.removesuffix(bounds_of(name))
        if (match := _NAME.fullmatch(file)) is None or Path(file).exists() or Path(file).suffix in _SUFFIXES:
            return None
        return cls(**match.groupdict())

    @property
    def name(self) -> str:
        """Return the name, as in `data.train`."""
        parts = ((":", self.config), ("/", self.split), ("@", self.revision))
        return self.repository + "".join(f"{mark}{part}" for mark, part in parts if part)

    @property
    def line(self) -> str:
        """Shell command that writes the data set as parquet, or downloads its files."""
        if self.repository.startswith(MODELSCOPE):
            revision = f" --revision {self.revision}" if self.revision else ""
            return f"modelscope download --dataset {self._name}{revision} --local_dir {self._name.rpartition('/')[2]}"
        config = f", {self.config!r}" if self.config else ""
        revision = f", revision={self.revision!r}" if self.revision else ""
        split = self.split or "train"
        loaded = f"load_dataset({self.repository!r}{config}, split={split!r}{revision})"
        return f"python -c \"from datasets import load_dataset; {loaded}.to_parquet('{split}.parquet')\""

    def file(self, cache: Path, usual_split: str | None, commit: str | None) -> Path:
        """Return the parquet file of the split, and write it if it is not in the cache; `commit` pins it."""
        home = self._home(cache)
        with users_umask(), locked(home / ".lock"):
            commit = commit or self._commit(home)
            if commit is not None and (splits := _known_splits(home / commit / self._config)):
                path = home / commit / self._config / f"{self._chosen(splits, usual_split)}.parquet"
                if path.is_file():
                    return path
            loaded, commit = load_dataset_splits(self.repository, self.config, self.revision, commit, self.line)
            directory = home / commit / self._config
            path = directory / f"{self._chosen(list(loaded), usual_split)}.parquet"
            write_data_set(loaded[path.stem], path, self._name)
            write_whole(directory / "splits.json", json.dumps(list(loaded)))
            write_whole(self._pointer(home), commit)
        return path

    def splits(self, cache: Path) -> list[str]:
        """Return the splits of a data set that is in the cache."""
        home = self._home(cache)
        pointer = self._pointer(home)
        return _known_splits(home / read_text(pointer) / self._config) if pointer.is_file() else []

    @property
    def _name(self) -> str:
        return self.repository.removeprefix(MODELSCOPE)

    def _home(self, cache: Path) -> Path:
        return cache / "hub" / self.repository.replace("/", "--").replace(":", "--")

    @property
    def _config(self) -> str:
        return quote(self.config or "default", safe="")

    def _pointer(self, home: Path) -> Path:
        """Return the file with the commit that the revision was when the hub was last reached."""
        return home / "refs" / quote(self.revision or "main", safe="")

    def _commit(self, home: Path) -> str | None:
        """Return the commit of the revision; None if the hub does not answer and the cache does not have it."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        if (commit := dataset_commit(self.repository, self.revision, self.line)) is not None:
            return commit
        pointer = self._pointer(home)
        return read_text(pointer) if pointer.is_file() else None

    def _chosen(self, splits: list[str], usual: str | None) -> str:
        wanted = self.split or (splits[0] if len(splits) == 1 else usual)
        if wanted not in splits:
            name = f"{self.repository}{f':{self.config}' if self.config else ''}"
            problem = f"has no split {wanted!r}" if wanted else "has several splits"
            raise UserError(f"{name} {problem}: name one of {', '.join(f'{name}/{split}' for split in splits)}")
        return wanted


def _known_splits(directory: Path) -> list[str]:
    path = directory / "splits.json"
    return [str(split) for split in read_json(path)] if path.is_file() else []


def hub_names(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of each data set of the hub."""
    for key in DATA_SETS:
        yield from ((key, name) for name in getattr(data, key) if HubDataSet.parse(name) is not None)


def local_file(name: str, key: str, cache: Path, commit: str | None = None) -> Path:
    """Return the local file or directory of a name; a data set of the hub is downloaded unless the cache has it.

    Without a split in the name, `train` is taken, but not for evaluation. Raises ValueError if there is none.
    """
    hub = HubDataSet.parse(name)
    if hub is not None:
        return hub.file(cache, None if key == "val" else "train", commit)
    file = part_of(Path(name))[0]
    if not file.exists():
        raise UserError(f"no file at {name}; `fivefold data` writes data sets")
    return file


def with_files(data: DataConfig, files: Mapping[str, Path]) -> DataConfig:
    """Return the section with the local file in the place of each name in `files`; a part `[:100]` of it stays."""
    return data.renamed(lambda name: f"{files[name]}{bounds_of(name)}" if name in files else name)


def cache_of(data: DataConfig) -> Path:
    """Return the directory for data sets of the hub and for tokenized prompts."""
    return Path(data.cache_dir).expanduser()
