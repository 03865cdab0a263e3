"""How much of other systems' real configurations is read: `python benchmarks/dialect_coverage.py DIRECTORY [SYSTEM...]`.

DIRECTORY has `SYSTEM.jsonl` and `older-SYSTEM.jsonl`, one configuration a line: `settings`, `tree` or `config_tree`,
`options`, `entry`, `config_name`, `kind`. Of those that train a language model without tools: the share of key occurrences
that are translated, fixed, refused by name, unknown; and the share of configurations that convert to a run which
`fivefold check` accepts. Models, data and variables that stand open are replaced by stand-ins that fit the layout, and
the machine by hosts with enough GPUs, vLLM and SGLang: what is left are the configuration's own faults and what is not
supported.

Example: `python benchmarks/dialect_coverage.py DIRECTORY verl --show 20` lists the most frequent reasons too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.config import ConfigError, RunConfig
from fivefold.config.dialect import Translation, Tree, find_dialect
from fivefold.config.packages import LAUNCHERS, TRACKERS, missing_packages
from fivefold.data.tokenizer import train_tokenizer
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.families import load_spec
from fivefold.models.parameters import VALUE_HEAD
from fivefold.plan.check import check
from fivefold.plan.data_files import ROWS
from fivefold_dialects import SYSTEMS
from fivefold_dialects.source import flatten
from fivefold_dialects.trinity import join

OTHER_KINDS = ("vlm", "agentic", "distill")
DENOISING = ("num_inference_steps", "sampling_steps")
"""Settings that models of images and videos have, which draw by denoising: by the end of their name."""
AGENTS = ("rllm.", "rllm/")
"""Settings of frameworks whose programs are agents, Python of the user's that samples as it likes: by their beginning."""
QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 16384, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64,
    "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "norm_topk_prob": True,
}  # fmt: skip


def is_left_out(record: dict[str, Any]) -> bool:
    """It is not of a language model without tools: by its kind, or by settings that only models of images or agents have; or
    a Trinity run whose workflow is a class of the user's (a dotted path), a program whose turns, tools and rewards its code
    alone says, or asks models next to the policy."""
    tree = record.get("tree") or {}
    keys = [*dict(flatten(tree or record.get("config_tree") or {})), *(record.get("settings") or {})]
    is_other = any(key.rpartition(".")[2] in DENOISING or key.startswith(AGENTS) for key in keys)
    tasks = (tree.get("buffer") or {}).get("explorer_input") or {}
    workflows = [str(place.get("default_workflow_type") or "") for place in (tasks, tasks.get("taskset") or {})]
    asks_others = bool((tree.get("explorer") or {}).get("auxiliary_models"))
    is_program = record["system"] == "trinity" and (asks_others or any("." in name for name in workflows))
    return record["kind"] in OTHER_KINDS or is_other or is_program


class _Standing(dict[str, str]):
    """Variables that stand open: paths, 8 of GPUs and nodes, or 1 where another number is needed."""

    def __contains__(self, name: object) -> bool:
        # A name with a dot is a key of the configuration.
        return "." not in str(name)

    def __missing__(self, name: str) -> str:
        if any(word in name.upper() for word in ("HOME", "PATH", "DIR", "ROOT", "MODEL", "PWD", "FILE")):
            return "/stand/in"
        return "8" if any(word in name.upper() for word in ("GPU", "NODE", "WORKER_NUM")) else "1"

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def records(directory: Path, system: str) -> Iterator[dict[str, Any]]:
    for name in (f"{system}.jsonl", f"older-{system}.jsonl"):
        if (path := directory / name).is_file():
            yield from (json.loads(line) for line in path.read_text().splitlines())


def source_of(record: dict[str, Any]) -> tuple[Tree, list[str]]:
    """Tree and words of a record; what a command line says in options stands among the words."""
    tree = record.get("tree") or record.get("config_tree") or {}
    open_commands = [text for text in record.get("unresolved") or () if text.startswith("$(")]
    words = [
        f"{key}={'1' if str(value) in open_commands else value}" for key, value in (record.get("settings") or {}).items()
    ]
    if record.get("entry"):
        words.append(f"-m={record['entry']}")
    if record.get("config_name") and not record.get("config_tree"):
        words.append(f"--config-name={record['config_name']}")
    return tree, words


def second_file(record: dict[str, Any]) -> str | None:
    """The file of a Trinity run that has verl's settings."""
    trainer = (record.get("tree") or {}).get("trainer")
    return trainer.get("trainer_config_path") if isinstance(trainer, dict) else None


