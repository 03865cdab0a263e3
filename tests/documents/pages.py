"""What the pages' tests share: a page's text, its settings changed one at a time, and a model and data for runs in small."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.documents import documents
from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.config.dialect import Translation, find_dialect
from tests.eras.eras import nested
from tests.support.commands import fivefold
from tests.support.dialects import HOME
from tests.support.tiny_models import make_model, make_tokenizer
from tests.support.whole_runs import REWARD, metrics
from tests.support.zygote import THREADS

HERE = Path(__file__).parent
SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "settings.yaml").read_text())
NO_EFFECT: dict[str, dict[str, str]] = yaml.safe_load((HERE / "no_effect.yaml").read_text())
"""System -> key -> what the report says, reviewed by hand."""


def text(name: str) -> str:
    """Return a page's text, from the directory of pages next to a checkout; skip the test where there is none."""
    file = next((path for above in HERE.parents if (path := above / "shared/sources" / f"{name}.txt").is_file()), None)
    if file is None:
        pytest.skip(f"the page's text is not here: no shared/sources/{name}.txt next to the repository")
    return file.read_text()


def read_yaml(block: str, within: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Read a block of YAML whose text has lost its indentation: full key -> value.

    `within`: sections, and the keys that follow a deeper section, each with the sections that it may stand in.
    """
    values: dict[str, Any] = {}
    path: list[str] = []
    for line in block.splitlines():
        name, colon, value = line.partition("#")[0].strip().partition(":")
        while name in within and path and path[-1] not in within[name]:
            path.pop()
        if colon and value:
            values[".".join([*path, name])] = yaml.safe_load(value)
        elif colon:
            path.append(name)
    return values


def check_commands(page: str, system: str, answers: Mapping[str, Sequence[str]]) -> None:
    """Check that each command which a page prints begins as one of `answers`, which names rows that there are."""
    programs = r"(?:cd|git|conda|python3\S*|source|pip|docker|huggingface-cli|modelscope|tensorboard) "
    lines = [line for line in re.findall(rf"^{programs}.*", text(page), re.MULTILINE) if not line.startswith("cd Trinity")]
    assert [line for line in lines if not line.startswith(tuple(answers))] == []
    assert [begin for begin in answers if not any(line.startswith(begin) for line in lines)] == []
    assert {row for rows in answers.values() for row in rows} <= {row.id for row in documents()[system][1]}


# --- settings changed one at a time ----------------------------------------------------------------------------------


def settings(system: str) -> list[str]:
    """Keys of a page, each of which a test changes."""
    return list(SETTINGS[system]["flips"])


def translated(system: str, flipped: str | None = None) -> Translation:
    """Translate the page's settings with the rest of a run, one of them changed."""
    flips = SETTINGS[system]["flips"]
    values = {**SETTINGS[system]["run"], **{key: pair[key == flipped] for key, pair in flips.items()}}
    return find_dialect(system)(nested(values), [], environment=HOME)  # type: ignore[call-arg]


def check_change(system: str, key: str, translate: Callable[[str | None], Translation] | None = None) -> None:
    """Check that the run's run.yaml differs with a setting changed, or that the report gives the listed reason why not."""
    translate = translate or partial(translated, system)
    before, after = translate(None), translate(key)
    outcome = next(outcome for outcome in after.outcomes if outcome.key == key)
    listed = NO_EFFECT.get(system, {}).get(key)
    assert after.faults == [], "a run that is refused shows nothing: choose another value"
    if outcome.is_refused or _run_yaml(before) != _run_yaml(after):
        assert listed is None, "the setting has an effect: take it off no_effect.yaml"
        is_off = outcome.reason.partition(",")[0] == "off"
        assert outcome.kind != "fixed" or is_off, f"the run differs, and the report says: {outcome.reason}"
    else:
        assert outcome.kind in ("fixed", "unsupported") and outcome.reason == listed


def _run_yaml(translation: Translation) -> str | list[str]:
    """Return the resolved configuration of a run, or the sentences that refuse it."""
    try:
        return dump_yaml(RunConfig.from_tree(translation.tree))
    except ConfigError as error:
        return error.faults


# --- runs in small ---------------------------------------------------------------------------------------------------


def make_run(root: Path, family: str = "qwen3", **sizes: int) -> None:
    """A tiny model of a family, with heads that vLLM on a CPU has attention for, and sums in the columns of each system."""
    make_tokenizer(make_model(family, root / "model", **{"head_dim": 32, "num_hidden_layers": 4, **sizes}))
    problems = [(f"{a}+{b}=", str(a + b)) for a in range(8) for b in range(8)]
    rows = [
        {"prompt": [{"role": "user", "content": question}], "question": question, "answer": f"So it is.\n#### {truth}", "truth": truth,
         "tag": "sums", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": truth}, "reward_spec": {"ground_truth": truth}}
        for question, truth in problems
    ]  # fmt: skip
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "reward.py").write_text(REWARD)


def for_a_toy(root: Path, *settings: str) -> list[str]:
    """Settings of ours that no page has: a small cache of vLLM's, and a reward that a random model earns now and then."""
    cache = "engine.vllm={kv_cache_memory_bytes: 67108864, enforce_eager: true}"
    return [
        "--",
        cache,
        f'reward={{"functions": {{"{root}/reward.py:digits": 1.0}}}}',
        f"launch.threads={THREADS}",
        *settings,
    ]


def train(root: Path, name: str, *words: object) -> tuple[list[dict[str, float]], dict[str, Any], str]:
    """Metrics, run.yaml and output of a run that comes to its end."""
    done = fivefold("train", "--from", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 unknown" in done.stdout
    return metrics(root, name), yaml.safe_load((root / "runs" / name / "run.yaml").read_text()), done.stdout


def in_small(script: str, sizes: Mapping[str, object]) -> str:
    """Return a script with the values of some of its variables replaced."""
    for name, value in sizes.items():
        script, count = re.subn(rf"^((?:export )?{name}=).*$", rf"\g<1>{value}", script, flags=re.MULTILINE)
        assert count == 1, name
    return script
