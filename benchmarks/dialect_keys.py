"""Write which keys other systems know: `python benchmarks/dialect_keys.py DIRECTORY`.

DIRECTORY has the systems' defaults, `SYSTEM*.json`: a `tree` as it is composed, or `classes` by name with the type of each
field; the trees of older releases are those of their wheels (`make test-eras` fetches them). Those of their keys that a row
with a wildcard stands for go into src/fivefold_dialects/known/SYSTEM.txt: such a row takes these and no others.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
sys.path[:0] = [str(SOURCE), str(ROOT)]

from fivefold.config.dialect import find_system  # noqa: E402
from fivefold_dialects import SYSTEMS  # noqa: E402
from fivefold_dialects.system import System  # noqa: E402
from tests.eras import eras  # noqa: E402

ROOTS = {
    "siirl": {"SiiRLArguments": ""},
    "trinity": {"Config": "", "veRLConfig": "trainer.trainer_config."},
    "roll": dict.fromkeys(("RLVRConfig", "AgenticConfig", "SFTConfig", "DPOConfig", "DistillConfig"), ""),
    "areal": dict.fromkeys(("GRPOConfig", "PPOConfig", "SFTConfig", "RWConfig", "DPOConfig"), ""),
    "skyrl": {"SkyRLTrainConfig": "", "SFTConfig": ""},
}
"""Classes that are whole configurations, and where they stand."""
PLACES = {"trinity_trainer_config": "trainer.trainer_config."}
"""Trees that are a section."""
TRAINED = ("actor_train.", "sft_train.", "critic.", "reference.")
"""Of ROLL: whose strategy_config goes to Megatron, whose names are known."""
TOLD_ELSEWHERE = ("trainer_config",)
"""Mappings whose keys other classes name."""
_DEPTH = 8


def of_tree(tree: Mapping[str, Any], start: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{start}{name}"
        if isinstance(value, Mapping):
            yield from of_tree(value, f"{start}{name}.")
            if not value and name not in TOLD_ELSEWHERE:
                yield f"{start}{name}.**"


def of_class(classes: Mapping[str, Any], name: str, start: str, depth: int = 0) -> Iterator[str]:
    # Where a name is that of several classes, `NAME (path)` is another one: a key of either is known.
    same = [class_name for class_name in classes if class_name == name or class_name.startswith(f"{name} (")]
    for field, entry in (item for class_name in same for item in classes[class_name].items()):
        kind = entry["type"]
        yield f"{start}{field}"
        inner = [class_name for class_name in re.findall(r"\w+", kind) if class_name in classes]
        if inner and depth < _DEPTH:
            below = f"{start}{field}.*." if re.search(r"[Dd]ict\[", kind) else f"{start}{field}."
            yield from of_class(classes, inner[0], below, depth + 1)
        elif field in TOLD_ELSEWHERE or (field == "strategy_config" and start.startswith(TRAINED)):
            continue
        elif "ict" in kind.split("[")[0] or "Dict" in kind or kind == "Any":
            yield f"{start}{field}.**"


def of_system(directory: Path, system: str) -> set[str]:
    keys: set[str] = set()
    for path in sorted(directory.glob(f"{system}*.json")):
        content = json.loads(path.read_text())
        if "tree" in content:
            keys.update(of_tree(content["tree"], PLACES.get(path.stem, "")))
        for name, start in ROOTS.get(system, {}).items():
            if name in content.get("classes", {}):
                keys.update(of_class(content["classes"], name, start))
        if path.stem == "roll_strategy_config_classes":
            for fields in content["classes"].values():
                keys.update(f"*.strategy_args.strategy_config.{field}" for field in fields)
    for era in eras.every():
        if era.system == system:
            # A mapping that was empty once is no section in which everything is known.
            keys.update(key for key in of_tree(eras.nested(era.settings), "") if not key.endswith(".**"))
    return keys


def behind_wildcards(system: str, keys: set[str]) -> set[str]:
    """Those that have no row of their own."""
    dialect = find_system(system)
    assert isinstance(dialect, System)

    def is_behind(key: str) -> bool:
        plain = key.replace(".**", ".x").replace(".*", ".x")
        return any(
            plain not in table.exact and any(pattern.fullmatch(plain) for pattern, _ in table.patterns)
            for table in dialect.tables
        )

    return {key for key in keys if is_behind(key)}


def write(path: Path, keys: set[str]) -> None:
    sections: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        # What is below `a.**` needs no line of its own.
        parts = key.split(".")
        if not any(".".join([*parts[:count], "**"]) in keys for count in range(1, len(parts) - (parts[-1] == "**"))):
            section, _, name = key.rpartition(".")
            sections[section].append(name)
    path.write_text("".join(f"{section}: {' '.join(names)}\n" for section, names in sorted(sections.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    for system in SYSTEMS:
        keys = behind_wildcards(system, of_system(options.directory, system))
        write(SOURCE / f"fivefold_dialects/known/{system}.txt", keys)
        print(f"{system}: {len(keys)} keys")


if __name__ == "__main__":
    main()
