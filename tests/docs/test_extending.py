"""The recipes of docs/extending.md are followed as the page prints them: in a copy of the package, where they change it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from fivefold.config.scoring import RewardConfig
from fivefold.models.families import qwen2
from fivefold.reward.pool import RewardPool
from fivefold.types import Group, Prompt, Sample
from tests.support.commands import LONGEST
from tests.support.words import empty_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCK = re.compile(r"^( *)```(python|yaml|toml)\n(.*?)^\1```$", re.M | re.S)
BLOCKS = {
    title: [textwrap.dedent(text) for _, _, text in BLOCK.findall(part)]
    for title, part in zip(re.findall(r"^##+ (.*)$", PAGE, re.M), re.split(r"^##+ .*$", PAGE, flags=re.M)[1:], strict=True)
}
FOLLOWED = {"A method": 1, "A function of your own instead": 2, "A surrogate with a parameter": 3, "A term of the loss": 1,
            "A model family": 1, "A reward": 4, "A model that learns": 7, "An engine": 3, "A rollout source": 3,
            "A row of a dialect": 1, "A dialect": 3}  # fmt: skip


Edits = dict[str, list[tuple[str, str]]]


def recipes() -> dict[str, tuple[Edits, dict[str, str]]]:
    """Recipe -> what it adds to files, each text before its mark, and its new files.

    Names are those of files of the package, except pyproject.toml and names that begin with tests/.
    """
    (method,) = BLOCKS["A method"]
    soft_clip, oracle, other_form = BLOCKS["A surrogate with a parameter"]
    (floor,) = BLOCKS["A term of the loss"]
    *_, brevity, row_of_brevity = BLOCKS["A reward"]
    section, role, row_of_role, draft, imported_draft, build_draft, _ = BLOCKS["A model that learns"]
    plain, build_plain, contract = BLOCKS["An engine"]
    longest, imported_longest, build_longest = BLOCKS["A rollout source"]
    (family,) = BLOCKS["A model family"]
    (row_of_verl,) = BLOCKS["A row of a dialect"]
    return {
        "A method": ({"algo/methods.py": [('    "ppo": Method(', indented(method))]}, {}),
        "A surrogate with a parameter": ({}, {"algo/surrogates/soft_clip.py": soft_clip}),
        "The oracle of a surrogate": (
            {
                "tests/support/loops.py": [('        elif name == "rec":', textwrap.indent(oracle, 8 * " "))],
                "tests/algo/test_objectives.py": [('    "dppo by kl": (', indented(other_form))],
            },
            {},
        ),
        "A term of the loss": ({}, {"algo/terms/floor.py": floor}),
        "A model family": ({}, {"models/families/newcomer.py": family.replace('"qwen2"', '"newcomer"')}),
        "A reward": (
            {"reward/rules.py": [("_MATH = (", f"{brevity}\n\n"), ('    "judge": BuiltIn(', indented(row_of_brevity))]},
            {},
        ),
        "A model that learns": (
            {
                "config/schema.py": [("    prm: PRMConfig = field(", indented(section))],
                "config/roles.py": [("def _further(", f"{role}\n\n"), ('    "reward.model": Row(', indented(row_of_role))],
                "build.py": [
                    ("from fivefold.trainer.evaluation import", imported_draft),
                    ('    learners["policy"] = PolicyLearner(', indented(build_draft)),
                ],
            },
            {"trainer/draft.py": draft},
        ),
        "An engine": (
            {
                "config/engine.py": [('    "transformers",\n', '    "plain",\n')],
                "build_engine.py": [("    return TransformersEngine(", indented(build_plain))],
                "pyproject.toml": [('"fivefold.engines.transformers -> transformers"', contract)],
            },
            {"engines/plain.py": plain},
        ),
        "A rollout source": (
            {
                "build.py": [
                    ("from fivefold.rollout.packing import", imported_longest),
                    ("    if not is_dynamic:\n        return rollouts\n", indented(build_longest)),
                ]
            },
            {"rollout/longest.py": longest},
        ),
        "A row of a dialect": (
            {
                "../fivefold_dialects/tables/verl.yaml": [
                    ("      trainer.device: [trainer.device device,", textwrap.indent(row_of_verl, " " * 6))
                ]
            },
            {},
        ),
    }


def apply(directory: Path, *names: str) -> list[str]:
    """Apply recipes to a copy of the package, of pyproject.toml and of the tests of formulas; return the files they change."""
    shutil.copy(ROOT / "pyproject.toml", directory)
    for place in ("src", "tests/algo", "tests/support"):
        shutil.copytree(ROOT / place, directory / place, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "tests/__init__.py").touch()
    changed = []
    for edits, new in map(recipes().__getitem__, names):
        for name, text in new.items():
            changed.append(f"src/fivefold/{name}")
            (directory / changed[-1]).write_text(text)
        for name, changes in edits.items():
            changed.append(name if name.startswith(("tests/", "pyproject")) else f"src/fivefold/{name}")
            path = directory / changed[-1]
            text = path.read_text()
            for mark, added in changes:
                assert text.count(mark) == 1, (name, mark)
                text = text.replace(mark, f"{added}{mark}")
            path.write_text(text)
    return sorted({*changed})


def follow(directory: Path, then: str, *names: str) -> str:
    """Run `then` with a copy of the package to which recipes were applied."""
    apply(directory, *names)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(then)],
        env={**os.environ, "PYTHONPATH": f"{directory / 'src'}{os.pathsep}{ROOT}"}, cwd=directory, capture_output=True, text=True,
        timeout=LONGEST,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def test_every_recipe_that_is_code_is_followed():
    assert {title: len(blocks) for title, blocks in BLOCKS.items() if blocks} == FOLLOWED


@pytest.mark.slow
def test_the_printed_code_passes_the_checks_of_the_package(tmp_path):
    """`make check` in a copy of the package with all recipes; mypy checks the changed files only."""
    changed = [name for name in apply(tmp_path, *recipes()) if name.endswith(".py")]
    advantage, _ = BLOCKS["A function of your own instead"]
    concise, *_ = BLOCKS["A reward"]
    _, dialect, _ = BLOCKS["A dialect"]
    of_users = {"my_advantage.py": advantage, "my_reward.py": concise, "other.py": dialect}
    for name, text in of_users.items():
        (tmp_path / name).write_text(text)
    python = [*changed, *of_users]
    typed = [name for name in changed if name.startswith(("src/", "tests/support/"))]
    programs = (
        ["ruff", "check", "--no-cache", *python],
        ["ruff", "format", "--no-cache", "--diff", *python],
        ["mypy", "--cache-dir", "cache", "--follow-imports", "silent", *typed],
        ["vulture"],
        ["lint-imports", "--no-cache"],
    )
    done = [
        subprocess.run(
            [Path(sys.executable).with_name(program), *words], env={**os.environ, "PYTHONPATH": "src"}, cwd=tmp_path,
            capture_output=True, text=True, timeout=LONGEST,
        )
        for program, *words in programs
    ]  # fmt: skip
    assert [command.returncode for command in done] == [0] * len(programs), "\n".join(c.stdout + c.stderr for c in done)
    assert [*empty_names([tmp_path / name for name in python])] == []


def test_the_recipe_of_a_method_makes_a_method(tmp_path):
    says = follow(
        tmp_path,
        """
        from fivefold.algo.objective import make_objective
        from fivefold.config import RunConfig
        config = RunConfig.of(model={"path": "m"}, data={"train": ["x"]}, algorithm={"name": "my_grpo"})
        objective = make_objective("my_grpo")
        kl = config.algorithm.resolved.kl
        print(objective.gradient.surrogate.clip_high, kl.estimator, kl.coef)
        """,
        "A method",
    )
    assert says == "0.28 k2 0.001\n"


def test_the_recipe_of_an_advantage_is_run_by_its_yaml(tmp_path):
    function, section = BLOCKS["A function of your own instead"]
    (tmp_path / "my.py").write_text(function)
    (tmp_path / "run.yaml").write_text(f"model: {{path: m}}\ndata: {{train: [x]}}\n{section}")
    says = follow(
        tmp_path,
        """
        import torch
        from types import SimpleNamespace
        from fivefold.algo.objective import Objective
        from fivefold.config import RunConfig
        config = RunConfig.from_yaml("run.yaml")
        objective = Objective.of(config.algorithm.resolved)
        scores = SimpleNamespace(rewards_N=torch.tensor([1.0, 2.0, 6.0]))
        print(config.algorithm.advantage, objective.advantage.comparison(scores).tolist())
        """,
    )
    assert says == "my.py:advantage [-1.0, 0.0, 4.0]\n"


def test_the_recipe_of_a_surrogate_is_one_file_with_its_key_rule_and_docs(tmp_path):
    says = follow(
        tmp_path,
        """
        import sys
        from docs.generate import configuration
        from fivefold.config import ConfigError, RunConfig
        def algorithm(**chosen):
            return RunConfig.of(model={"path": "m"}, data={"train": ["x"]}, algorithm={"name": "grpo", **chosen}).algorithm
        resolved = algorithm(surrogate="soft_clip", width=0.5).resolved
        for chosen in ({"surrogate": "soft_clip", "width": -1}, {"width": 0.5}):
            try: algorithm(**chosen)
            except ConfigError as error: print(error)
        page = configuration()
        print("| `soft_clip` | `width` | `0.2` | above 0 |" in page, "at which soft_clip levels off" in page)
        print("torch" in sys.modules)
        import torch
        from fivefold.algo.objective import Objective
        surrogate = Objective.of(resolved).gradient.surrogate
        log_ratio_T, advantages_T = torch.tensor([2.0]).log(), torch.tensor([3.0])
        print(type(surrogate).__name__, surrogate.width, surrogate(log_ratio_T, None, advantages_T, None).item())
        """,
        "A surrogate with a parameter",
    )
    *rules, docs, has_torch, computed = says.splitlines()
    assert rules == [
        "algorithm.width must be above 0: got -1.0",
        "algorithm.width belongs to soft_clip, not to ppo_clip: leave it out or choose another surrogate",
    ]
    assert (docs, has_torch) == ("True True", "False")
    name, width, value = computed.split()
    assert (name, width) == ("SoftClip", "0.5") and float(value) == pytest.approx(3 * 0.9640276 * 0.5)


def test_the_recipe_of_a_surrogate_equals_its_oracle_for_two_values_of_its_parameter(tmp_path):
    """The tests of every surrogate run as they are, with the page's formula, its oracle and the row of another width."""
    says = follow(
        tmp_path,
        """
        from tests.algo import test_objectives
        cases = [case for case in test_objectives.COMBINATIONS if case[0] == "soft_clip"]
        for case in cases:
            test_objectives.test_every_objective_and_its_gradient_equal_the_loop(*case)
        test_objectives.test_every_method_and_its_gradient_equal_the_loop("soft_clip, wider")
        print(len(cases) > 10)
        """,
        "A surrogate with a parameter",
        "The oracle of a surrogate",
    )
    assert says == "True\n"