def runs(rows: list[dict[str, Any]], directory: Path) -> Iterator[dict[str, Any]]:
    """The records that are runs, with their second file in `directory`: of the same commit or of another, empty where the
    collection has none. What is only a second file (verl's sections, and nothing of Trinity's) is no run."""
    places = {(record.get("commit"), record["path"]): record for record in rows}
    anywhere = {record["path"]: record for record in rows}
    named = {(record.get("commit"), second_file(record)) for record in rows}
    for record in rows:
        tree = record.get("tree") or {}
        if (record.get("commit"), record["path"]) in named or ("actor_rollout_ref" in tree and not record.get("entry")):
            continue
        if (name := second_file(record)) is not None:
            other = places.get((record.get("commit"), name)) or anywhere.get(name)
            path = directory / f"second-{len(list(directory.iterdir()))}.yaml"
            path.write_text(json.dumps(other["tree"] if other else {}))
            tree = {**record["tree"], "trainer": {**record["tree"]["trainer"], "trainer_config_path": str(path)}}
            record = {**record, "tree": tree}
        yield record


def joined(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records, where two files of a Trinity run, explorer's and trainer's, are one: of a commit, directory and name."""
    waiting: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in rows:
        tree = record.get("tree") or {}
        if tree.get("mode") not in ("explore", "train"):
            yield record
            continue
        place = (record.get("commit"), Path(record["path"]).parent, tree.get("project"), tree.get("name"))
        if (other := waiting.pop(place, None)) is not None and other["tree"]["mode"] != tree["mode"]:
            yield {**record, "tree": join([other["tree"], tree])}
        else:
            waiting[place] = record
    yield from waiting.values()


TRUTHS = {
    "code": json.dumps({"inputs": ["1"], "outputs": ["1"]}),
    "countdown": json.dumps({"target": 2, "numbers": [1, 1]}),
    "ifeval": json.dumps({"func_name": "validate_no_commas"}),
    "multiple_choice": "A",
    "math_any": json.dumps(["11"]),
}
"""By the beginning of a reward's name; others take a number."""


def truth_for(names: Iterable[str]) -> str:
    truths = [truth for name in names for start, truth in TRUTHS.items() if name.startswith(start)]
    return truths[0] if truths else "11"


def write_data(path: Path, config: RunConfig) -> None:
    """More rows than `check` looks at and a step takes, with what the configuration looks for in them: of every source that
    has rewards of its own, and of one of every domain."""
    data, conversation = config.data, [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "11"}]
    domains = [tags[0] for tags in data.domains.values() if tags and tags[0] != "*"]
    rows = ""
    for source in dict.fromkeys([*config.reward.by_source, *domains]) or ["openai/gsm8k"]:
        truth = truth_for(config.reward.by_source.get(source, config.reward.functions))
        row = {
            data.source_key: source,
            "reward_model": {"ground_truth": truth},
            data.ground_truth_key: truth,
            data.ground_truth_by_source.get(source, data.ground_truth_key): truth,
            data.prompt_key: conversation[:1] if data.apply_chat_template else "1+1=",
            data.response_key: "11",
            **dict.fromkeys((data.messages_key, data.chosen_key, data.rejected_key), conversation),
        }
        if not data.apply_chat_template:
            del row[data.messages_key]
        rows += json.dumps(row) + "\n"
    # Dynamic sampling may take several steps' prompts at once.
    path.write_text(rows * (3 * data.prompts_per_step + 2 * ROWS))


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def stand_in(directory: Path, config: RunConfig) -> str:
    """A model that the layout can divide, with experts and further tokens' layers where the configuration speaks of some."""
    layout: ParallelLayout = config.layout
    split: PipelineSplit = config.policy.megatron.pipeline_split
    name = str(config.model.path)
    experts = layout.ep > 1 or any(
        word in name.lower() for word in ("moe", "a3b", "a22b", "deepseek-v3", "moonlight", "mixtral")
    )
    path = directory / ("moe" if experts else "dense")
    train_tokenizer("char", ["1+=user asnt"], path)
    if config.data.chat_template_kwargs:
        (path / "chat_template.jinja").write_text(TEMPLATE)
    keys_of_family = {"id2label": {"0": "x"}, "num_nextn_predict_layers": int(config.policy.mtp.train)}
    for layers in range(1, 400):
        (path / "config.json").write_text(
            json.dumps({**QWEN3, **(EXPERTS if experts else {}), "num_hidden_layers": layers, **keys_of_family})
        )
        try:
            load_spec(str(path), False).check_layout(layout, split)
            break
        except ValueError:
            continue
    return str(path)


def missing_but_optional(names: tuple[str, ...]) -> list[str]:
    """Trackers and launchers are packages that every user can install; what a layout needs is not."""
    return [] if names in (*TRACKERS.values(), *LAUNCHERS.values()) else missing_packages(names)


def nothing(*_: object) -> None:
    """In the place of a check that a stand-in cannot pass."""


