from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from fivefold.algo import methods
from fivefold.algo.choices import PARTS
from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.config.dialect import Translation
from fivefold.config.loader import read, read_mapping, translate
from fivefold.config.validate import validate
from fivefold.keys.ranges import NameOrCode, _rules
from fivefold.user_code import load_user_code
from tests.support.commands import fivefold, program, python, with_cpu_seconds
from tests.support.tiny_models import make_tokenizer

GOOD = """
model: {path: m}
policy: {backend: "megatron:d2t2", dtype: float32, tokens_per_micro_batch: 2048, optimizer: {lr: 1e-6}}
data: {train: a.parquet, prompts_per_step: 8}
"""

ROWS = 32 * (json.dumps({"prompt": "1+1=", "data_source": "arithmetic", "reward_model": {"ground_truth": "2"}}) + "\n")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_a_configuration_reads_back_what_it_dumps(tmp_path):
    config = RunConfig.from_yaml(write(tmp_path, GOOD))
    assert config.policy.optimizer.lr == 1e-6
    assert config.data.train == ["a.parquet"]
    again = RunConfig.from_yaml(write(tmp_path, dump_yaml(config)))
    assert again == config


def test_a_configuration_is_made_again_of_what_dataclasses_give(tmp_path):
    config = RunConfig.from_yaml(write(tmp_path, GOOD))
    assert RunConfig.of(dataclasses.asdict(config)) == config


def test_overrides_change_one_key(tmp_path):
    config = RunConfig.from_yaml(
        write(tmp_path, GOOD), ["policy.optimizer.lr=3e-4", "trainer.steps=7", "data.val=[x.jsonl,y.jsonl]"]
    )
    assert (config.policy.optimizer.lr, config.trainer.steps, config.data.val) == (3e-4, 7, ["x.jsonl", "y.jsonl"])
    assert config.data.prompts_per_step == 8


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("policy.optimiser.lr=1", r"unknown key 'policy.optimiser': did you mean 'policy.optimizer'\?"),
        ("algorithm.groupsize=4", r"did you mean 'algorithm.group_size'\?"),
        ("nonsense=1", "unknown key 'nonsense'; known here: model"),
        ("policy.optimizer.lr=fast", "policy.optimizer.lr must be a number, got 'fast'"),
        ("trainer.steps=1.5", "trainer.steps must be a whole number"),
        ("trainer.steps=true", "trainer.steps must be a whole number"),
        ("data.shuffle=1", "data.shuffle must be true or false"),
        ("algorithm.name=grpoo", r"one of ppo, grpo, dr_grpo, .*dpo; got 'grpoo': did you mean 'grpo'\?"),
        ("policy.backend=megatron:d2d2", "given twice"),
        (
            "reference.backend=megatron:d3",
            r"shares the policy's ranks, so d·t·p·c must be 4: .* has 3; write for .* megatron:d4",
        ),
        ("critic.backend=vllm:d1", "critic.backend must be a layout of a trainer, megatron or fsdp"),
        ("reward.model.backend=megatron:x2", "reward.model.backend: unknown dimension 'x'"),
        ("algorithm.updates_per_step=3", "multiple of algorithm.updates_per_step"),
        ("policy.tokens_per_micro_batch=100", "must hold the longest sequence"),
        ("engine.sampling.temperature=0", r"must be in \(0, 100\]: got 0.0"),
        ("engine.sampling.top_p=1.5", r"must be in \(0, 1\]"),
        ("policy.optimizer.betas=[0.9]", "two numbers"),
        ("policy.optimizer.min_lr=1", "at most lr"),
        ("trainer.eval_every=5", "needs validation files"),
        ("model=3", "model must be a mapping"),
        ("trainer.keep=0", "must be above 0"),
        ("noequals", "written key=value"),
        ("policy.optimizer.lr=-1", r"policy.optimizer.lr must be in \[0, 1\]: got -1.0"),
        ("policy.optimizer.lr=.nan", "policy.optimizer.lr must be a finite number: got nan"),
        ("trainer.stop_at={val/x/accuracy: .inf}", "trainer.stop_at.val/x/accuracy must be a finite number: got inf"),
        ("policy.optimizer.betas=[0.9,1]", r"policy.optimizer.betas\[1\] must be in \[0, 1\): got 1.0"),
        ("algorithm.updates_per_step=0", "algorithm.updates_per_step must be above 0: got 0"),
        ("algorithm.kl.coef=-1", "algorithm.kl.coef must be at least 0"),
        ("algorithm.clip_high=-1", "algorithm.clip_high must be at least 0: got -1.0"),
        ("algorithm.rollout_correction.name=tiss", r"one of none, tis, .*; got 'tiss': did you mean 'tis'\?"),
        ("reward.timeout_seconds=.inf", "reward.timeout_seconds must be a finite number: got inf"),
        ("reward.max_failed=2", r"reward.max_failed must be in \[0, 1\]: got 2.0"),
        ("trainer.guard.every=-1", "trainer.guard.every must be at least 0: got -1"),
    ],
)
def test_a_bad_key_or_value_is_refused_with_what_to_write(tmp_path, override, says):
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_yaml(write(tmp_path, GOOD), [override])


