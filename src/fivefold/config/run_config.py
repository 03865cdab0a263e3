"""The configuration of a run, and the ways to make one: from a file, from keys of a command line, or from Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.derived import Derived
from fivefold.config.dialect import Dialect, Tree
from fivefold.config.loader import ConfigError, build, override, read, translate
from fivefold.config.machine import elsewhere, on_gpus
from fivefold.config.validate import validate
from fivefold.files import with_umask
from fivefold.tables import take_rows, write_rows


class RunConfig(Derived):
    """The whole configuration of a run: its sections, every key with its value."""

    @classmethod
    def from_yaml(
        cls, path: str | Path, overrides: list[str] | None = None, dialect: str | Dialect | None = None
    ) -> RunConfig:
        """Read a configuration from a YAML file and `a.b.c=value` overrides, both in the spelling of `dialect` (our own if
        left out).

        Raises ConfigError with all errors.

        Example: `RunConfig.from_yaml("grpo.yaml", ["trainer.steps=10"])`.
        """
        translation = translate(read(path), overrides or [], dialect)
        return cls.from_tree(override(translation.tree, translation.overrides))

    @classmethod
    def from_overrides(cls, overrides: list[str]) -> RunConfig:
        """Make a configuration from `a.b.c=value` alone, without a file.

        Raises ConfigError with all errors and missing keys.
        """
        tree = override({}, overrides)
        data = tree.get("data")
        has_data = isinstance(data, dict) and bool(data.get("train"))
        missing = [] if has_data else ["data.train is required: write data.train=[FILE.jsonl]"]
        try:
            config = cls.from_tree(tree)
        except ConfigError as error:
            raise ConfigError([*error.faults, *missing]) from None
        if missing:
            raise ConfigError(missing)
        return config

    @classmethod
    def of(cls, tree: Tree | None = None, /, **sections: Any) -> RunConfig:
        """Make a configuration from nested mappings, or from one mapping per section.

        A function may be passed wherever `path.py:function` is allowed. `data` may have rows in the place of file names, as
        a list of dicts or a `datasets.Dataset`: they are written below the run's directory. If policy.dtype is left out, a
        run without GPUs computes in float32, as in files that `fivefold init` writes. Raises ConfigError with all errors.

        Example: `RunConfig.of(model={"path": "Qwen/Qwen3-0.6B"}, reward={"functions": {my_reward: 1.0}})`.
        """
        merged, rows = take_rows({**(tree or {}), **sections})
        config, policy = cls.from_tree(merged), merged.get("policy") or {}
        has_gpus = elsewhere(config.launch) or on_gpus(config.launch, config.trainer.device)
        if "dtype" not in policy and not has_gpus:
            config = cls.from_tree({**merged, "policy": {**policy, "dtype": "float32"}})
        return config._with_files(rows) if rows else config

    @classmethod
    def from_tree(cls, tree: Tree) -> RunConfig:
        """Make a configuration from nested mappings, as a YAML file has them; raises ConfigError with all errors."""
        config = build(cls, tree)
        if errors := validate(config).errors:
            raise ConfigError(errors)
        return config

    def _with_files(self, rows: dict[str, Any]) -> RunConfig:
        """Return the configuration with the files that rows are written to, and the run directory that it had before."""
        with with_umask(self.trainer.umask):
            files = write_rows(rows, self.run_dir / "data")
        data = self.data.renamed(lambda name: files.get(name, name))
        return replace(self, data=data, trainer=replace(self.trainer, run_dir=str(self.run_dir)))

    @classmethod
    def restore(cls, path: Path) -> RunConfig:
        """Read a configuration from a file with the text of `dump_yaml`. It was validated before, and is not validated
        again."""
        return build(cls, read(path))
