"""What a user can give that cannot work is refused by `check`, in one sentence that names it, and by the ranks alike."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import ConfigError, RunConfig
from fivefold.plan.check import check
from tests.support.commands import Command
from tests.support.tiny_models import make_model, make_tokenizer

ROW = {"data_source": "arithmetic", "prompt": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}}


class Case:
    """A run in a directory of its own, to be spoiled."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model, self.data = root / "model", root / "data.jsonl"
        self.tree: dict[str, Any] = {
            "model": {"path": str(self.model)},
            "policy": {"dtype": "float32"},
            "data": {"train": [str(self.data)], "prompts_per_step": 2, "max_prompt_tokens": 32, "max_response_tokens": 32},
            "trainer": {"device": "cpu", "run_dir": str(root / "run")},
        }
        self.rows(ROW, ROW, ROW)

    def rows(self, *rows: Any) -> None:
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def row(self, **changes: Any) -> None:
        """The second of three rows, changed; what becomes `...` is left out."""
        row = {key: value for key, value in {**ROW, **changes}.items() if value is not ...}
        self.rows(ROW, row, ROW)

    def truth(self, *value: Any) -> None:
        self.row(reward_model={"style": "rule", **({"ground_truth": value[0]} if value else {})})

    def set(self, key: str, value: Any) -> None:
        *parents, last = key.split(".")
        node = self.tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    def json(self, name: str, **changes: Any) -> None:
        path = self.model / name
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))

    def tensors(self, change: Callable[[dict[str, Any]], Any]) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(self.model / "model.safetensors")
        change(tensors)
        save_file(tensors, self.model / "model.safetensors")

    def index(self, file: str = "part.safetensors", **extra: str) -> None:
        """The same tensors in a file that an index names."""
        names = json.loads((self.model / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
        (self.model / "model.safetensors").rename(self.model / "part.safetensors")
        places = {name: file for name in names if name != "__metadata__"}
        (self.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**places, **extra}}))

    def template(self, text: str) -> None:
        (self.model / "chat_template.jinja").write_text(text)

    def parquet(self, keep: float) -> None:
        """The rows as parquet, of which the first `keep` are left."""
        import pyarrow
        import pyarrow.parquet

        path = self.root / "data.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW] * 50), path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])
        self.tree["data"]["train"] = [str(path)]

    def errors(self) -> list[str]:
        try:
            return check(RunConfig.of(**copy.deepcopy(self.tree))).errors
        except ConfigError as error:
            return error.faults


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good") / "model"
    make_model("qwen3", root, num_hidden_layers=2)
    make_tokenizer(root)
    return root


@pytest.fixture
def case(tmp_path: Path, good_model: Path) -> Case:
    shutil.copytree(good_model, tmp_path / "model")
    return Case(tmp_path)


def cut(name: str, share: float) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        path = case.model / name
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return change


def written(name: str, content: bytes | str) -> Callable[[Case], None]:
    return lambda case: (case.model / name).write_bytes(content.encode() if isinstance(content, str) else content) and None


def data(content: bytes) -> Callable[[Case], None]:
    return lambda case: case.data.write_bytes(content) and None


def setting(key: str, value: Any) -> Callable[[Case], None]:
    return lambda case: case.set(key, value)


def offline(name: str, *rows: dict[str, Any]) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.set("algorithm.name", name)
        case.rows(*rows, *rows)

    return change


def replaced(name: str, make: Callable[[Any], Any]) -> Callable[[Case], None]:
    """One tensor of the file becomes another, or goes where it becomes None."""

    def change(case: Case) -> None:
        def spoil(tensors: dict[str, Any]) -> None:
            value = make(tensors.pop(name))
            if value is not None:
                tensors[name] = value

        case.tensors(spoil)

    return change


def surplus(case: Case) -> None:
    case.tensors(lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": tensors["model.norm.weight"].clone()}))


def judge(**changes: Any) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        shutil.copytree(case.model, case.root / "judge")
        path = case.root / "judge/config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        case.set("reward.model.path", str(case.root / "judge"))

    return change


UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}
Q = "model.layers.0.self_attn.q_proj.weight"
USER, ANSWER = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}