def test_the_recipe_of_a_term_is_one_file_with_its_keys_rule_metric_and_docs(tmp_path):
    says = follow(
        tmp_path,
        """
        import sys
        from docs.generate import configuration
        from fivefold.config import RunConfig
        from fivefold.config.validate import validate
        from tests.support.documented import undocumented
        def config(**chosen):
            chosen = {"name": "dr_grpo", "surrogate": "log_likelihood", **chosen}
            return RunConfig.of(model={"path": "m"}, data={"train": ["x"]}, algorithm=chosen)
        print(validate(config(floor_logprob=-2)).ignored, undocumented(["policy/below_floor"]))
        print("Log-prob below which a token is penalized." in configuration(), "torch" in sys.modules)
        import torch
        from fivefold.algo.objective import Objective
        from fivefold.columns import Column
        from fivefold.types import TokenBatch
        mask_T = torch.tensor([False, True, True])
        batch = TokenBatch(torch.zeros(3, dtype=torch.long), mask_T, [3], update_tokens=2)
        batch[Column.ADVANTAGES], batch[Column.LOSS_WEIGHTS] = torch.zeros(3), mask_T / 2
        for chosen in ({}, {"floor_coef": 0.1, "floor_logprob": -2}):
            objective = Objective.of(config(**chosen).algorithm.resolved)
            output = objective.loss(torch.tensor([0.0, -1.0, -5.0]), torch.zeros(3), batch)
            print(round(output.loss.item(), 6), float(output.sums.get("policy/below_floor", -1)))
        """,
        "A term of the loss",
    )
    assert says.splitlines() == [
        "[('algorithm.floor_logprob', 'floor_coef is 0')] []",
        "True False",
        "0.0 -1.0",
        "0.15 0.5",
    ]