def test_how_the_loss_is_scaled_is_said_to_be_without_effect_but_in_float16(tmp_path):
    scale = ["policy.megatron.optimizer.initial_loss_scale=65536.0"]
    for dtype, expected in (("float32", True), ("float16", False)):
        ignored = dict(validate(RunConfig.from_yaml(write(tmp_path, GOOD), [f"policy.dtype={dtype}", *scale])).ignored)
        assert ("policy.megatron.optimizer.initial_loss_scale" in ignored) == expected


def test_estimated_old_log_probs_are_reported_as_the_engine_s_within_one_step(tmp_path):
    for steps, expected in (("1", True), ("2", False)):
        words = ["algorithm.rollout_correction.old_logprobs_from=loglinear", f"rollout.max_staleness={steps}"]
        notes = validate(RunConfig.from_yaml(write(tmp_path, GOOD), words)).notes
        assert any("loglinear is the same as engine" in note for note in notes) == expected


@pytest.mark.parametrize("method", ["name=remax", "advantage=greedy_baseline"])
def test_a_method_that_samples_within_the_step_is_refused_ahead_of_it(tmp_path, method):
    with pytest.raises(ConfigError, match=r"rollout.max_staleness must be left out with advantage: greedy_baseline"):
        RunConfig.from_yaml(write(tmp_path, GOOD), [f"algorithm.{method}", "rollout.max_staleness=1"])


def test_no_rule_looks_for_a_name_that_the_tables_of_methods_lack():
    """A comparison with a name that is no row never holds, and the type checker does not see it: names are any text."""
    hints = [item for part in PARTS for item in typing.get_type_hints(part, include_extras=True).items()]
    axes = {name: set(rule.names) for name, hint in hints for rule in _rules(hint) if isinstance(rule, NameOrCode)}
    assert len(axes) == 10
    for path in Path(methods.__file__).parents[1].rglob("*.py"):
        compared = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)]
        for axis, node in ((node.left.attr, node) for node in compared if isinstance(node.left, ast.Attribute)):
            texts = [part.value for right in node.comparators for part in ast.walk(right) if isinstance(part, ast.Constant)]
            unknown = {text for text in texts if isinstance(text, str)} - axes.get(axis, set(texts))
            assert not unknown, f"{path}:{node.lineno} compares {axis} with {unknown}"


