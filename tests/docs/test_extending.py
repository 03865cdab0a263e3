"""The recipes of docs/extending.md are followed as the page prints them: in a copy of the package, where they change it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.dialects import shared
from fivefold.config.dialects.table import Section, Table, fixed, lacks, to, used
from fivefold.config.dialects.translator import dialect
from fivefold.config.scoring import RewardConfig
from fivefold.interfaces import Engine, RolloutSource
from fivefold.models.families import qwen2
from fivefold.reward.pool import RewardPool
from fivefold.types import Group, Prompt, Sample
from tests.support.commands import LONGEST

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCK = re.compile(r"^( *)```(python|yaml)\n(.*?)^\1```$", re.M | re.S)
BLOCKS = {
    title: [textwrap.dedent(text) for _, _, text in BLOCK.findall(part)]
    for title, part in zip(re.findall(r"^##+ (.*)$", PAGE, re.M), re.split(r"^##+ .*$", PAGE, flags=re.M)[1:], strict=True)
}
FOLLOWED = {"A method": 1, "A function of your own instead": 2, "A surrogate with a parameter": 4, "A model family": 1,
            "A reward": 4, "An engine": 1, "A rollout source": 1, "A dialect": 1}  # fmt: skip


def follow(directory: Path, edits: dict[str, list[tuple[str, str]]], then: str) -> str:
    """Run `then` with a copy of the package, in which each text stands before its mark."""
    copy = directory / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in edits.items():
        path = copy / "fivefold" / name
        text = path.read_text()
        for mark, added in changes:
            assert text.count(mark) == 1, (name, mark)
            text = text.replace(mark, f"{added.rstrip()}\n{mark}")
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(then)],
        env={**os.environ, "PYTHONPATH": str(copy)}, cwd=directory, capture_output=True, text=True, timeout=LONGEST,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def test_every_recipe_that_is_code_is_followed():
    assert {title: len(blocks) for title, blocks in BLOCKS.items() if blocks} == FOLLOWED


def test_the_recipe_of_a_method_makes_a_method(tmp_path):
    (row,) = BLOCKS["A method"]
    says = follow(
        tmp_path,
        {"config/methods.py": [('    "ppo": Method(', indented(row))]},
        """
        from fivefold.algo import make_objective
        from fivefold.config import RunConfig
        config = RunConfig.of(model={"path": "m"}, data={"train": ["x"]}, algorithm={"name": "my_grpo"})
        objective = make_objective("my_grpo")
        kl = config.algorithm.resolved.kl
        print(objective.surrogate.clip_high, kl.estimator, kl.coef)
        """,
    )
    assert says == "0.28 k2 0.001\n"


def test_the_recipe_of_an_advantage_is_run_by_its_yaml(tmp_path):
    function, section = BLOCKS["A function of your own instead"]
    (tmp_path / "my.py").write_text(function)
    (tmp_path / "run.yaml").write_text(f"model: {{path: m}}\ndata: {{train: [x]}}\n{section}")
    says = follow(
        tmp_path,
        {},
        """
        import torch
        from types import SimpleNamespace
        from fivefold.algo import Objective
        from fivefold.config import load_config
        config = load_config("run.yaml")
        objective = Objective.of(config.algorithm.resolved)
        scores = SimpleNamespace(rewards_N=torch.tensor([1.0, 2.0, 6.0]))
        print(config.algorithm.advantage, objective.advantage(scores).tolist())
        """,
    )
    assert says == "my.py:advantage [-1.0, 0.0, 4.0]\n"


def test_the_recipe_of_a_surrogate_makes_a_surrogate_and_its_key(tmp_path):
    row, key, formula, entry = BLOCKS["A surrogate with a parameter"]
    says = follow(
        tmp_path,
        {
            "config/methods.py": [
                ('    "ppo_clip": SurrogateRow(', indented(row)),
                ("    clip_low: float | None = None\n    clip_high: float", indented(key)),
            ],
            "algo/surrogates.py": [
                ("SURROGATES: dict[str, type[Surrogate]] = {", f"{formula}\n\n"),
                ('    "ppo_clip": PPOClip,', indented(entry)),
            ],
        },
        """
        import torch
        from fivefold.algo import Objective
        from fivefold.config import RunConfig
        algorithm = {"name": "grpo", "surrogate": "soft_clip", "width": 0.5}
        config = RunConfig.of(model={"path": "m"}, data={"train": ["x"]}, algorithm=algorithm)
        surrogate = Objective.of(config.algorithm.resolved).surrogate
        log_ratio_T, advantages_T = torch.tensor([2.0]).log(), torch.tensor([3.0])
        print(type(surrogate).__name__, surrogate.width, surrogate(log_ratio_T, None, advantages_T, None).item())
        """,
    )
    name, width, value = says.split()
    assert (name, width) == ("SoftClip", "0.5") and float(value) == pytest.approx(3 * 0.9640276 * 0.5)


def test_the_recipe_of_a_family_is_qwen2_as_it_is():
    (block,) = BLOCKS["A model family"]
    assert block in Path(qwen2.__file__).read_text()


def test_the_recipe_of_a_reward_is_run_by_its_yaml(tmp_path, monkeypatch):
    function, section, *_ = BLOCKS["A reward"]
    (tmp_path / "my.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    import yaml

    pool = RewardPool(RewardConfig(**yaml.safe_load(section)["reward"], workers=1))
    prompt, sample = Prompt(0, [1], "mine", "q", "18"), Sample([1], [0.0], "#### 18", True, 0)
    try:
        assert pool.wait([pool.submit(prompt, sample)]) is None
    finally:
        pool.close()
    assert sample.reward == pytest.approx(1 - 0.007 + 0.1) and not sample.correct


def test_the_recipe_of_a_built_in_reward_touches_one_file_and_is_not_the_accuracy(tmp_path):
    *_, function, row = BLOCKS["A reward"]
    says = follow(
        tmp_path,
        {"reward/rules.py": [("_MATH = (", f"{function}\n\n"), ('    "judge": BuiltIn(', indented(row))]},
        """
        from fivefold.config.findings import Findings
        from fivefold.config.scoring import RewardConfig
        from fivefold.observability.metrics import undocumented
        from fivefold.reward.choose import check_rewards, choose_rewards
        from fivefold.reward.pool import RewardPool
        from fivefold.reward.rules import ground_truth_fault
        from fivefold.types import Prompt, Sample
        for functions in ({"gsm8k": 1.0, "brevity": 0.1}, {"brevity": 0.1, "gsm8k": 1.0}):
            config, findings = RewardConfig(functions=functions, workers=1), Findings()
            check_rewards(findings, config)
            print(choose_rewards(config, "mine").accuracy, findings.errors)
        print(undocumented(["reward/brevity"]), ground_truth_fault("brevity", ""))
        pool, sample = RewardPool(config), Sample([1], [0.0], "#### 1", True, 0)
        print(pool.wait([pool.submit(Prompt(0, [1], "mine", "q", "1"), sample)]), sample.reward_parts, sample.correct)
        pool.close()
        """,
    )
    assert says.splitlines() == [
        "gsm8k []",
        "gsm8k []",
        "[] None",
        f"None {{'brevity': {1 / 7}, 'gsm8k': 1.0}} True",
    ]


def test_the_recipe_of_an_engine_names_what_an_engine_has():
    (block,) = BLOCKS["An engine"]
    space: dict = {}
    exec("from __future__ import annotations\nfrom fivefold.interfaces import EngineReplica\n" + block, space)
    own = {name for name in vars(space["MyEngine"]) if not name.startswith("_")}
    assert own == {name for name in vars(Engine) if not name.startswith("_")}


def test_the_recipe_of_a_rollout_source_filters_another_source():
    (block,) = BLOCKS["A rollout source"]
    space: dict = {"replace": replace, "RolloutSource": RolloutSource}
    exec("from __future__ import annotations\n" + block, space)

    class Four:
        def next(self, step):
            return [Group(Prompt(0, [1], "s", "q", "t"), [Sample([1] * n, [], "", True, step) for n in (1, 4, 2, 3)])]

        def state_dict(self):
            return {"position": 3}

        def load_state_dict(self, state):
            self.state = state

    source = space["Longest"](Four())
    (found,) = source.next(7)
    assert [len(sample.token_ids) for sample in found.samples] == [4, 3]
    assert source.state_dict() == {"position": 3}
    source.load_state_dict({"position": 5})
    assert source._source.state == {"position": 5}


def test_the_recipe_of_a_dialect_translates():
    (block,) = BLOCKS["A dialect"]
    names = {"shared": shared, "Section": Section, "Table": Table, "fixed": fixed, "lacks": lacks, "to": to, "used": used}
    space: dict = {**names, "dialect": dialect}
    exec("from __future__ import annotations\n" + block, space)
    found = space["translate"]({"model_name_or_path": "some/model", "tp": 2, "log_dir": "x", "dropout": 0.0}, [])
    assert found.refusals == []
    assert found.tree["model"]["path"] == "some/model"
    assert "t2" in found.tree["policy"]["backend"] and "d4" in found.tree["policy"]["backend"]
    assert space["translate"]({"model_name_or_path": "m", "dropout": 0.1}, []).refusals != []