def test_the_recipe_of_a_family_is_qwen2_as_it_is_and_one_file_is_a_family(tmp_path):
    (whole,) = BLOCKS["A model family"]
    assert whole == Path(qwen2.__file__).read_text()
    shape = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 16, "rms_norm_eps": 1e-6}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "newcomer", **shape}))
    says = follow(
        tmp_path,
        """
        from fivefold.models.families import load_spec
        spec = load_spec(".")
        print(spec.family, spec.qkv_bias, spec.layers)
        """,
        "A model family",
    )
    assert says == "newcomer True 1\n"


def test_the_recipe_of_a_reward_is_run_by_its_yaml(tmp_path, monkeypatch):
    function, section, *_ = BLOCKS["A reward"]
    (tmp_path / "my.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    pool = RewardPool(RewardConfig(**yaml.safe_load(section)["reward"], workers=1))
    prompt, sample = Prompt(0, [1], "mine", "q", "18"), Sample([1], [0.0], "#### 18", "answered", 0)
    try:
        assert pool.wait([pool.submit(prompt, sample)]) is None
    finally:
        pool.close()
    assert sample.reward == pytest.approx(1 - 0.007 + 0.1) and not sample.correct


def test_the_recipe_of_a_built_in_reward_touches_one_file_and_is_not_the_accuracy(tmp_path):
    says = follow(
        tmp_path,
        """
        from fivefold.keys.findings import Findings
        from fivefold.config.scoring import RewardConfig
        from tests.support.documented import undocumented
        from fivefold.reward.choose import check_rewards, choose_rewards
        from fivefold.reward.pool import RewardPool
        from fivefold.reward.rules import ground_truth_fault
        from fivefold.types import Prompt, Sample
        for functions in ({"gsm8k": 1.0, "brevity": 0.1}, {"brevity": 0.1, "gsm8k": 1.0}):
            config, findings = RewardConfig(functions=functions, workers=1), Findings()
            check_rewards(findings, config)
            print(choose_rewards(config, "mine").accuracy, findings.errors)
        print(undocumented(["reward/brevity"]), ground_truth_fault("brevity", ""))
        pool, sample = RewardPool(config), Sample([1], [0.0], "#### 1", "answered", 0)
        print(pool.wait([pool.submit(Prompt(0, [1], "mine", "q", "1"), sample)]), sample.reward_parts, sample.correct)
        pool.close()
        """,
        "A reward",
    )
    assert says.splitlines() == [
        "gsm8k []",
        "gsm8k []",
        "[] None",
        f"None {{'brevity': {1 / 7}, 'gsm8k': 1.0}} True",
    ]


def test_the_recipe_of_a_model_that_learns_touches_four_files_and_is_in_every_list(tmp_path):
    edits, new = recipes()["A model that learns"]
    assert len(edits) + len(new) == 4
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: m}}\ndata: {{train: [x]}}\npolicy: {{backend: 'megatron:d8'}}\n{BLOCKS['A model that learns'][-1]}"
    )
    says = follow(
        tmp_path,
        """
        from fivefold.cli import _parser
        from fivefold.config import RunConfig
        from fivefold.observability.constant import constant_reasons
        from tests.support.documented import undocumented
        from fivefold.observability.report import CHARTS
        from fivefold.plan.roles import placed
        config = RunConfig.from_yaml("run.yaml")
        print(list(config.roles.learners), [place.describe() for place in placed(config.roles)][-1])
        print(constant_reasons({"draft": {"optimizer": {"schedule": "constant", "warmup_steps": 0}}}, [{"draft/lr": 1.0}]))
        print([title for _, charts in CHARTS for title, names in charts if {"draft/lr", "draft/loss"} & {*names}])
        print(undocumented(["draft/loss", "draft/lr", "draft/grad_norm", "draft/moe/load_max", "time/draft"]))
        print(_parser().parse_args(["export", "checkpoint", "out", "--model", "draft"]).model)
        """,
        "A model that learns",
    )
    assert says.splitlines() == [
        "['policy', 'draft'] draft megatron:d8t1p1 on ranks 0-7",
        "{'draft/lr': 'draft.optimizer.schedule is constant and has no warm-up'}",
        "['Learning rate', 'Draft model: loss']",
        "[]",
        "draft",
    ]