BAD: dict[str, tuple[Callable[[Case], Any], str]] = {
    # --- data: files
    "no data file": (setting("data.train", ["none.jsonl"]), "data.train: no file at none.jsonl"),
    "no data": (setting("data.train", []), "data.train names no file"),
    "an empty file": (data(b""), "data.jsonl has no rows"),
    "blank lines only": (data(b"\n\n \n"), "data.jsonl has no rows"),
    "a file that is not UTF-8": (data(b'{"prompt": "caf\xe9"}\n'), "data.jsonl, line 1 is not UTF-8 text: byte 0xe9"),
    "UTF-16": (data('{"prompt": "1"}\n'.encode("utf-16")), "line 1 is not UTF-8 text"),
    "a line that is not JSON": (data(json.dumps(ROW).encode() + b"\n{broken\n"), "data.jsonl, line 2 is not JSON"),
    "a line cut off": (data(b'{"prompt": "1+1=", "data_sou'), "data.jsonl, line 1 is not JSON"),
    "a list instead of an object": (data(b"[1, 2]\n"), "line 1 must hold a JSON object: got [1, 2]"),
    "JSON nested without end": (data(b'{"prompt": ' + b"[" * 200_000 + b"\n"), "data.jsonl, line 1 is not JSON"),
    "a whole list in one JSON file": (data(json.dumps([ROW, ROW]).encode()), "line 1 must hold a JSON object"),
    "an unknown ending": (lambda case: (case.data.rename(case.root / "data.csv"), case.set("data.train", [str(case.root / "data.csv")])), "data files end in .parquet or .jsonl"),
    "a parquet file cut off": (lambda case: case.parquet(0.7), "data.parquet cannot be read as parquet, it may be cut off"),
    "a parquet file that is text": (lambda case: (case.data.rename(case.root / "a.parquet"), case.set("data.train", [str(case.root / "a.parquet")])), "a.parquet cannot be read as parquet"),
    "a directory for a data file": (lambda case: case.set("data.train", [str(case.model)]), "is a directory without state.json"),
    # --- data: rows
    "no prompt column": (lambda case: case.row(prompt=...), "data.jsonl, row 1: no column 'prompt'; it has data_source, reward_model"),
    "a prompt under a usual name": (
        lambda case: case.row(prompt=..., question="1+1="), "row 1: no column 'prompt'; it has data_source, reward_model, question; set data.prompt_key: question",
    ),
    "TRL's column for what to imitate": (
        offline("sft", {"prompt": "1+1=", "completion": "2"}),
        "row 0: learning from responses needs a text in column 'response' or a conversation in column 'messages'; it has prompt, "
        "completion; set data.response_key: completion",
    ),
    "another prompt column": (setting("data.prompt_key", "question"), "row 0: no column 'question'"),
    "a number for a prompt": (lambda case: case.row(prompt=3), "row 1: column 'prompt': a prompt is a text or a list of messages"),
    "a mapping for a prompt": (lambda case: case.row(prompt={"role": "user"}), "row 1: column 'prompt': a prompt is a text or a list"),
    "a null prompt": (lambda case: case.row(prompt=None), "row 1: no column 'prompt'"),
    "an empty prompt": (lambda case: case.row(prompt=""), "row 1: column 'prompt': the prompt is empty"),
    "a prompt of spaces": (lambda case: case.row(prompt=[{"role": "user", "content": "  \n"}]), "row 1: column 'prompt': the prompt is empty"),
    "no messages": (lambda case: case.row(prompt=[]), "row 1: column 'prompt': a prompt is a text or a list"),
    "a message without a role": (lambda case: case.row(prompt=[{"content": "1"}]), "row 1: column 'prompt': a prompt is a text or a list"),
    "an unknown role": (lambda case: case.row(prompt=[{"role": "human", "content": "1"}]), "the role of a message is one of system, developer, user, assistant, tool: got 'human'"),
    "a role that is a list": (lambda case: case.row(prompt=[{"role": ["user"], "content": "1"}]), "the role of a message is one of"),
    "a content that is null": (lambda case: case.row(prompt=[{"role": "user", "content": None}]), "row 1: column 'prompt': the content of a message must be a text: got None"),
    "a content in parts": (lambda case: case.row(prompt=[{"role": "user", "content": [{"type": "text", "text": "1"}]}]), "the content of a message must be a text"),
    "half a character": (lambda case: case.row(prompt="1\ud800"), "row 1: column 'prompt': the text holds half a character"),
    "a text for the reward": (lambda case: case.row(reward_model="2"), "row 1: column 'reward_model' must be a mapping: got '2'"),
    "a list for extra information": (lambda case: case.row(extra_info=[1]), "row 1: column 'extra_info' must be a mapping: got [1]"),
    "a mapping for the source": (lambda case: case.row(data_source={"a": 1}), "row 1: column 'data_source' must be a text"),
    "a source without a reward": (lambda case: case.row(data_source="poems"), "row 1: no reward is known for data_source 'poems'"),
    "a truth that is null": (lambda case: case.truth(None), "row 1: column 'reward_model', ground_truth must be a number for the reward gsm8k: got ''"),
    "no truth": (lambda case: case.truth(), "ground_truth must be a number for the reward gsm8k"),
    "no reward column": (lambda case: case.row(reward_model=...), "ground_truth must be a number for the reward gsm8k"),
    "a truth that is a mapping": (lambda case: case.truth({"answer": 2}), "ground_truth must be a number for the reward gsm8k"),
    "a truth that is a sentence": (lambda case: case.truth("two"), "ground_truth must be a number for the reward gsm8k: got 'two'"),
    "an empty truth for math": (lambda case: case.row(data_source="math", reward_model={"ground_truth": " "}), "must not be empty for the reward math"),
    "too few rows for a step": (setting("data.prompts_per_step", 4), "data.prompts_per_step must not be larger than the training set: got 4 for 3 prompts"),
    "prompts that are all too long": (setting("data.max_prompt_tokens", 3), "data.train has no prompt of at most data.max_prompt_tokens = 3"),
    "a long prompt where none may be": (lambda case: (case.row(prompt="1" * 99), case.set("data.overlong_prompts", "refuse")), "row 1: the prompt has 100 tokens, data.max_prompt_tokens is 32"),
    "a bad row for evaluation": (lambda case: (shutil.copy(case.data, case.root / "val.jsonl"), case.set("data.val", [str(case.root / "val.jsonl")]), (case.root / "val.jsonl").write_text('{"prompt": 1}\n')), "val.jsonl, row 0: column 'prompt'"),
    "sft without responses": (offline("sft", {"prompt": "1"}), "row 0: learning from responses needs a text in column 'response'"),
    "sft with a number": (offline("sft", {"prompt": "1", "response": 2}), "row 0: column 'response': a response is a text"),
    "sft without an assistant": (offline("sft", {"messages": [USER]}), "a conversation to imitate needs an assistant's turn"),
    "dpo without a rejected one": (offline("dpo", {"prompt": "1", "chosen": "2"}), "learning from pairs needs columns 'chosen' and 'rejected'"),
    "dpo with other questions": (offline("dpo", {"chosen": [USER, ANSWER], "rejected": [{**USER, "content": "3"}, ANSWER]}), "must differ in their last turn only"),
    # --- the model's config.json
    "no model": (setting("model.path", "./none"), "model.path: no directory ./none"),
    "a model of no owner": (setting("model.path", "qwen"), "model.path: no directory qwen, and no hub id"),
    "no config.json": (lambda case: (case.model / "config.json").unlink(), "no config.json in"),
    "a config.json cut off": (cut("config.json", 0.5), "config.json is not JSON"),
    "a config.json that is a list": (written("config.json", "[]"), "config.json must hold a JSON object"),
    "a config.json that is not UTF-8": (written("config.json", b"\xff\xfe{}"), "config.json is not UTF-8 text"),
    "an unknown family": (lambda case: case.json("config.json", model_type="poet"), "unknown model family 'poet'"),
    "a family that is a list": (lambda case: case.json("config.json", model_type=["qwen3"]), "unknown model family"),
    "a size that is a text": (lambda case: case.json("config.json", hidden_size="64"), "hidden_size in config.json must be a whole number from 1"),
    "a size of 0": (lambda case: case.json("config.json", hidden_size=0), "hidden_size in config.json must be a whole number from 1"),
    "no heads": (lambda case: case.json("config.json", num_attention_heads=0), "num_attention_heads in config.json must be a whole number from 1"),
    "no size": (lambda case: case.json("config.json", intermediate_size=...), "config.json of a qwen3 model must have intermediate_size"),
    "a billion layers": (lambda case: case.json("config.json", num_hidden_layers=10**9), "num_hidden_layers in config.json must be a whole number from 1 to 4096"),
    "heads that do not divide": (lambda case: case.json("config.json", num_key_value_heads=3), "must be a multiple of num_key_value_heads: got 8 and 3"),
    "a norm's eps of -1": (lambda case: case.json("config.json", rms_norm_eps=-1.0), "rms_norm_eps in config.json must be a number above 0"),
    "a norm's eps that is NaN": (lambda case: case.json("config.json", rms_norm_eps=math.nan), "rms_norm_eps in config.json must be a number above 0"),
    "RoPE that is a text": (lambda case: case.json("config.json", rope_parameters="linear"), "rope_parameters in config.json must be a mapping"),
    "an unknown RoPE": (lambda case: case.json("config.json", rope_parameters={"rope_type": "spiral"}), "RoPE variant 'spiral' is not supported"),
    "a tied output that is a text": (lambda case: case.json("config.json", tie_word_embeddings="no"), "tie_word_embeddings in config.json must be true or false: got 'no'"),
    "positions below the sequence": (lambda case: case.json("config.json", max_position_embeddings=40), "= 64 is more than the 40 positions"),
    "a layer too many in config.json": (lambda case: case.json("config.json", num_hidden_layers=3, layer_types=None), "lacks 11 tensors of a qwen3 model"),
    "layer types of a layer too many": (lambda case: case.json("config.json", num_hidden_layers=3), "layer_types in config.json must name full_attention for each of 3 layers"),
    "numbers of four bits": (lambda case: case.json("config.json", quantization_config={"quant_method": "awq"}), "quantization_config in config.json must be left out"),
    "a layer too many in the files": (lambda case: case.json("config.json", num_hidden_layers=1, layer_types=None), "holds 11 tensors that a qwen3 model of its config.json does not have"),
    "a vocabulary of 10": (lambda case: case.json("config.json", vocab_size=10), "model.embed_tokens.weight must have the shape (10, 64) of config.json: got (131, 64)"),
    "another hidden size": (lambda case: case.json("config.json", intermediate_size=128), "must have the shape (128, 64)"),
    "an end token that is a text": (lambda case: case.json("config.json", eos_token_id="end"), "eos_token_id must be a token or a list of tokens"),
    "an end token outside": (lambda case: case.json("config.json", eos_token_id=500), "the end token 500 is not in the model's vocabulary of 131"),
    "a generation configuration cut off": (written("generation_config.json", '{"eos'), "generation_config.json is not JSON"),
    # --- the model's tensors
    "no tensors": (lambda case: (case.model / "model.safetensors").unlink(), "no model.safetensors or model.safetensors.index.json"),
    "tensors cut off": (cut("model.safetensors", 0.9), "model.safetensors is cut off or damaged: its tensors take"),
    "a header cut off": (cut("model.safetensors", 0.001), "is not a complete safetensors file"),
    "an empty tensor file": (written("model.safetensors", b""), "is not a complete safetensors file: it has 0 bytes"),
    "a tensor file that is text": (written("model.safetensors", "not found" * 99), "is not a complete safetensors file"),
    "a header that is not JSON": (written("model.safetensors", (4).to_bytes(8, "little") + b"{]}{"), "its header is not JSON"),
    "a tensor too few": (replaced(Q, lambda tensor: None), "lacks 1 tensors of a qwen3 model, the first: ['" + Q),
    "a tensor too many": (surplus, "holds 1 tensors that a qwen3 model of its config.json does not have"),
    "a tensor of another shape": (replaced(Q, lambda tensor: tensor[:-1].clone()), f"{Q} must have the shape (128, 64)"),
    "a tensor transposed": (replaced(Q, lambda tensor: tensor.T.contiguous()), f"{Q} must have the shape (128, 64)"),
    "int8 weights": (replaced(Q, lambda tensor: tensor.char()), f"{Q} is stored as I8, parameters are read from"),
    "an index naming a file that is not there": (lambda case: case.index("absent.safetensors"), "names 'absent.safetensors', which is not there"),
    "an index naming a tensor that is not there": (lambda case: case.index(**{"model.layers.0.mlp.x": "part.safetensors"}), "names 1 tensors that no file holds"),
    "an index naming a file elsewhere": (lambda case: case.index("../model/part.safetensors"), "names '../model/part.safetensors'"),
    "an index without a map": (lambda case: (case.index(), (case.model / "model.safetensors.index.json").write_text("{}")), "must have a weight_map"),
    "a reference of another vocabulary": (lambda case: (make_model("qwen3", case.root / "other", vocab_size=140), case.set("reference.path", str(case.root / "other")), case.set("algorithm.kl", {"coef": 0.1})), "reference.path must have the policy's vocabulary: 140 != 131"),
    "a reward model with two labels": (judge(), "a reward model has one label: got 2"),
    "a reward model without a head": (judge(id2label={"0": "LABEL_0"}), "has no value head (score.weight)"),
    # --- the tokenizer
    "no tokenizer": (lambda case: (case.model / "tokenizer.json").unlink(), "no tokenizer in"),
    "a tokenizer that is not there": (setting("model.tokenizer", "words"), "model.tokenizer: no directory words, and no hub id"),
    "a tokenizer cut off": (cut("tokenizer.json", 0.5), "tokenizer.json is not a tokenizer that the tokenizers library can read"),
    "an empty tokenizer": (written("tokenizer.json", "{}"), "tokenizer.json is not a tokenizer that the tokenizers library can read"),
    "a tokenizer configuration cut off": (cut("tokenizer_config.json", 0.5), "tokenizer_config.json is not JSON"),
    "an end token that is a number": (lambda case: case.json("tokenizer_config.json", eos_token=3), "tokenizer_config.json: eos_token must be a text: got 3"),
    "no end token": (lambda case: case.json("tokenizer_config.json", eos_token=...), "neither the tokenizer nor the model has an end token"),
    "another end token for sft than for sampling": (lambda case: (case.json("generation_config.json", eos_token_id=3), offline("sft", {"prompt": "1", "response": "2"})(case)), "a model that learns it would never stop"),
    "no end token for sft": (lambda case: (case.json("config.json", eos_token_id=2), case.json("tokenizer_config.json", eos_token=...), offline("sft", {"prompt": "1", "response": "2"})(case)), "the tokenizer has no eos_token"),
    "a tokenizer larger than the model": (lambda case: (case.json("config.json", vocab_size=60), replaced("model.embed_tokens.weight", lambda tensor: tensor[:60].clone())(case), replaced("lm_head.weight", lambda tensor: tensor[:60].clone())(case)), "the model knows 60: they do not belong together"),
    "a template that is not valid": (lambda case: case.template("{% for m in messages %}"), "the chat template of"),
    "a template that raises": (lambda case: case.template("{{ raise_exception('no system') }}"), "the chat template of"),
    "a template that raises on a row": (lambda case: (case.template("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ messages[0].content }}"), case.row(prompt=[{"role": "system", "content": "1"}, USER])), "row 1: the chat template of"),
    "a template that divides by 0": (lambda case: case.template("{{ 1 / 0 }}"), "raises: division by zero"),
    "a template that is no text": (lambda case: case.json("tokenizer_config.json", chat_template=3), "chat_template must be a text: got 3"),
    "a template that reaches for Python": (lambda case: case.template("{{ messages.__class__.__mro__[1].__subclasses__() }}"), "the chat template of"),
    # --- values of the configuration
    "a learning rate of infinity": (setting("policy.optimizer.lr", math.inf), "policy.optimizer.lr must be a finite number: got inf"),
    "a learning rate of 10": (setting("policy.optimizer.lr", 10.0), "policy.optimizer.lr must be in [0, 1]: got 10.0"),
    "an eps that is NaN": (setting("policy.optimizer.eps", math.nan), "policy.optimizer.eps must be a finite number"),
    "an eps of 0": (setting("policy.optimizer.eps", 0), "policy.optimizer.eps must be in (0, 1]"),
    "a temperature of infinity": (setting("engine.sampling.temperature", math.inf), "engine.sampling.temperature must be a finite number"),
    "an entropy coefficient that is NaN": (setting("algorithm.entropy_coef", math.nan), "algorithm.entropy_coef must be a finite number"),
    "a warm-up of -3": (setting("policy.optimizer.warmup_steps", -3), "policy.optimizer.warmup_steps must be at least 0: got -3"),
    "a top-p of -5": (setting("engine.sampling.top_p", -5), "engine.sampling.top_p must be in (0, 1]: got -5"),
    "no memory for rewards": (setting("reward.memory_mb", 0), "reward.memory_mb must be in [256, 1048576]"),
    "a seed of -1": (setting("trainer.seed", -1), "trainer.seed must be in [0, 4294967295]: got -1"),
    "no updates": (setting("algorithm.updates_per_step", 0), "algorithm.updates_per_step must be above 0"),
    "a number of 400 digits": (setting("algorithm.group_size", 10**400), "algorithm.group_size must be"),
    "a rate of 400 digits": (setting("policy.optimizer.lr", 10**400), "policy.optimizer.lr must be a number, got 1000"),
    "a number of 5,000 digits": (setting("trainer.steps", 1 << 20_000), "a number of thousands of digits"),
    "a list for a layout": (setting("policy.backend", ["megatron:d1"]), "policy.backend must be text"),
    "a mapping for a path": (setting("model.path", {"a": "b"}), "model.path must be text"),
    "a list for a path": (setting("trainer.run_dir", [1]), "trainer.run_dir must be text"),
    "a mapping for data": (setting("data.train", {"a": 1}), "data.train must be a list"),
    "a text for a mapping": (setting("policy.optimizer", "adam"), "policy.optimizer must be a mapping of keys"),
    "a file for a directory": (setting("trainer.run_dir", "/dev/null"), "trainer.run_dir must be a directory that can be written: got '/dev/null'"),
    "no name for a directory": (setting("trainer.run_dir", " "), "trainer.run_dir must be a directory that can be written"),
    "a name of 5,000 letters": (setting("trainer.run_dir", "x" * 5000), "trainer.run_dir must be a directory that can be written"),
    "an empty stop text": (setting("engine.sampling.stop", [""]), "engine.sampling.stop must be texts that are not empty"),
    "an unknown GPU": (setting("launch.gpu", "h101"), "launch.gpu must be one of"),
    "full recomputation without a method": (setting("policy.megatron.transformer", {"recompute_granularity": "full"}), "needs recompute_method and recompute_num_layers, for example uniform and 1"),
    "uniform units of no layer": (setting("policy.megatron.transformer", {**UNIFORM, "recompute_num_layers": 0}), "recompute_num_layers must be at least 1: got 0"),
    "no layer with the key recompute": (setting("policy", {"recompute": "full", "megatron": {"transformer": {"recompute_num_layers": 0}}}), "recompute_num_layers must be at least 1: got 0"),
    "uniform units beyond a stage": (setting("policy.megatron.transformer", {**UNIFORM, "recompute_num_layers": 3}), "recompute_num_layers must divide the layers of each stage where uniform: got 3 for [2]"),
    "a number of layers with selective": (setting("policy.megatron.transformer", {"recompute_granularity": "selective", "recompute_num_layers": 1}), "recompute_num_layers must be left out with recompute_granularity: selective"),
    "an unknown module to recompute": (setting("policy.megatron.transformer.recompute_modules", ["x"]), "recompute_modules must be of core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts: got 'x'"),
    "saved activations that are divided twice": (setting("policy", {"backend": "megatron:t2", "megatron": {"transformer": {**UNIFORM, "recompute_num_layers": 1, "distribute_saved_activations": True}}}), "distribute_saved_activations must be false where t > 1 with sequence parallelism"),
    "rank 2^31": (setting("critic.first_rank", 2**31), "critic.first_rank must be in [0, 1048576]: got 2147483648"),
    "10^9 ranks": (setting("policy.backend", "megatron:d1000000t1000"), "a layout must have at most 1048576 ranks: got 1000000000"),
    "a bound of 10^39": (setting("algorithm.clip_high", 1e39), "algorithm.clip_high must be 0 or of a size in [1e-37, 1e+37], which float32 holds: got 1e+39"),
    "an option of 10^39": (setting("policy.megatron.transformer.moe_z_loss_coeff", 1e39), "moe_z_loss_coeff must be 0 or of a size in [1e-37, 1e+37]"),
    "a temperature of 10^-50": (setting("engine.sampling.temperature", 1e-50), "engine.sampling.temperature must be"),
    "a list for a dtype": (setting("policy.megatron.optimizer.exp_avg_dtype", ["x"]), "exp_avg_dtype must be float32 or bfloat16 or float16, got ['x']"),
    "a list for a pipeline": (setting("policy.megatron.pipeline.pipeline_model_parallel_layout", ["x"]), "pipeline_model_parallel_layout must be text or null, got ['x']"),
    "two stages on one": (setting("policy.megatron.pipeline.pipeline_model_parallel_layout", "Et|tL"), "virtual stages need a pipeline: got 2 of them with p1"),
    "too few micro-batches in a round": (setting("policy", {"backend": "megatron:p2", "megatron": {"pipeline": {"pipeline_model_parallel_layout": "Et|t||L", "microbatch_group_size_per_vp_stage": 1}}}), "microbatch_group_size_per_vp_stage must be at least p = 2: got 1"),
    "a path with NUL": (setting("trainer.run_dir", "a\0b"), "trainer.run_dir must have no character NUL: got 'a\\x00b'"),
    "a wait of a billionth of a minute": (setting("launch.timeout_minutes", 1e-9), "launch.timeout_minutes must be in [0.01, 43200]: got 1e-09"),
    "loops within loops": (lambda case: case.template("{% for a in messages * 99 %}" * 9 + "{% endfor %}" * 9), "it runs more than 200000 loops and macros for one conversation"),
    "loops that keep nothing": (lambda case: case.template("{% for a in messages * 9999 %}{% for b in messages * 9999 if false %}{% endfor %}{% endfor %}"), "it runs more than 200000 loops and macros"),
    "ranges within loops": (lambda case: case.template("{% for a in range(9999) %}{{ range(9999) | sum }}{% endfor %}"), "it runs more than 200000 loops and macros"),
    "a macro that calls itself twice": (lambda case: case.template("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"), "it runs more than 200000 loops and macros"),
    "a loop that calls itself twice": (lambda case: case.template("{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"), "it runs more than 200000 loops and macros"),
    "a text of ten gigabytes": (lambda case: case.template("{{ 'a' * 10000000000 }}"), "* makes a value that is too large"),
    "a number of a billion digits": (lambda case: case.template("{{ 9 ** 9 ** 9 }}"), "** makes a value that is too large"),
    "a time limit of 10^300": (setting("reward.timeout_seconds", 1e300), "reward.timeout_seconds must be in (0, 86400]"),
}  # fmt: skip


