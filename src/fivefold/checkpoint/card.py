"""The model card of an export: base model, data, method, metrics, layout and license of the run that made it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fivefold.algo.methods import METHODS
from fivefold.checkpoint.checkpoints import RunState
from fivefold.config.learners import PolicyConfig
from fivefold.config.schema import AlgorithmConfig, DataConfig
from fivefold.config.scoring import RewardConfig
from fivefold.files import read_json_lines

CARD = "README.md"
_MOST_CARD = 1 << 20
_SHOWN = ("reward/mean", "val/", "response/length_mean", "policy/kl_reference", "policy/entropy")
"""Beginnings of the names of metrics that the card has."""


@dataclass(frozen=True)
class Trained:
    """What a card says about a run."""

    part: str
    """Model of the run: the policy or another one that learned."""
    path: str
    """Directory or hub id of the model that it began with."""
    base_card: Path
    """README of that model, which may be missing."""
    library: str
    """Library that loads the files."""
    run_dir: Path
    algorithm: AlgorithmConfig
    data: DataConfig
    policy: PolicyConfig
    reward: RewardConfig
    temperature: float
    seed: int


def model_card(name: str, run: Trained, state: RunState) -> str:
    """Return the text of the card for the repository `name`."""
    algorithm, data, path, part = run.algorithm, run.data, run.path, run.part
    method = METHODS[algorithm.name]
    is_local = Path(path).is_dir()
    base = Path(path).name if is_local else path
    license_of_base = _license(run.base_card)
    # A directory's name is no id of the hub.
    head: dict[str, Any] = {} if is_local else {"base_model": path.partition("@")[0]}
    head |= {"library_name": run.library, "tags": ["fivefold", algorithm.name]}
    if license_of_base:
        head["license"] = license_of_base
    files = {"trained on": data.train, "evaluated on": data.val}
    rows = _metrics(run.run_dir, state.step)
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        f"# {name.partition('/')[2] or name}",
        "",
        f"The {part} of a run of Fivefold that began with `{base}`, after {state.step} steps.",
        "",
        "## Method",
        "",
        f"`{algorithm.name}`: {method.about}",
        "",
        "```yaml",
        yaml.safe_dump(_settings(run, state), sort_keys=False, allow_unicode=True).rstrip(),
        "```",
        "",
        "## Data",
        "",
        *(f"- {use}: {', '.join(f'`{_named(file)}`' for file in names)}" for use, names in files.items() if names),
        *([f"- rewards: {', '.join(f'`{_named(reward)}`' for reward in run.reward.functions)}"]
          if run.reward.functions and not algorithm.offline else []),
        "",
        "## Metrics",
        "",
        *(["| metric | value | step |", "|---|---|---|", *rows] if rows else ["The run's metrics are not known."]),
        "",
        "## License",
        "",
        f"`{license_of_base}`, that of the model it began with." if license_of_base
        else "That of the model it began with, which its card does not name.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _settings(run: Trained, state: RunState) -> dict[str, Any]:
    """Return the settings that say how it was trained."""
    algorithm, data, policy = run.algorithm, run.data, run.policy
    settings: dict[str, Any] = {
        "layout": state.layout,
        "dtype": policy.dtype,
        "steps": state.step,
        "optimizer_steps": state.version,
        "learning_rate": policy.optimizer.lr,
        "prompts_per_step": data.prompts_per_step,
        "max_prompt_tokens": data.max_prompt_tokens,
        "max_response_tokens": data.max_response_tokens,
        "seed": run.seed,
    }
    if not algorithm.offline:
        settings |= {"group_size": algorithm.group_size, "temperature": run.temperature}
        settings |= {"kl_coef": algorithm.resolved.kl.coef}
    if policy.lora.rank:
        settings["lora_rank"] = policy.lora.rank
    return settings


def _named(text: str) -> str:
    """Return a file's name without its directory, which is of the machine; an id of the hub is kept."""
    return Path(text).name if text.startswith(("/", ".", "~")) else text


def _metrics(run_dir: Path, step: int) -> list[str]:
    """Return rows of a table with the last values up to a step."""
    latest: dict[str, tuple[float, int]] = {}
    file = run_dir / "metrics.jsonl"
    for _, row in read_json_lines(file, growing=True) if file.is_file() else ():
        if isinstance(row.get("step"), int) and row["step"] <= step:
            latest |= {
                name: (value, row["step"])
                for name, value in row.items()
                if name.startswith(_SHOWN) and isinstance(value, int | float)
            }
    return [f"| `{name}` | {value:.4g} | {at} |" for name, (value, at) in sorted(latest.items())]


def _license(base_card: Path) -> str:
    """Return the license in the front matter of a model's card; empty if it names none."""
    if not base_card.is_file():
        return ""
    with base_card.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_MOST_CARD)
    begin, _, rest = text.partition("---\n")
    try:
        head = yaml.safe_load(rest.partition("\n---")[0]) if not begin.strip() else None
    except yaml.YAMLError:
        head = None
    name = head.get("license") if isinstance(head, dict) else None
    return name if isinstance(name, str) else ""