@pytest.mark.slow
def test_the_recipe_of_a_model_that_learns_trains_saves_resumes_and_exports_it(tmp_path):
    """Two ranks that shard the draft in another way than the policy."""
    run = """
        import json
        from pathlib import Path
        from fivefold.cli import main
        def do(*words):
            assert main([str(word) for word in words]) == 0, words
        do("data", "arithmetic", "--out", "data", "--limit", 64)
        do("train-tokenizer", "char", "--data", "data/train.parquet", "--out", "tokenizer")
        for name, layers in (("model", 2), ("small", 1)):
            do("init-model", "qwen3", "--tokenizer", "tokenizer", "--out", name, "--hidden", 32, "--layers", layers, "--seed", layers)
        keys = ["model.path=model", "data.train=[data/train.parquet]", "data.max_prompt_tokens=16", "data.max_response_tokens=8",
                "data.prompts_per_step=4", "policy.backend=megatron:d2", "policy.dtype=float32", "trainer.device=cpu",
                "trainer.run_dir=run", "trainer.save_every=1", "launch.threads=1", "draft.path=small", "draft.backend=megatron:t2",
                "draft.optimizer.lr=1e-2", "engine.sampling.temperature=0.05"]
        do("train", *keys, "trainer.steps=3")
        do("train", *keys, "trainer.steps=6")
        do("export", "run/checkpoints/step-000006", "out", "--model", "draft")
        rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        print(json.dumps([row["draft/loss"] for row in rows if row["step"]]), Path("out/model.safetensors").is_file())
    """
    says = follow(tmp_path, run, "A model that learns").splitlines()[-1]
    losses, exported = says.rsplit(" ", 1)
    losses_of_steps = json.loads(losses)
    assert len(losses_of_steps) == 6 and losses_of_steps[-1] < losses_of_steps[0] - 0.1 and exported == "True"