def test_a_good_run_can_start(case):
    assert case.errors() == []


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_refused_in_one_sentence(case, name):
    spoil, says = BAD[name]
    spoil(case)
    errors = case.errors()
    assert any(says in error for error in errors), errors
    assert all(len(error) < 600 and "\n" not in error for error in errors), errors


@pytest.mark.parametrize(
    ("key", "value", "ignored"),
    [
        ("reward.by_source", {"arithmetics": {"gsm8k": 1.0}}, "reward.by_source.arithmetics"),
        ("data.ground_truth_by_source", {"code": "tests"}, "data.ground_truth_by_source.code"),
        ("eval.temperature", 0.7, "eval.temperature"),
        ("eval.top_k", 5, "eval.top_k"),
        ("reward.code.test_seconds", 1.0, "reward.code"),
        ("reward", {"functions": {"gsm8k": 1.0}, "chosen_as": "verl"}, "reward.chosen_as"),
        ("trainer.profile", {"steps": [1], "ranks": [0, 1]}, "trainer.profile.ranks"),
        ("trainer.profile", {"steps": [3, 1]}, "trainer.profile.steps"),
        ("trainer.profile", {"ranks": []}, "trainer.profile.ranks"),
        ("policy.optimizer", {"schedule_over": "data"}, "policy.optimizer.schedule_over"),
        (
            "policy.optimizer",
            {"schedule": "linear", "decay_steps": 9, "schedule_over": "data"},
            "policy.optimizer.schedule_over",
        ),
        ("policy.megatron.transformer.recompute_num_layers", 1, "policy.megatron.transformer.recompute_num_layers"),
        ("policy.megatron.transformer.recompute_modules", ["mlp"], "policy.megatron.transformer.recompute_modules"),
        (
            "policy.megatron.optimizer.optimizer_offload_fraction",
            0.5,
            "policy.megatron.optimizer.optimizer_offload_fraction",
        ),
        ("policy.megatron.optimizer.pin_cpu_grads", False, "policy.megatron.optimizer.pin_cpu_grads"),
        (
            "policy.megatron.pipeline.microbatch_group_size_per_vp_stage",
            2,
            "policy.megatron.pipeline.microbatch_group_size_per_vp_stage",
        ),
    ],
)
def test_a_key_that_changes_nothing_here_is_reported(case, key, value, ignored):
    case.set("trainer.steps", 2)
    case.set(key, value)
    findings = check(RunConfig.of(**copy.deepcopy(case.tree)))
    assert findings.errors == [] and [name for name, _ in findings.ignored] == [ignored], findings.ignored
    if key == "reward.by_source":
        assert findings.ignored[0][1] == "no row has this data_source: did you mean 'arithmetic'?; the data has arithmetic"


