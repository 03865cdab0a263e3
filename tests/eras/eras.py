"""The trainers of every release that is on PyPI, with the tree of all their keys at their defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import yaml

from fivefold.config.dialect import Translation, Tree, find_dialect
from fivefold_dialects.source import flatten
from tests.eras import archives
from tests.eras.dataclass_defaults import Classes
from tests.eras.hydra import compose

HOME = {"HOME": "/home/me"}


@dataclass(frozen=True)
class Era:
    """One trainer of one release."""

    system: str
    package: str
    version: str
    trainer: str
    read: Callable[[], Tree] = field(repr=False, compare=False)
    release: str = ""
    """The name after `--from SYSTEM@` of the defaults that it had; empty for today's."""
    run: tuple[str, ...] = ()
    """Keys that say what the run is of, which no default can stand for: they are set to the tree's values in both runs."""
    added: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    """Keys without a default that every run must set, and the name of the program."""

    def __str__(self) -> str:
        return f"{self.package}-{self.version}-{self.trainer}"

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every key at its default."""
        return {key: value for key, value in flatten(self.read()) if value != "???"}

    def whole(self, switches: Mapping[str, Any]) -> Translation:
        """The run with all keys at their defaults but the switches."""
        return self._translated(self.settings, switches)

    def bare(self, switches: Mapping[str, Any]) -> Translation:
        """The run with none but the switches, with the defaults of the release."""
        stated = {key: self.settings[key] for key in self.run if key in self.settings}
        return self._translated(stated, switches)

    def _translated(self, settings: Mapping[str, Any], switches: Mapping[str, Any]) -> Translation:
        translate: Any = find_dialect(self.system)
        words = [f"{key}={value}" for key, value in {**self.added, **switches}.items()]
        return translate(nested(settings), words, environment=HOME, version=self.release)


def nested(settings: Mapping[str, Any]) -> Tree:
    """The tree of full keys; a key that is set below a value which is no section takes its place."""
    tree: Tree = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            child = node.get(parent)
            node[parent] = node = child if isinstance(child, dict) else {}
        if not (isinstance(node.get(last), dict) and node[last] and not isinstance(value, dict)):
            node[last] = value
    return tree


def _verl() -> list[Era]:
    releases = {
        "0.1": "2024-11", "0.2": "2025-02", "0.2.0.post2": "2025-02", "0.3.0.post1": "2025-03", "0.4.0": "2025-06",
        "0.4.1": "2025-06", "0.5.0": "2025-07", **dict.fromkeys(("0.6.0", "0.6.1", "0.7.0", "0.7.1", "0.8.0"), "2026-06"),
    }  # fmt: skip
    files = "data.train_files", "data.val_files"
    rl = (
        *files,
        "actor_rollout_ref.model.path",
        "critic.model.path",
        "reward_model.model.path",
        "reward.reward_model.model_path",
    )
    eras: list[Era] = []
    for name, version in archives.pins():
        if name != "verl":
            continue

        def reader(place: str, directory: str = "", version: str = version) -> str | None:
            text_of_release = archives.text("verl", version, f"{directory}/{place}") if directory else None
            return text_of_release or archives.text("verl", version, f"verl/trainer/config/{place}")

        def of(
            trainer: str, name: str, keys: tuple[str, ...], directory: str = "", choices: Any = None, added: Any = None,
            reader: Any = reader, version: str = version,
        ) -> None:  # fmt: skip
            if reader(f"{name}.yaml", directory) is not None:
                read = partial(compose, partial(reader, directory=directory), name, choices)
                # Of the newer SFT trainer no default has changed that has an older release of its own here.
                release = "" if trainer.startswith("sft-") else releases.get(version, "")
                named = {"--config-name": name} if trainer != "ppo" else {}
                eras.append(Era("verl", "verl", version, trainer, read, release, keys, {**named, **(added or {})}))

        of("ppo", "ppo_trainer", rl)
        of("ppo-megatron", "ppo_megatron_trainer", rl)
        for engine in ("veomni", "torchtitan"):
            if reader(f"model_engine/{engine}.yaml") is not None:
                of(f"ppo-{engine}", "ppo_trainer", rl, choices={"model_engine": engine}, added={"model_engine": engine})
        for mode in ("one_step_off", "fully_async"):
            program = f"verl.experimental.{mode}_policy.{'main_ppo' if mode == 'one_step_off' else 'fully_async_main'}"
            for engine in ("", "_megatron"):
                place = f"verl/experimental/{mode}_policy/config"
                of(f"{mode}{engine}", f"{mode}_ppo{engine}_trainer", rl, place, added={"-m": program})
        sft = (*files, "model.partial_pretrain", "model.path")
        of("sft", "sft_trainer", sft, added={"-m": "verl.trainer.fsdp_sft_trainer"})
        for engine in ("fsdp", "megatron", "veomni", "torchtitan", "automodel"):
            if reader(f"engine/{engine}.yaml") is not None:
                choices = {"engine": engine, "optim": engine}
                of(
                    f"sft-{engine}",
                    "sft_trainer_engine",
                    sft,
                    choices=choices,
                    added={"-m": "verl.trainer.sft_trainer", **choices},
                )
    return eras


def _of_classes(
    system: str, package: str, roots: Mapping[str, str], files: tuple[str, ...], run: tuple[str, ...],
    added: Mapping[str, Mapping[str, Any]] | None = None, releases: Mapping[str, str] | None = None,
) -> list[Era]:  # fmt: skip
    """Trainers whose defaults are dataclasses: name -> root class."""
    eras = []
    for name, version in archives.pins():
        if name != package:
            continue
        for trainer, root in roots.items():

            def read(version: str = version, root: str = root) -> Tree:
                return classes(package, version, files).tree(root)

            release = (releases or {}).get(version, "")
            eras.append(Era(system, package, version, trainer, read, release, run, (added or {}).get(trainer, {})))
    return eras


def classes(package: str, version: str, files: tuple[str, ...]) -> Classes:
    """The classes in those of these files that a wheel has."""
    texts = [archives.text(package, version, file) for file in files]
    return Classes.of(text for text in texts if text is not None)


def _trl() -> list[Era]:
    """TRL's programs: the class of each over transformers' arguments, with those of the model and of the data."""
    modules = (
        "scripts/utils",
        "scripts/grpo",
        *(f"trainer/{name}_config" for name in ("base", "grpo", "dpo", "sft", "model")),
    )
    added = {"model_name_or_path": "m", "dataset_name": "a/b", "num_processes": 8}
    needed: dict[str, dict[str, Any]] = {
        "grpo": {"reward_funcs": "accuracy_reward"},
        "dpo": {},
        "sft": {"completion_only_loss": True},
    }

    def read(version: str, program: str) -> Tree:
        texts = [archives.text("trl", version, f"trl/{module}.py") for module in modules]
        texts += [archives.text("transformers", base, "transformers/training_args.py")]
        known = Classes.of(text for text in texts if text is not None)
        script = "GRPOScriptArguments" if program == "grpo" else "ScriptArguments"
        roots = (f"{program.upper()}Config", "ModelConfig", script, "DatasetMixtureConfig")
        return {key: value for root in roots for key, value in known.tree(root).items()}

    (version,), (base,) = ([pin[1] for pin in archives.pins() if pin[0] == name] for name in ("trl", "transformers"))
    return [
        Era("trl", "trl", version, program, partial(read, version, program), added={**added, **more, "-m": program})
        for program, more in needed.items()
    ]


_TRINITY = {
    "model.model_path": "/m", "buffer.explorer_input.taskset.path": "/d", "model.max_prompt_tokens": 512,
    "model.max_response_tokens": 512, "cluster.node_num": 1, "cluster.gpu_per_node": 8, "buffer.batch_size": 32,
}  # fmt: skip
_TRINITY_RELEASES = {
    "0.1.0": "2025-05", "0.1.1": "2025-05", "0.2.0": "2025-09", "0.2.1": "2025-09", "0.3.0": "2025-09", "0.3.3": "2025-11",
    "0.4.0": "2026-01", "0.4.1": "2026-01", "0.5.0": "2026-02", "0.5.2": "2026-02", "0.6.0": "2026-06",
}  # fmt: skip
_AREAL = {
    "actor.backend": "fsdp:d8", "rollout.backend": "vllm:d8", "actor.path": "/m", "train_dataset.path": "/d",
    "train_dataset.batch_size": 32, "actor.kl_ctl": 0.0, "critic.path": "/m",
}  # fmt: skip
"""What a run must say, since the classes have nothing for it or what no run can start with."""


def every() -> list[Era]:
    """The trainers of all wheels; a trainer that a release lacks is left out."""
    siirl = tuple(f"siirl/{place}/{name}_args.py" for place in ("params", "utils/params")
                  for name in ("training", "data", "model", "dag", "profiler", "embodied"))  # fmt: skip
    eras = [
        *_verl(),
        *_of_classes("siirl", "siirl", {"dag": "SiiRLArguments"}, siirl,
                     ("data.train_files", "data.val_files", "actor_rollout_ref.model.path")),
        *_of_classes("trinity", "trinity-rft", {"rft": "Config"}, ("trinity/common/config.py", "trinity/common/constants.py"),
                     (), {"rft": _TRINITY}, _TRINITY_RELEASES),
        *_of_classes("areal", "areal", {name: f"{name.upper()}Config" for name in ("grpo", "ppo", "sft", "rw", "dpo")},
                     ("areal/api/cli_args.py", "areal/utils/constants.py"), ("experiment_name", "trial_name", "cluster.fileroot"),
                     {"dpo": _AREAL | {"beta": 0.1}, "rw": _AREAL, "sft": _AREAL} | dict.fromkeys(("grpo", "ppo"), _AREAL)),
        *_of_classes("skyrl", "skyrl", {"rl": "SkyRLTrainConfig", "sft": "SFTConfig"},
                     ("skyrl/train/config/config.py", "skyrl/train/config/sft_config.py"),
                     ("trainer.policy.model.path", "data.train_data", "data.val_data", "model.path", "dataset_name", "dataset_split"),
                     {"sft": {"-m": "skyrl.train.main_sft", "max_length": 512}}),
        *_trl(),
    ]  # fmt: skip
    return [era for era in eras if _is_there(era)]


def _is_there(era: Era) -> bool:
    try:
        return bool(era.read())
    except KeyError:
        return False


def load(name: str) -> Any:
    """A data file of this directory."""
    from pathlib import Path

    return yaml.safe_load(Path(__file__).with_name(name).read_text())