def test_the_recipe_of_an_engine_trains_as_the_transformers_engine_does(tmp_path):
    """One step on two ranks with each: what an engine samples follows from weights, seeds and sampling alone."""
    (tmp_path / "digits.py").write_text("def digits(response):\n    return sum(letter.isdigit() for letter in response)\n")
    says = follow(
        tmp_path,
        """
        import json
        from pathlib import Path
        from fivefold.cli import main
        from fivefold.engines.plain import PlainEngine
        from fivefold.interfaces import Engine
        def do(*words):
            assert main([str(word) for word in words]) == 0, words
        do("data", "arithmetic", "--out", "data", "--limit", 16)
        do("train-tokenizer", "char", "--data", "data/train.parquet", "--out", "tokenizer")
        do("init-model", "qwen3", "--tokenizer", "tokenizer", "--out", "model", "--hidden", 32, "--layers", 1)
        rows = {}
        for backend in ("plain", "transformers"):
            do("train", "model.path=model", "data.train=[data/train.parquet]", "data.max_prompt_tokens=16", "trainer.steps=1",
               "data.max_response_tokens=6", "data.prompts_per_step=4", "policy.backend=megatron:d2", "policy.dtype=float32",
               "trainer.device=cpu", f"trainer.run_dir={backend}", "launch.threads=1", f"engine.backend={backend}",
               "trainer.save_every=0", "engine.sampling.top_p=0.9", "reward.functions={digits.py:digits: 1.0}")
            rows[backend] = json.loads(Path(backend, "metrics.jsonl").read_text().splitlines()[-1])
        names = ("reward/mean", "response/length_mean", "policy/loss", "policy/grad_norm", "rollout/logprob_diff_max")
        print(json.dumps([[row[name] for name in names] for row in rows.values()]))
        print({name for name in vars(Engine) if not name.startswith("_")} <= {*vars(PlainEngine), "replica", "state", "version"})
        """,
        "An engine",
    )
    *_, rows, is_complete = says.splitlines()
    ours, theirs = json.loads(rows)
    assert ours == pytest.approx(theirs, abs=1e-5) and ours[3] > 0 and is_complete == "True"