def faults(translation: Translation, directory: Path) -> list[str]:
    """What keeps the run from starting, with stand-ins in the place of files."""
    if translation.refusals:
        return translation.refusals
    tree = translation.tree
    data = directory / "data.jsonl"
    reward = directory / "reward.py"
    reward.write_text("def f(response, ground_truth):\n    return 0.0\n")
    tree.setdefault("model", {}).setdefault("path", "/stand/in")
    # On a CPU the type that is left out would be float32.
    tree.setdefault("trainer", {})["device"] = "cuda"
    tree.setdefault("data", {})["train"] = [str(data)]
    for key in ("val", "expert"):
        if tree["data"].get(key):
            tree["data"][key] = [str(data)]
    if tree.get("reward", {}).get("functions"):
        tree["reward"]["functions"] = {
            (name if ":" not in name else f"{reward}:f"): weight for name, weight in tree["reward"]["functions"].items()
        }
    try:
        config = RunConfig.of(tree)
    except ConfigError as error:
        return error.faults
    write_data(data, config)
    model = stand_in(directory, config)
    config = replace(
        config,
        model=replace(config.model, path=model, tokenizer=None),
        # In characters a system prompt of a hundred tokens would be longer than prompts may be.
        data=replace(config.data, system_prompt=config.data.system_prompt and "1"),
        trainer=replace(config.trainer, resume="never"),
        reference=replace(config.reference, path=model if config.reference.path else None),
        critic=replace(config.critic, path=model if config.critic.path else None),
        reward=replace(
            config.reward,
            model=replace(config.reward.model, path=model if config.reward.model.path else None),
            judge=replace(config.reward.judge, model=model if config.reward.judge.model else None),
        ),
    )
    # Memory is the model's matter, and the model is a stand-in, without tensors.
    many: dict[str, Any] = {"visible_gpus": lambda: 1 << 20}
    any_size: dict[str, Any] = {"device_of": lambda config: None}
    with (
        patch.multiple("fivefold.plan.devices", **many),
        patch.multiple("fivefold.plan.engine_placement", **many),
        patch.multiple("fivefold.plan.fit", **any_size),
        patch.multiple("fivefold.plan.hosts", elsewhere=lambda launch: True),
        patch.multiple("fivefold.plan.check", check_tensor_files=nothing, tensor_places=lambda path: VALUE_HEAD.hf, **many),
        patch.multiple("fivefold.plan.check", missing_packages=missing_but_optional),
        patch.multiple(
            "fivefold.plan.engine_checks", check_vllm=nothing, check_sglang=nothing, check_servers=nothing, **any_size
        ),
    ):
        return check(config).errors


def print_compared() -> None:
    """The table of what was compared: the run with all keys of a trainer's own default file against the run with none.

    The oracle are the files in the wheels on PyPI (`make test-eras`): each has every key of one trainer of one release.
    """
    from tests.eras import test_eras

    print("\n| system | default files compared | keys | accepted | keys of ours that differ, listed with a reason |")
    print("|---|---|---|---|---|")
    for system in SYSTEMS:
        files = [era for era in test_eras.ERAS if era.system == system]
        keys, refused = sum(len(era.settings) for era in files), sum(len(test_eras.refusals(era)) for era in files)
        others = Counter(key for era in files for key in test_eras.differences(era))
        print(f"| {system} | {len(files)} | {keys} | {keys - refused} | {len(others)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("systems", nargs="*", default=list(SYSTEMS))
    parser.add_argument("--compared", action="store_true", help="also compare with the wheels' own default files")
    parser.add_argument("--show", type=int, default=0, help="also list so many of the reasons, by frequency")
    options = parser.parse_args()
    print("| system | configurations | keys | translated | fixed | refused by name | unknown | accepted |")
    print("|---|---|---|---|---|---|---|---|")
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for system in options.systems:
        kinds: Counter[str] = Counter()
        accepted = total = 0
        second = tempfile.TemporaryDirectory()
        for record in joined(runs(list(records(options.directory, system)), Path(second.name))):
            if is_left_out(record):
                continue
            total += 1
            with tempfile.TemporaryDirectory() as name:
                translation = find_dialect(system)(*source_of(record), environment=_Standing())  # type: ignore[call-arg]
                for outcome in translation.outcomes:
                    if not outcome.key.startswith("-"):
                        kinds[outcome.kind] += 1
                        if outcome.kind == "unknown":
                            reasons["unknown"][outcome.key] += 1
                reasons_against = faults(translation, Path(name))
            accepted += not reasons_against
            blockers = {
                outcome.reason for outcome in translation.outcomes if outcome.is_refused and outcome.kind != "unknown"
            }
            blockers |= {"unknown keys"} if any(outcome.kind == "unknown" for outcome in translation.outcomes) else set()
            blockers |= set(translation.faults) if translation.refusals else set(reasons_against)
            for blocker in blockers:
                reasons["blocks"][blocker] += 1
                if len(blockers) == 1:
                    reasons["blocks alone"][blocker] += 1
        keys = sum(kinds.values())
        shares = " | ".join(
            f"{kinds[kind] / max(keys, 1):.2%}" for kind in ("translated", "fixed", "unsupported", "unknown")
        )
        print(f"| {system} | {total} | {keys} | {shares} | {accepted} ({accepted / max(total, 1):.1%}) |")
        for title, counted in reasons.items():
            if options.show:
                print(f"\n{title}:")
                for reason, times in counted.most_common(options.show):
                    print(f"  {times:4d} {reason[:170]}")
        reasons.clear()
    if options.compared:
        print_compared()


if __name__ == "__main__":
    main()