def test_all_faults_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(write(tmp_path, GOOD), ["trainer.stepz=1", "policy.dtype=float8"])
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {path: a}\nmodel: {path: b}", "given twice"),
        ("- a", "mapping of keys"),
        ("a: [", "not valid YAML"),
        ("{}", "model.path is required"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        RunConfig.from_yaml(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file at"):
        RunConfig.from_yaml(tmp_path / "none.yaml")


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    return fivefold("check", *arguments)


def test_check_names_what_is_not_there_and_what_does_not_fit(tmp_path, models):
    data = tmp_path / "d.jsonl"
    data.write_text(ROWS)
    path = write(
        tmp_path,
        f"model: {{path: {models('qwen3')}, tokenizer: {make_tokenizer(tmp_path / 'words')}}}\npolicy: {{backend: 'megatron:t16'}}\n"
        f"data: {{train: [{data}, none.parquet], max_prompt_tokens: 300, max_response_tokens: 20}}\n"
        "reward: {functions: {gsm9k: 1.0}}\n",
    )
    result = check(path)
    assert result.returncode == 2
    for says in (
        "attention heads must be divisible by tp: got 8 for tp=16",
        "no file at none.parquet",
        "unknown reward 'gsm9k'",
    ):
        assert says in result.stderr
    assert "Traceback" not in result.stderr
    fits = check(
        path, "policy.backend=megatron:t2p2", f"data.train={data}", "reward.functions={}", "data.max_prompt_tokens=200"
    )
    assert fits.returncode == 0, fits.stderr
    assert "this run can start" in fits.stdout
    deep = check(path, "policy.backend=megatron:p3", f"data.train={data}")
    assert "layers must be divisible by pp: got 4 layers for pp=3" in deep.stderr


def test_a_key_without_effect_is_reported(tmp_path, models):
    data = tmp_path / "d.jsonl"
    data.write_text(ROWS)
    path = write(
        tmp_path,
        f"model: {{path: {models('qwen3')}, tokenizer: {make_tokenizer(tmp_path / 'words')}}}\npolicy: {{optimizer: {{min_lr: 1e-7}}}}\n"
        f"data: {{train: {data}, max_prompt_tokens: 100, max_response_tokens: 20}}\neval: {{samples: 4}}\n",
    )
    result = check(path)
    assert "policy.optimizer.decay_steps and min_lr has no effect: the schedule is constant" in result.stdout
    assert "eval.samples and generate has no effect" in result.stdout
    sft = check(path, "algorithm.name=sft", "algorithm.group_size=4", "engine.sampling.temperature=0.5")
    assert "algorithm.group_size has no effect: sft learns from the responses in the data" in sft.stdout
    assert "engine.sampling has no effect: sft does not sample" in sft.stdout
    dpo = check(path, "algorithm.name=dpo", "reward.functions={format: 1}", "data.messages_key=m", "data.chosen_key=c")
    assert "reward has no effect: dpo scores nothing" in dpo.stdout
    assert "data.messages_key has no effect: dpo does not read it" in dpo.stdout and "data.chosen_key" not in dpo.stdout
    ppo = check(
        path, "algorithm.name=ppo", "trainer.device=cpu", "critic.optimizer.decay_steps=9", "critic.offload={optimizer: true}",
        "critic.megatron.transformer={moe_aux_loss_coeff: 0.1}",
    )  # fmt: skip
    assert "critic.optimizer.decay_steps and min_lr has no effect: the schedule is constant" in ppo.stdout
    assert "critic.offload.optimizer has no effect: on the CPU" in ppo.stdout
    assert "critic.megatron.transformer.moe_aux_loss_coeff has no effect" in ppo.stdout
    assert "critic has no effect: grpo has no critic" in check(path, "critic.warmup_steps=2").stdout


@pytest.mark.parametrize(("changes", "keys", "active"), [
    ("algorithm.name=ppo critic.lora.rank=2 critic.lora.max_lost=0.2", "critic.lora.max_lost", ""),
    ("algorithm.name=prime prm.lora.rank=2 prm.lora.max_lost=0.2", "prm.lora.max_lost", ""),
    ("algorithm.name=sft policy.lora.rank=2 policy.lora.max_lost=0.2", "policy.lora.max_lost", "algorithm.name=grpo"),
    ("trainer.async_save=true trainer.save_every=0", "trainer.async_save", "trainer.save_every=1"),
    ("engine.max_logprob_diff=0.1 engine.max_logprob_kl=0.1 engine.sampling.top_p=0.9",
     "engine.max_logprob_diff engine.max_logprob_kl", "engine.sampling.top_p=1"),
])  # fmt: skip
def test_a_key_without_effect_is_reported_while_it_has_none(tmp_path, models, changes, keys, active):
    data = tmp_path / "d.jsonl"
    data.write_text(ROWS)
    path = write(
        tmp_path,
        f"model: {{path: {models('qwen3')}, tokenizer: {make_tokenizer(tmp_path / 'words')}}}\n"
        f"data: {{train: {data}, max_prompt_tokens: 100, max_response_tokens: 20}}\n",
    )
    reported = check(path, *changes.split()).stdout
    assert all(f"{key} has no effect" in reported for key in keys.split()), reported
    assert not active or not any(
        f"{key} has no effect" in check(path, *changes.split(), active).stdout for key in keys.split()
    )


def test_a_fault_is_reported_once_by_the_section_that_has_it(tmp_path):
    """The critic takes over what it does not set itself, and the policy's faults with it."""
    path = write(tmp_path, GOOD)
    options = "megatron={transformer: {recompute_granularty: full}, optimizer: {lr: 0.1}}"
    for where in ("policy", "critic"):
        with pytest.raises(ConfigError) as caught:
            RunConfig.from_yaml(path, ["algorithm.name=ppo", f"{where}.{options}", f"{where}.tokens_per_micro_batch=100"])
        unknown, refused, short = sorted(caught.value.faults, key=lambda fault: "must hold" in fault)
        assert f"unknown key '{where}.megatron.transformer.recompute_granularty': did you mean" in unknown
        assert f"{where}.megatron.optimizer.lr cannot be set: set {where}.optimizer.lr" in refused
        assert short.startswith(f"{where}.tokens_per_micro_batch must hold the longest sequence")


def test_every_fault_of_a_value_and_of_values_together_is_collected(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(write(tmp_path, GOOD), ["trainer.keep=0", "policy.optimizer.lr=-1", "algorithm.name=grpoo"])
    assert len(caught.value.faults) == 3
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(write(tmp_path, GOOD), ["trainer.eval_every=5", "policy.optimizer.min_lr=1", "algorithm.beta=1"])
    assert len(caught.value.faults) == 3


# --- from Python and from other spellings ----------------------------------------------------------------------------


DECORATOR = """
from functools import wraps

def logged(function):
    @wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call
"""
USER = """
from user_decorators import logged

def score(response, ground_truth):
    return float(response == ground_truth)

@logged
def linear(log_ratio_T, logprobs_T, advantages_T, samples):
    return log_ratio_T * advantages_T

def make():
    def inner(response): return 0.0
    return inner

anonymous = lambda response: 0.0
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_decorators.py").write_text(DECORATOR)
    (tmp_path / "user_functions.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("user_functions")
    del sys.modules["user_functions"], sys.modules["user_decorators"]


def test_a_function_stands_wherever_its_path_and_name_may(tmp_path, user_module):
    path = tmp_path / "user_functions.py"
    tree = {"reward": {"functions": {user_module.score: 1.0, "format": 0.1}, "accuracy": user_module.score}}
    config = RunConfig.of({"model": {"path": "m"}, "algorithm": {"surrogate": user_module.linear}, **tree})
    assert config.reward.functions == {f"{path}:score": 1.0, "format": 0.1}
    assert config.reward.accuracy == f"{path}:score" and config.algorithm.surrogate == f"{path}:linear"
    assert RunConfig.from_yaml(write(tmp_path, dump_yaml(config))) == config
    assert load_user_code(config.algorithm.surrogate)(2.0, None, 3.0, None) == 6.0
    assert tree["reward"]["accuracy"] is user_module.score, "the caller's tree stays as it was"


def test_a_function_of_a_package_imports_the_package_s_own_parts(tmp_path):
    package = tmp_path / "reward_score"
    (package / "grading").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from . import grading\n\ndef score(response):\n    return grading.half(response)\n"
    )
    (package / "grading" / "__init__.py").write_text("from .parts import half\n")
    (package / "grading" / "parts.py").write_text("def half(response):\n    return len(response) / 2\n")
    assert load_user_code(f"{package}/__init__.py:score")("four") == 2.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "anonymous",
            "algorithm.surrogate: .*at the top level of a file.*got a lambda in .*user_functions.py; give it a name",
        ),
        ("made", "make.<locals>.inner in .* is defined within another function"),
        ("typed", "was defined in <stdin>"),
        ("builtin", "got <built-in function len>"),
    ],
)
def test_a_function_that_other_processes_cannot_load_is_refused(user_module, name, says):
    typed: dict = {}
    exec(compile("def typed(response): return 0.0", "<stdin>", "exec"), typed)
    functions = {"anonymous": user_module.anonymous, "made": user_module.make(), "typed": typed["typed"], "builtin": len}
    with pytest.raises(ConfigError, match=says):
        RunConfig.of({"model": {"path": "m"}, "algorithm": {"surrogate": functions[name]}})


DIALECT = """
from fivefold.config.dialect import Translation

NAMES = {"actor.lr": "policy.optimizer.lr", "model_path": "model.path"}

def translate(tree, overrides):
    found, keys = {}, {}
    for key, value in {**tree, **dict(each.split("=") for each in overrides)}.items():
        ours = keys[key] = NAMES.get(key, "has no counterpart")
        if key in NAMES:
            section, _, last = ours.rpartition(".")
            if section == "model":
                found["model"] = {last: value}
            else:
                found.setdefault("policy", {}).setdefault("optimizer", {})[last] = value
    return Translation(found, [], keys)
"""


def test_a_dialect_is_one_file_that_an_entry_point_names(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(DIALECT)
    installed = tmp_path / "elsewhere-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: elsewhere\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[fivefold.dialects]\nelsewhere = elsewhere:translate\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = write(tmp_path, "model_path: m\nactor.lr: 1e-5\nuse_magic: true\n")
    config = RunConfig.from_yaml(path, ["actor.lr=3e-5"], dialect="elsewhere")
    assert (config.model.path, config.policy.optimizer.lr) == ("m", 3e-5)
    keys = translate(read(path), [], "elsewhere").keys
    assert keys == {"model_path": "model.path", "actor.lr": "policy.optimizer.lr", "use_magic": "has no counterpart"}
    with pytest.raises(ConfigError, match=r"policy.optimizer.lr must be in \[0, 1\]: got -1.0"):
        RunConfig.from_yaml(path, ["actor.lr=-1"], dialect="elsewhere")
    with pytest.raises(
        ValueError, match=r"must be one of areal, elsewhere, fivefold, roll, .*; got 'elsewere': did you mean 'elsewhere'\?"
    ):
        RunConfig.from_yaml(path, dialect="elsewere")


def test_a_dialect_may_be_a_function(tmp_path):
    def translate(tree, overrides):
        return Translation({"model": {"path": tree["path"]}}, ["trainer.steps=3", *overrides])

    config = RunConfig.from_yaml(write(tmp_path, "path: m"), ["trainer.keep=2"], dialect=translate)
    assert (config.model.path, config.trainer.steps, config.trainer.keep) == ("m", 3, 2)


# --- check -----------------------------------------------------------------------------------------------------------


def test_updates_that_a_method_cannot_correct_are_noted(tmp_path, models):
    data = tmp_path / "d.jsonl"
    data.write_text(ROWS)
    path = write(
        tmp_path,
        f"model: {{path: {models('qwen3')}, tokenizer: {make_tokenizer(tmp_path / 'words')}}}\n"
        f"data: {{train: {data}, prompts_per_step: 8, max_prompt_tokens: 100, max_response_tokens: 20}}\n",
    )
    noted = "all but the first of 4 updates a step are off-policy"
    assert noted in check(path, "algorithm.name=rloo", "algorithm.updates_per_step=4").stdout
    assert noted not in check(path, "algorithm.name=grpo", "algorithm.updates_per_step=4").stdout


def test_check_answers_without_torch_and_sooner_than_its_import(tmp_path, models):
    """That import takes two seconds or so: in processor time, as the machine may have other things to do."""
    data = tmp_path / "d.jsonl"
    data.write_text(ROWS)
    path = write(
        tmp_path,
        f"model: {{path: {models('qwen3')}, tokenizer: {make_tokenizer(tmp_path / 'words')}}}\ndata: {{train: {data}, max_prompt_tokens: 10, max_response_tokens: 10}}\n",
    )
    done, spent = with_cpu_seconds(lambda: program("fivefold.cli", "check", path))
    assert done.returncode == 0, done.stderr
    imported, unit = with_cpu_seconds(lambda: python("-c", "import torch"))
    assert imported.returncode == 0 and spent < unit
    code = (
        "import sys; import fivefold.plan.check, fivefold.models.families, fivefold.layout, fivefold.plan.memory, fivefold.config, fivefold.reward.process\n"
        "from fivefold.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules), sys.modules.keys()"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_number_has_its_range_on_its_field():
    """The parameters of surrogates have theirs on the surrogate's class."""
    from fivefold.algo.surrogates import SURROGATES
    from fivefold.config import RunConfig
    from fivefold.keys.ranges import Range

    def is_number(hint) -> bool:
        return hint in (int, float) or any(map(is_number, typing.get_args(hint)))

    def without(section: type, where: str) -> list[str]:
        lacking = []
        plain, full = typing.get_type_hints(section), typing.get_type_hints(section, include_extras=True)
        for name, hint in plain.items():
            inner = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
            if inner:
                lacking += without(inner[0], f"{where}{name}.")
            elif is_number(hint) and not any(isinstance(rule, Range) for rule in _rules(full[name])):
                lacking.append(f"{where}{name}")
        return lacking

    # Keys of a mapping have none: ids of tokens are compared with the model's vocabulary.
    numbers = {key for row in SURROGATES.values() for key in row.parameters() if isinstance(row.range_of(key), Range)}
    assert set(without(RunConfig, "")) == {f"algorithm.{name}" for name in numbers}


def test_at_most_five_files_besides_build_and_plan_take_a_whole_configuration():
    root = Path(importlib.import_module("fivefold").__path__[0])

    def takes_all(function: ast.FunctionDef) -> bool:
        every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        return any("RunConfig" in ast.unparse(argument.annotation) for argument in every if argument.annotation is not None)

    files = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in ("config", "plan", "build.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and takes_all(node)
    }
    assert files and len(files) <= 5, files


@pytest.mark.parametrize(
    ("gpus", "sections", "dtype"),
    [
        (0, {}, "float32"),
        (0, {"policy": {"dtype": "bfloat16"}}, "bfloat16"),
        (0, {"launch": {"gpu": "h100-80g"}}, "bfloat16"),
        (0, {"trainer": {"device": "cuda"}}, "bfloat16"),
        (0, {"launch": {"backend": "ray", "ray": {"address": "auto"}}}, "bfloat16"),
        (1, {}, "bfloat16"),
        (1, {"trainer": {"device": "cpu"}}, "float32"),
    ],
)
def test_a_run_from_python_without_gpus_computes_in_float32(monkeypatch, tmp_path, gpus, sections, dtype):
    monkeypatch.setattr("fivefold.config.machine.visible_gpus", lambda: gpus)
    config = RunConfig.of(model={"path": "m"}, data={"train": ["rows.jsonl"]}, **sections)
    assert config.policy.dtype == dtype
    # A file says what it computes in, wherever it is read.
    assert RunConfig.from_yaml(write(tmp_path, dump_yaml(config))).policy.dtype == dtype
    tree = {"model": {"path": "m"}, "data": {"train": ["rows.jsonl"]}, **sections}
    written = RunConfig.from_yaml(write(tmp_path, yaml.safe_dump(tree))).policy.dtype
    assert written == sections.get("policy", {}).get("dtype", "bfloat16")


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "0b" + "1" * 5000, "9" * 5000, "1" + ":59" * 2000, "1" * 2000 + ".5"])
def test_a_number_of_thousands_of_digits_is_refused_by_its_line(number):
    """Python shows no such number, not even in a sentence about it, and takes quadratic time for those of minutes."""
    with pytest.raises(ConfigError, match=r"run.yaml: a number has at most 1000 characters \(line 2\)"):
        read_mapping(f"a: 1\nb: {number}\n", "run.yaml")
    assert read_mapping("a: 0x10\nb: 1:30\nc: 1e-3\nd: 1.5\n", "") == {"a": 16, "b": 90, "c": "1e-3", "d": 1.5}