def test_the_recipe_of_a_rollout_source_filters_another_source():
    longest, *_ = BLOCKS["A rollout source"]
    space: dict = {}
    exec(longest, space)

    class Four:
        def next(self, step):
            if step == 8:
                return None
            return [Group(Prompt(0, [1], "s", "q", "t"), [Sample([1] * n, [], "", "answered", step) for n in (1, 4, 2, 3)])]

        def state_dict(self):
            return {"position": 3}

        def load_state_dict(self, state):
            self.state = state

    source = space["Longest"](Four())
    (group,) = source.next(7)
    assert [len(sample.token_ids) for sample in group.samples] == [4, 3]
    assert source.next(8) is None
    assert source.state_dict() == {"position": 3}
    source.load_state_dict({"position": 5})
    assert source._source.state == {"position": 5}


@pytest.mark.slow
def test_the_recipe_of_a_rollout_source_trains_on_what_it_keeps_in_two_files(tmp_path):
    says = follow(
        tmp_path,
        """
        import json
        from collections import Counter
        from pathlib import Path
        from fivefold.cli import main
        def do(*words):
            assert main([str(word) for word in words]) == 0, words
        do("data", "arithmetic", "--out", "data", "--limit", 16)
        do("train-tokenizer", "char", "--data", "data/train.parquet", "--out", "tokenizer")
        do("init-model", "qwen3", "--tokenizer", "tokenizer", "--out", "model", "--hidden", 32, "--layers", 1)
        do("train", "model.path=model", "data.train=[data/train.parquet]", "data.max_prompt_tokens=16", "trainer.steps=1",
           "data.max_response_tokens=6", "data.prompts_per_step=4", "algorithm.group_size=4", "policy.dtype=float32",
           "trainer.device=cpu", "trainer.run_dir=run", "launch.threads=1", "trainer.save_every=0",
           "trainer.logged_samples_per_step=all")
        rows = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
        print(sorted(Counter(row["prompt_id"] for row in rows if row["kind"] == "train").values()))
        """,
        "A rollout source",
    )
    assert says.splitlines()[-1] == "[2, 2, 2, 2]"


def test_the_recipe_of_a_row_of_a_dialect_is_a_line_of_one_file(tmp_path):
    says = follow(
        tmp_path,
        """
        from fivefold_dialects.verl import translate
        print(translate({}, ["trainer.cpu_threads=3"]).tree["launch"]["threads"])
        """,
        "A row of a dialect",
    )
    assert says == "3\n"


def test_the_recipe_of_a_dialect_is_a_package_that_from_names(tmp_path):
    rows, block, entry = BLOCKS["A dialect"]
    package = tmp_path / "src" / "my_package"
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.yaml").write_text(rows)
    (package / "other.py").write_text(block)
    installed = tmp_path / "src" / "my_package-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        entry.replace('[project.entry-points."fivefold.dialects"]', "[fivefold.dialects]").replace('"', "")
    )
    (tmp_path / "run.yaml").write_text("{model_name_or_path: some/model, tp: 2, log_dir: x}")
    command = [sys.executable, "-m", "fivefold.cli", "convert", "--from", "other", "run.yaml"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path / "src")}, cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST
    )  # fmt: skip
    assert "path: some/model" in done.stdout and "megatron:d4t2" in done.stdout, done.stderr


def test_the_recipe_of_a_dialect_translates(tmp_path):
    rows, block, _ = BLOCKS["A dialect"]
    (tmp_path / "other.yaml").write_text(rows)
    space: dict = {"__file__": str(tmp_path / "other.py")}
    exec(block, space)
    translation = space["translate"]({"model_name_or_path": "some/model", "tp": 2, "log_dir": "x", "dropout": 0.0}, [])
    assert translation.refusals == []
    assert translation.tree["model"]["path"] == "some/model"
    assert "t2" in translation.tree["policy"]["backend"] and "d4" in translation.tree["policy"]["backend"]
    assert space["translate"]({"model_name_or_path": "m", "dropout": 0.1}, []).refusals != []