PROGRAM = {"data_source": "taco", "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["1"]}'}}


@pytest.mark.parametrize(
    ("row", "sections"),
    [
        (PROGRAM, {}),
        (PROGRAM, {"reward": {"functions": {"gsm8k": 1.0}, "by_source": {"taco": {"code_fraction": 1.0}}}}),
        ({}, {"reward": {"chosen_as": "verl"}}),
        ({}, {"reward": {"by_source": {"arithmetic": {"gsm8k": 1.0}}, "chosen_as": "verl"}}),
        ({}, {"eval": {"samples": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 5}}),
    ],
)
def test_a_key_that_some_reward_or_evaluation_reads_is_not_reported(case, row, sections):
    case.rows(*[{**ROW, **row}] * 3)
    case.tree |= copy.deepcopy(sections)
    case.set("data.val", [str(case.data)])
    if row:
        case.set("reward.code", {"test_seconds": 1.0})
    findings = check(RunConfig.of(**copy.deepcopy(case.tree)))
    assert findings.errors == findings.ignored == []


@pytest.mark.parametrize("reward", [{"functions": {"gsm8k": 1.0}}, {}])
def test_limits_for_programs_without_any_are_reported_in_large_data_sets_too(case, reward):
    """Where a data_source of rows that are not looked at may choose its reward, nothing is reported."""
    case.rows(*[ROW] * 1002)
    case.set("reward", {**reward, "code": {"memory_mb": 512}})
    findings = check(RunConfig.of(**copy.deepcopy(case.tree)))
    assert findings.errors == [] and findings.ignored == [("reward.code", "no reward runs programs")] * len(reward)


def start_without_check() -> None:
    from fivefold import cli
    from fivefold.keys.findings import Findings

    cli._show_check = lambda config, quiet=False: Findings()


@pytest.mark.parametrize(
    "name",
    ["a truth that is null", "an empty prompt", "a tensor of another shape", "tensors cut off", "a tokenizer cut off"],
)
def test_ranks_that_start_unchecked_end_with_the_same_single_sentence(case, name):
    """What each rank finds for itself: no traceback, and no rank that only sees its partner go."""
    spoil, says = BAD[name]
    spoil(case)
    case.set("policy.backend", "megatron:d2")
    (case.root / "run.yaml").write_text(json.dumps(case.tree))
    done = Command("train", case.root / "run.yaml", hook=start_without_check).finish()
    assert done.returncode == 1
    wanted = {"a tokenizer cut off": "the tokenizer in", "a truth that is null": "must be a number for the reward gsm8k"}
    says = wanted.get(name, says)
    assert done.stderr.count(says) == 1 and "Traceback" not in done.stderr, done.stderr


def test_rows_are_counted_up_to_what_a_round_of_dynamic_sampling_takes(tmp_path):
    """More rows than are read one by one, and a round that takes more than a step's prompts of them."""
    from fivefold.config import RunConfig
    from fivefold.keys.findings import Findings
    from fivefold.plan.data_files import ROWS, check_data

    row = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": "2"},
    }
    for count, fits in ((ROWS + 1500, True), (ROWS + 400, False)):
        path = tmp_path / f"{count}.jsonl"
        path.write_text((json.dumps(row) + "\n") * count)
        algorithm = {"dynamic_sampling": True, "sampling_rounds": 1, "prompts_per_round": 1500}
        run = RunConfig.of(
            {"model": {"path": "m"}, "algorithm": algorithm, "data": {"train": [str(path)], "prompts_per_step": 64}}
        )
        findings = Findings()
        check_data(findings, run, None, None)
        assert any("larger than the training set" in str(error) for error in findings.errors) != fits
