"""Other systems' configurations: what becomes of each key, and whether the run is the one that was asked for."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, fields, replace
from operator import attrgetter

import jinja2
import pytest
import torch

from fivefold.algo.methods import Imitation
from fivefold.algo.objective import Objective
from fivefold.config import ConfigError, RunConfig
from fivefold.config.dialect import find_system
from fivefold.config.loader import read_mapping
from fivefold.config.mixture import counts, domains_of
from fivefold.config.validate import validate
from fivefold.reward.choose import choose_rewards
from fivefold_dialects import SYSTEMS, writer
from fivefold_dialects.known import known
from fivefold_dialects.source import Source, UnreadableError, flatten
from fivefold_dialects.system import System
from fivefold_dialects.table import Choice, Table, several, table
from fivefold_dialects.translator import known_keys
from tests.support.dialects import HOME, config, translate_words, translated

VERL = [
    "data.train_files=/d/a.parquet",
    "data.val_files=/d/b.parquet",
    "actor_rollout_ref.model.path=m",
    "actor_rollout_ref.rollout.name=vllm",
]
_ACTOR, _BY_ENGINE = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
_OF_SKYRL = "trainer.policy.megatron_config.moe_enable_routing_replay=true"
SKYRL = ["data.train_data=['/d/a.parquet']", "trainer.policy.model.path=m", "trainer.placement.policy_num_gpus_per_node=8"]
SKYRL += ["generator.inference_engine.num_engines=8", "generator.inference_engine.run_engines_locally=true"]


def tables() -> list[tuple[str, Table]]:
    return [(system, table) for system in SYSTEMS for table in find_system(system).tables]


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("system", "table"), tables())
def test_every_row_names_keys_of_ours(system, table):
    ours = known_keys()
    for section in table.sections:
        for row in section.rows:
            for key in row.ours:
                within = key.startswith(tuple(f"{name}." for name in ours))
                assert key in ours or within or any(name.startswith(f"{key}.") for name in ours), (row.key, key)


@pytest.mark.parametrize(("system", "table"), tables())
@pytest.mark.parametrize("settings", [
    {}, {"actor_rollout_ref.actor.strategy": "megatron"}, {"engine": "megatron"}, {"trainer.strategy": "megatron"},
    {"trainer.algorithm.advantage_estimator": "gae"}, {"adv_estimator": "grpo", "actor_train.device_mapping": "[0]"},
    {"algorithm.algorithm_type": "dpo", "model.max_response_tokens": 8, "model.max_model_len": 16, "mode": "train"},
])  # fmt: skip
def test_every_key_that_a_function_reads_has_a_row(system, table, settings):
    source = Source(settings, {**table.elsewhere, **table.defaults}, {})
    for function in table.derived:
        with contextlib.suppress(UnreadableError):
            function(source)
    assert [key for key in sorted(source.read) if table.row(key) is None and key not in table.elsewhere] == []
    assert [key for key in table.defaults if table.row(key) is None] == []


@pytest.mark.parametrize(("system", "table"), tables())
def test_no_row_is_hidden_by_one_before_it(system, table):
    rows = [row for section in table.sections for row in section.rows]
    exact = [row.key for row in rows if not row.is_pattern]
    assert sorted({key for key in exact if exact.count(key) > 1}) == []


# --- what becomes of a key -------------------------------------------------------------------------------------------


def outcome(translation, key):
    return next(entry for entry in translation.outcomes if entry.key == key)


def test_every_key_of_the_source_has_one_outcome():
    words = [
        *VERL,
        "trainer.balance_batch=True",
        "trainer.logger=['console','wandb','clearml']",
        "actor_rollout_ref.model.override_config.attention_dropout=0.1",
        "data.shufle=False",
    ]
    translation = translated("verl", *words)
    assert [entry.key for entry in translation.outcomes] == [word.partition("=")[0] for word in words]
    assert outcome(translation, "data.train_files").ours == ("data.train",)
    assert outcome(translation, "trainer.balance_batch").kind == "fixed"
    logger, dropout, typo = (
        outcome(translation, key)
        for key in ("trainer.logger", "actor_rollout_ref.model.override_config.attention_dropout", "data.shufle")
    )
    assert (logger.kind, logger.is_refused) == ("unsupported", False) and logger.reason.startswith("clearml: ")
    assert (dropout.kind, dropout.is_refused) == ("unsupported", True)
    assert (typo.kind, typo.reason) == ("unknown", "not a known key of verl: did you mean data.shuffle?")
    assert len(translation.refusals) == 2


def test_what_is_switched_off_is_not_refused():
    translation = translated(
        "verl", *VERL, "actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.rollout.quantization=null"
    )
    assert translation.refusals == []


def test_each_line_names_the_key_that_it_comes_from():
    translation = translated("verl", *VERL, "trainer.save_freq=7", "trainer.logger=clearml")
    text = writer.write(translation, "verl")
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["save_every"].endswith("# trainer.save_freq") and lines["group_size"].endswith("# verl's default")
    assert "#    1 not supported\n#        trainer.logger = clearml: clearml: metrics" in text
    assert _is_same_run(RunConfig.of(read_mapping(text, "what was written")), RunConfig.of(translation.tree))


def _is_same_run(written, meant):
    """All sections are equal, and what the method computes, be it written out or its own default."""
    same = {section.name: getattr(written, section.name) == getattr(meant, section.name) for section in fields(RunConfig)}
    return written.algorithm.resolved == meant.algorithm.resolved and all(same[name] for name in same if name != "algorithm")


def test_what_is_written_differs_from_our_defaults_and_begins_with_the_method():
    words = [*GRPO_VERL, "data.shuffle=True", "actor_rollout_ref.actor.clip_ratio_high=0.28", "trainer.resume_mode=auto"]
    translation = translated("verl", *words)
    written = read_mapping(writer.write(translation, "verl"), "run.yaml")
    assert next(iter(written)) == "algorithm" and next(iter(written["algorithm"])) == "name"
    assert written["algorithm"]["clip_high"] == 0.28 and "shuffle" not in written["data"]
    # GRPO's own.
    assert (
        not {"advantage", "normalize", "surrogate"} & set(written["algorithm"])
        and "advantage" in translation.tree["algorithm"]
    )
    assert _is_same_run(RunConfig.of(written), RunConfig.of(translation.tree))


def test_a_value_names_the_keys_without_which_it_would_be_another():
    def lr(source):
        return {"policy.optimizer.lr": (source.number("rate") or 0.0) * source.count("scale"), "trainer.steps": 7}

    rows = {"name": "Other", "defaults": {"scale": 1}, "sections": {"Run": {"reads": {"rate scale": None, "idle": None}}}}
    translation = System("other", (table(rows, [lr]),))({"rate": 0.5, "scale": 1, "idle": 3, "rates": 1}, [])
    assert {line.key: line.sources for line in translation.lines} == {"policy.optimizer.lr": ("rate",), "trainer.steps": ()}
    kinds = {entry.key: (entry.kind, entry.ours) for entry in translation.outcomes}
    assert kinds["rate"] == ("translated", ("policy.optimizer.lr",)) and kinds["scale"] == ("translated", ())
    assert kinds["idle"] == ("fixed", ()) and kinds["rates"] == ("unknown", ())


def test_keys_stand_in_one_text_with_brackets_and_lists():
    assert list(several("(a b).(c $more) d", {"more": "e f"})) == ["a.c", "a.e", "a.f", "b.c", "b.e", "b.f", "d"]
    assert list(several("a.(b.(c d) e)_f g")) == ["a.b.c_f", "a.b.d_f", "a.e_f", "g"]


@pytest.mark.parametrize(
    ("settings", "read", "refused"),
    [
        ({}, {"surrogate": "ppo_clip"}, []),
        ({"loss": "cispo", "low": 0.1}, {"surrogate": "cispo", "clip_low": 0.1}, []),
        ({"loss": "cispo", "low": 0.1, "mask": True}, {"surrogate": "cispo", "clip_low": 0.1}, ["mask"]),
        ({"loss": "other"}, {}, ["loss"]),
        ({"loss": "sapo", "args.high": 2, "args.low": 1, "args.idle": None}, {"clip_high": 2}, ["args.low"]),
    ],
)
def test_a_choice_is_read_by_its_name_and_refuses_what_it_needs_otherwise(settings, read, refused):
    names = {
        "ppo": {"surrogate": "ppo_clip"},
        "cispo": {"surrogate": "cispo", "clip_low": "$low", "needs": {"a mask": ["mask", False]}},
        "sapo": {"clip_high": "$high", "takes": "high"},
    }
    source = Source(settings, {}, {})
    arguments = "args" if settings.get("loss") == "sapo" else ""
    assert Choice("loss", "loss", names, "ppo", arguments).read(source) == read
    assert [entry.key for entry in source.outcomes] == refused


def test_trackers_project_and_name_are_those_that_the_other_system_would_have():
    """Only where the run asks for them: a default asks no one for an account, and no key is written down."""
    named = ["trainer.project_name=sums", "trainer.experiment_name=first"]
    tree = translated("verl", *VERL, "trainer.logger=['console','wandb','swanlab']", *named).tree
    assert tree["trainer"]["loggers"] == ["console", "wandb", "swanlab"]
    assert tree["tracking"] == {"project": "sums", "name": "first"}
    for words in ([], ["trainer.logger=['console','tensorboard']"]):
        tree = translated("verl", *VERL, *words, *named).tree
        assert set(tree["trainer"]["loggers"]) <= {"console", "tensorboard"} and "tracking" not in tree
    words = ["trainer.logger=wandb", "trainer.project_name=sums", "trainer.run_name=first", "trainer.tags=[a,b]"]
    tree = translated("skyrl", *words).tree
    assert tree["trainer"]["loggers"] == ["wandb"]
    assert tree["tracking"] == {"project": "sums", "name": "first", "tags": ["a", "b"]}
    kwargs = {"project": "sums", "tags": ["a"], "api_key": "0123456789abcdef", "log_dir": "/x"}
    translation = translated("roll", tree=json.dumps({"track_with": "wandb", "exp_name": "first", "tracker_kwargs": kwargs}))
    assert translation.tree["tracking"] == {"project": "sums", "name": "first", "tags": ["a"]}
    assert "0123456789abcdef" not in writer.write(translation, "roll") + str(writer.notes(translation))
    monitor = {"project": "sums", "name": "first", "group": "g", "monitor": {"monitor_type": "mlflow"}}
    tree = translated("trinity", tree=json.dumps(monitor)).tree
    assert tree["trainer"]["loggers"] == ["console", "mlflow"]
    assert tree["tracking"] == {"project": "sums", "name": "first", "group": "g"}
    experiment = {"experiment_name": "sums", "trial_name": "first"}
    tree = translated("areal", tree=json.dumps(experiment | {"stats_logger": {"wandb": {"mode": "offline"}}})).tree
    assert tree["trainer"]["loggers"] == ["console", "wandb"]
    assert tree["tracking"] == {"project": "sums", "name": "first", "offline": True}
    tree = translated("areal", tree=json.dumps(experiment | {"stats_logger": {"wandb": {"mode": "disabled"}}})).tree
    assert tree["trainer"]["loggers"] == ["console"] and "tracking" not in tree


def test_interpolations_are_resolved_as_omegaconf_documents_them():
    """A key, one dot for a sibling, two for the section above; oc.select with a default; oc.env."""
    tree = "a: 3\nb: {c: '${a}', d: '${.c}', e: '${..a}-${.c}', f: '${oc.select:no.such,9}', g: '${oc.select:b.c,9}', h: '${oc.env:HOME}'}"
    source = Source(dict(flatten(read_mapping(tree, "t"))), {}, HOME)
    values = {key: source.value(f"b.{key}") for key in "cdefgh"}
    assert values == {"c": 3, "d": 3, "e": "3-3", "f": 9, "g": 3, "h": "/home/me"}


def test_a_variable_that_stands_open_is_asked_for():
    translation = translated(
        "verl", *VERL, "trainer.nnodes=${NODES}", "trainer.project_name=${NAME}", "trainer.default_local_dir=/c"
    )
    assert translation.refusals == [
        "trainer.nnodes needs ${NODES}, which has no known value: pass it with --env NODES=value"
    ]


@pytest.mark.parametrize(("word", "says"), [
    ("trainer.nnodes=two", "trainer.nnodes must be a number: got 'two'"),
    ("actor_rollout_ref.actor.use_kl_loss=perhaps", "must be true or false: got 'perhaps'"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=2000", "must be in 1 to data.train_batch_size = 1024"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=3", "8 GPUs cannot be divided into replicas of t1·p1·c3 = 3"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "8 GPUs cannot be divided into engines of 3"),
])  # fmt: skip
def test_a_value_that_cannot_be_used_is_a_sentence(word, says):
    (fault,) = translated("verl", *VERL, word).refusals
    assert says in fault


def test_a_device_mapping_is_parsed_and_never_evaluated():
    from fivefold_dialects.roll_placement import devices

    for text, count in (
        ("list(range(0,16))", 16),
        ("list(range(8))", 8),
        ("list(range(0,4)) + list(range(8,16))", 12),
        ("[0, 3]", 2),
    ):
        assert devices(Source({"m": text}, {}, {}), "m") == eval(text) and len(eval(text)) == count
    with pytest.raises(UnreadableError, match=r"must be a sum of list\(range"):
        devices(Source({"m": "__import__('os').listdir()"}, {}, {}), "m")


@pytest.mark.parametrize(("text", "layout"), [
    ("sglang:d4t2+megatron:d2p2t2", "megatron:d2t2p2"), ("sglang.d4p1m1+d4p2m1", "megatron:d4t1p2"), ("sglang:d8+eval", None),
    ("vllm:d2+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", "megatron:d1t2p4c2e4"), ("sglang:d4p1t1+d4p1t1", "fsdp:d4t1"),
])  # fmt: skip
def test_allocation_modes_of_every_age_are_read(text, layout):
    translation = translated("areal", f"allocation_mode={text}", "actor.path=m", "train_dataset.path=d")
    assert layout is None or next(line.value for line in translation.lines if line.key == "policy.backend") == layout


# --- the run that was asked for --------------------------------------------------------------------------------------


@dataclass
class Asked:
    """What a run of the other system computes, stated by hand."""

    prompts: int
    samples: int
    updates: int
    tokens: int
    """Of a micro-batch of one replica."""
    rate: float
    """Learning rate in step 10 of 100, of its last update."""
    kl: tuple[str, str, float] | None
    clip: tuple[float | None, float | None, float | None]
    """Below, above, and of the second bound."""
    aggregate: str
    layout: str = "fsdp:d8t1"
    sampler: str | None = "vllm:d8t1"


def summary(config: RunConfig) -> Asked:
    chosen = config.algorithm.resolved
    return Asked(
        prompts=config.data.prompts_per_step,
        samples=config.samples_per_step,
        updates=config.algorithm.updates,
        tokens=config.policy.tokens_per_micro_batch,
        rate=rate(config, 10, 100),
        kl=(str(chosen.kl.place), str(chosen.kl.estimator), float(chosen.kl.coef or 0)) if chosen.kl.coef else None,
        clip=(chosen.clip_low, chosen.clip_high, chosen.dual_clip),
        aggregate=str(chosen.aggregate),
        layout=config.policy.backend,
        sampler=None if config.algorithm.offline else config.engine.backend,
    )


def rate(config: RunConfig, step: int, steps: int) -> float:
    """The learning rate of a step's last update, as the optimizer is given it."""
    import torch

    from fivefold.backend.schedule import Schedule

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    updates = config.algorithm.updates
    schedule = Schedule(adam, config.policy.optimizer, steps * updates, updates)
    schedule.step(step * updates)
    return float(adam.param_groups[0]["lr"])


GSM8K_ROLL = """
pretrain: m
max_steps: 100
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 512
response_length: 1536
adv_estimator: grpo
dual_clip_loss: true
use_kl_loss: true
kl_loss_coef: 0.01
rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 8, warmup_steps: 20}
  data_args: {file_name: [d.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}
  device_mapping: list(range(0,8))
actor_infer:
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.6}}
  num_gpus_per_worker: 2
"""
DPO_ROLL = """
pretrain: m
max_steps: 100
sequence_length: 512
beta: 0.2
prompt_key: instruction
chosen_key: chosen
rejected_key: rejected
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 8, lr_scheduler_type: constant}
  data_args: {file_name: d.jsonl}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
"""
GSM8K_AREAL = """
experiment_name: gsm8k-grpo
trial_name: trial0
total_train_epochs: 10
tokenizer_path: m
rollout: {backend: "sglang:d4t1", max_head_offpolicyness: 0}
gconfig: {n_samples: 4, max_new_tokens: 1024, temperature: 1.0}
actor:
  backend: "fsdp:d4"
  path: m
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer: {type: adam, lr: 1.7e-5, weight_decay: 0.017, lr_scheduler_type: constant, warmup_steps_proportion: 0.2}
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  recompute_logprob: true
  reward_norm: {mean_level: group, std_level: group, group_size: 4}
train_dataset: {path: d.parquet, type: rl, batch_size: 256, max_length: 1024}
"""
AREAL_PPO = (
    GSM8K_AREAL.replace("fsdp:d4", "megatron:d2t2").replace("kl_ctl: 0.0", "c_clip: 3.0").replace("eps_clip: 0.4", "eps_clip: 0.2\n  eps_clip_higher: 0.28")
    + "ref: {path: m}\ncritic: {path: c, ppo_n_minibatches: 2}\n"
)  # fmt: skip
SFT_SKYRL = [
    "-m=skyrl.train.main_sft", "strategy=megatron", "model.path=m", "train_datasets=['allenai/tulu']", "train_dataset_splits=['train[:50000]']",
    "eval_datasets=['allenai/tulu']", "eval_dataset_splits=['train[-500:]']", "max_length=4096", "num_steps=4166", "batch_size=24",
    "micro_train_batch_size_per_gpu=6", "placement.num_gpus_per_node=4", "megatron_config.tensor_model_parallel_size=1",
    "megatron_config.pipeline_model_parallel_size=1", "optimizer_config.lr=1e-6", "train_on_what=all_assistant_messages",
    "ckpt_path=/ckpts", "resume_from=", "logger=console",
]  # fmt: skip
AREAL_SYNC = """
experiment_name: ppo
trial_name: first
mode: ray
recover_mode: auto
allocation_mode: sglang.d4p1m1+d2p2m1
exp_ctrl: {total_train_epochs: 5, save_freq_steps: 20}
actor:
  type: {_class: qwen2}
  path: m
  optimizer: {lr: 2.0e-05, lr_scheduler_type: constant, eps: 1.0e-05, warmup_steps_proportion: 0.2}
  sglang: {mem_fraction_static: 0.8}
ref: {type: {_class: qwen2}, path: m}
actor_train: {mb_spec: {max_tokens_per_mb: 30720}}
dataset: {path: d.jsonl, max_prompt_len: 1024, train_bs_n_seqs: 512}
ppo:
  gen: {max_new_tokens: 27648, top_p: 1.0, top_k: 1000000}
  ppo_n_minibatches: 4
  kl_ctl: 0.0
  disable_value: true
  reward_output_scaling: 5
  adv_norm: true
group_size: 16
group_adv_norm: false
cluster: {fileroot: /runs}
"""
"""Of AReaL before 2025-08."""
AREAL_ASYNC = (
    AREAL_SYNC.replace("ppo_n_minibatches: 4", "ppo_n_minibatches: 1\n  recompute_logprob: true\n  use_decoupled_loss: true\n  behav_imp_weight_cap: 5.0")
    + "max_head_offpolicyness: 16\nsuccess_rate_lb: 0.05\nsuccess_rate_ub: 0.95\n"
)  # fmt: skip
PPO_ROLL = (
    GSM8K_ROLL.replace("adv_estimator: grpo", "adv_estimator: gae\nadd_token_level_kl: true").replace("use_kl_loss: true\nkl_loss_coef: 0.01\n", "")
    .replace("dual_clip_loss: true\n", "").replace("warmup_steps: 20", "lr_scheduler_type: constant")
)  # fmt: skip
GSM8K_TRINITY = """
mode: both
algorithm: {algorithm_type: grpo, repeat_times: 8, optimizer: {lr: 1.0e-5, lr_warmup_steps: 20}}
model: {model_path: m, max_response_tokens: 1024, max_model_len: 2048}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 96
  explorer_input:
    taskset: {path: d.parquet, format: {prompt_key: question, response_key: answer}, rollout_args: {temperature: 1.0}}
    default_workflow_type: math_workflow
explorer: {rollout_model: {engine_num: 4, tensor_parallel_size: 1}}
synchronizer: {sync_interval: 1}
trainer:
  max_token_len_per_gpu: 16384
"""
PPO_TRINITY = (
    GSM8K_TRINITY.replace("algorithm_type: grpo, repeat_times: 8", "algorithm_type: ppo, repeat_times: 4")
    + """  trainer_config: {actor_rollout_ref: {actor: {strategy: megatron, megatron: {tensor_model_parallel_size: 2, override_transformer_config: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}}}}}
"""
)

DPO_TRINITY = """
mode: train
algorithm: {algorithm_type: dpo, optimizer: {lr: 1.0e-5, lr_warmup_steps: 20}, kl_loss_fn: k1, kl_loss_fn_args: {kl_coef: 0.1}}
model: {model_path: m, max_response_tokens: 1024, max_model_len: 2048}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 64
  trainer_input: {experience_buffer: {path: d.parquet, format: {prompt_key: prompt, chosen_key: chosen, rejected_key: rejected}}}
trainer: {max_token_len_per_gpu: 16384}
"""

GRPO_VERL = [
    *VERL, "algorithm.adv_estimator=grpo", "data.train_batch_size=256", "data.max_prompt_length=512", "data.max_response_length=1536",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64", "actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.logger=console",
]  # fmt: skip

# Between two syncs 4 x 2 mini-batches of 64 prompts, half of which may be given out ahead.
FULLY_ASYNC = [
    *GRPO_VERL, "-m=verl.experimental.fully_async_policy.fully_async_main", "data.train_batch_size=0", "data.gen_batch_size=1",
    "trainer.n_gpus_per_node=6", "rollout.nnodes=1", "rollout.n_gpus_per_node=2", "rollout.total_rollout_steps=51200",
    "async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=4", "async_training.require_batches=2",
    "async_training.partial_rollout=True", "actor_rollout_ref.actor.optim.lr_warmup_steps=60",
]  # fmt: skip

# Updates of 64 prompts each, four of them between two syncs.
SEPARATE = [
    *GRPO_VERL, "trainer.use_v1=True", "trainer.v1.trainer_mode=separate_async", "trainer.n_gpus_per_node=6",
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "trainer.v1.separate_async.parameter_sync_step=4", "trainer.v1.separate_async.num_warmup_batches=2",
]  # fmt: skip
SFT_VERL = [
    "model.path=m",
    "data.train_files=d.parquet",
    "data.train_batch_size=64",
    "optim.lr=1e-5",
    "trainer.logger=console",
]
ASKED_MODEL = [
    *GRPO_VERL, "reward.reward_model.enable=True", "reward.reward_model.model_path=j", "custom_reward_function.path=f.py",
    "reward.reward_model.enable_resource_pool=True", "reward.reward_model.nnodes=2", "reward.reward_model.n_gpus_per_node=8",
    "reward.reward_model.rollout.gpu_memory_utilization=0.95",
]  # fmt: skip
OVERLONG = ["reward_model.reward_manager=dapo"] + [
    f"reward_model.reward_kwargs.overlong_buffer_cfg.{key}" for key in ("enable=True", "len=512", "penalty_factor=1.0")
]

ASKED: dict[str, tuple[RunConfig | list, Asked]] = {
    # The rate moves once in two updates: the last of step 10 is in the 40th of the trainer's batches, with 39/60.
    "verl fully asynchronous": (
        ["verl", *FULLY_ASYNC],
        Asked(512, 2560, 8, 2048, 0.65e-6, None, (0.2, 0.2, 3.0), "token-mean", "fsdp:d6t1", "vllm:d2t1"),
    ),
    # Warm-up over 20 steps from rate 0: step 10 has 9/20. Token budget 20000 on each of 2 ranks that share a sequence.
    "verl grpo on fsdp": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000",
         "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "actor_rollout_ref.actor.optim.lr_warmup_steps=20",
         "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"],
        Asked(256, 1280, 4, 40000, 0.45e-6, ("loss", "k3", 0.01), (0.2, 0.2, 3.0), "token-mean", "fsdp:d4t1c2"),
    ),
    # No KL unless asked for; micro-batches of 4 sequences of 2048; ppo_epochs doubles the updates.
    "verl ppo on megatron": (
        ["verl", "--config-name=ppo_megatron_trainer.yaml", *GRPO_VERL, "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "critic.model.path=c",
         "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.ppo_epochs=2", "trainer.critic_warmup=5"],
        Asked(256, 256, 8, 8192, 1e-6, None, (0.2, 0.2, 3.0), "token-mean", "megatron:d2t2p2"),
    ),
    "verl dapo": (
        ["verl", "-m=recipe.dapo.main_dapo", *GRPO_VERL, "data.gen_batch_size=768", "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc",
         "algorithm.filter_groups.max_num_gen_batches=10", "actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio_c=10.0",
         "reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=512",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        Asked(256, 1280, 4, 2048, 1e-6, None, (0.2, 0.28, 10.0), "token-mean"),
    ),
    # GSPO takes the mean over sequences whatever loss_agg_mode says; its KL goes by loss_agg_mode.
    "verl gspo": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "actor_rollout_ref.actor.clip_ratio_low=3e-4", "actor_rollout_ref.actor.clip_ratio_high=4e-4",
         "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"],
        Asked(256, 1280, 4, 4096, 1e-6, ("loss", "k3", 0.001), (3e-4, 4e-4, None), "seq-mean-token-mean"),
    ),
    # With Megatron grad_clip is not read; KL in the reward is k1 with 0.001.
    "verl rloo with kl in the reward": (
        ["verl", *GRPO_VERL, "algorithm.adv_estimator=rloo", "algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
         "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "trainer.total_training_steps=100", "actor_rollout_ref.actor.optim.min_lr_ratio=1.0"],
        Asked(256, 1280, 4, 2048, 1e-6, ("reward", "k1", 0.001), (0.2, 0.2, 3.0), "token-mean"),
    ),
    # A warm-up of a tenth of the steps is over in step 11.
    "verl sft": (
        ["verl", "model.path=m", "data.train_files=d.parquet", "data.train_batch_size=64", "data.max_length=2048", "data.max_token_len_per_gpu=8192", "optim.lr=1e-5",
         "optim.lr_warmup_steps_ratio=0.1", "optim.lr_scheduler_type=constant", "engine=megatron", "engine.tensor_model_parallel_size=2", "trainer.logger=console"],
        Asked(64, 64, 1, 8192, 0.9e-5, None, (None, None, None), "token-mean", "megatron:d4t2p1", None),
    ),
    # The page's script: 8 sequences of 3072, eight updates, a schedule that siiRL never steps.
    "siirl grpo on megatron": (
        ["siirl", *[word for word in GRPO_VERL if "train_batch" not in word], "data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=16",
         "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "data.max_prompt_length=1024", "data.max_response_length=2048",
         "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
         "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4"],
        Asked(128, 1024, 8, 24576, 1e-6, None, (0.2, 0.2, 3.0), "token-mean", "megatron:d1t2p4"),
    ),
    # Returns from each token on, whitened; a weight of 2 at most for what the engine sampled otherwise.
    "verl reinforce++ with truncated weights": (
        ["verl", *GRPO_VERL, "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.rollout_correction.rollout_is=token",
         "algorithm.rollout_correction.rollout_is_threshold=2.0", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        Asked(256, 1280, 4, 2048, 1e-6, None, (0.2, 0.2, 3.0), "token-mean"),
    ),
    "verl sapo": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        Asked(256, 1280, 4, 2048, 1e-6, None, (None, None, None), "seq-mean-token-mean"),
    ),
    # A clip_ratio_low of 10 bounds nothing below, as CISPO has it.
    "verl cispo": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "actor_rollout_ref.actor.clip_ratio_low=10",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        Asked(256, 1280, 4, 2048, 1e-6, None, (1.0, 0.2, None), "token-mean"),
    ),
    "verl clip_cov": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "actor_rollout_ref.actor.clip_ratio_high=1", "actor_rollout_ref.actor.clip_ratio_low=1",
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"],
        Asked(256, 1280, 4, 2048, 1e-6, None, (1.0, 1.0, None), "token-mean"),
    ),
    # Four nodes of the page's own multiples: prompts and mini-batch are per node there, so updates stay eight.
    "siirl ppo on fsdp": (
        ["siirl", *[word for word in GRPO_VERL if "adv_estimator" not in word], "trainer.nnodes=4", "critic.model.path=c", "critic.ppo_mini_batch_size=64",
         "actor_rollout_ref.actor.grad_clip=0.5"],
        Asked(256, 1280, 4, 2048, 1e-6, None, (0.2, 0.2, 3.0), "token-mean", "fsdp:d32t1", "vllm:d32t1"),
    ),
    "skyrl ppo": (
        ["skyrl", *SKYRL, "trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=c", "trainer.algorithm.use_kl_loss=false",
         "trainer.algorithm.use_kl_in_reward=true", "generator.n_samples_per_prompt=2", "trainer.logger=console", "trainer.algorithm.loss_reduction=sequence_mean"],
        Asked(1024, 2048, 4, 1536, 1e-6, ("reward", "k3", 0.001), (0.2, 0.2, None), "seq-mean-token-mean"),
    ),
    # KL is on, a mean over sequences; the ratio is bounded once; warm-up counts updates, of which step 10 ends with the 40th.
    "skyrl grpo": (
        ["skyrl", *SKYRL, "trainer.train_batch_size=1024", "trainer.policy_mini_batch_size=256", "generator.n_samples_per_prompt=5", "trainer.micro_train_batch_size_per_gpu=4",
         "trainer.policy.optimizer_config.num_warmup_steps=160", "trainer.max_prompt_length=512", "generator.sampling_params.max_generate_length=1024", "trainer.logger=console"],
        Asked(1024, 5120, 4, 6144, 39 / 160 * 1e-6, ("loss", "k3", 0.001), (0.2, 0.2, None), "token-mean"),
    ),
    "skyrl dapo on megatron": (
        ["skyrl", "-m=examples.train.algorithms.dapo.main_dapo", *SKYRL, "trainer.strategy=megatron", "trainer.policy.megatron_config.tensor_model_parallel_size=4",
         "trainer.train_batch_size=512", "trainer.policy_mini_batch_size=32", "generator.n_samples_per_prompt=16", "trainer.algorithm.policy_loss_type=dual_clip",
         "trainer.algorithm.eps_clip_high=0.28", "trainer.algorithm.clip_ratio_c=10.0", "trainer.algorithm.use_kl_loss=false", "trainer.algorithm.dynamic_sampling.type=filter",
         "trainer.algorithm.overlong_buffer_len=256", "environment.env_class=aime", "trainer.logger=console"],
        Asked(512, 8192, 16, 1536, 1e-6, None, (0.2, 0.28, 10.0), "token-mean", "megatron:d2t4p1"),
    ),
    # Warm-up is a fifth of the run, in steps from rate 0: step 10 of 100 has 9/20.
    "areal grpo": (["areal", GSM8K_AREAL], Asked(256, 1024, 2, 10240, 0.45 * 1.7e-5, None, (0.4, 0.4, None), "token-mean", "fsdp:d4t1", "sglang:d4t1")),
    # KL in the reward against a reference, 0.1 when nothing is said; the critic learns in the same updates.
    "areal ppo": (
        ["areal", AREAL_PPO],
        Asked(256, 1024, 2, 10240, 0.45 * 1.7e-5, ("reward", "k1", 0.1), (0.2, 0.28, 3.0), "token-mean", "megatron:d2t2p1", "sglang:d4t1"),
    ),
    # 2 x 8 samples on each of 4 replicas are an update of 64, of 512: eight. Linear decay over 800 updates after 20 of warm-up.
    "roll grpo": (
        ["roll", GSM8K_ROLL],
        Asked(64, 512, 8, 4096, (800 - 79) / (800 - 20) * 1e-6, ("loss", "k3", 0.01), (0.2, 0.2, 1.4), "seq-mean-token-mean", "megatron:d4t2p1", "vllm:d4t2"),
    ),
    "roll dpo": (["roll", DPO_ROLL], Asked(32, 64, 1, 2048, 1e-6, None, (None, None, None), "seq-mean-token-mean", "megatron:d4t2p1", None)),
    # A value of each token with lambda 0.95, KL in the reward only where it is added; the rate stays constant where it is said.
    "roll ppo": (
        ["roll", PPO_ROLL],
        Asked(64, 512, 8, 4096, 1e-6, ("reward", "k1", 0.2), (0.2, 0.2, None), "seq-mean-token-mean", "megatron:d4t2p1", "vllm:d4t2"),
    ),
    # All GPUs train; pairs, which the whole batch weighs alike.
    "trinity dpo": (
        ["trinity", DPO_TRINITY],
        Asked(64, 128, 1, 16384, 0.45e-5, None, (None, None, None), "seq-mean-token-mean", "fsdp:d8t1", None),
    ),
    # Four of eight GPUs train; k2 with 0.001 in the loss, and two bounds of the ratio, when nothing is said.
    "trinity grpo": (
        ["trinity", GSM8K_TRINITY],
        Asked(96, 768, 1, 16384, 0.45e-5, ("loss", "k2", 0.001), (0.2, 0.2, 3.0), "token-mean", "fsdp:d4t1", "vllm:d4t1"),
    ),
    "trinity ppo on megatron": (
        ["trinity", PPO_TRINITY],
        # The warm-up rises from 0.01 of the rate: 0.05e-6 + 0.9 of the rest.
        Asked(96, 384, 1, 16384, 0.4555e-5, ("loss", "k2", 0.001), (0.2, 0.2, 3.0), "token-mean", "megatron:d2t2p1", "vllm:d4t1"),
    ),
}  # fmt: skip


def of_type(kind: str, arguments: str = "") -> str:
    """Trinity's GRPO run as one of another algorithm."""
    return GSM8K_TRINITY.replace("algorithm_type: grpo", ", ".join(filter(None, (f"algorithm_type: {kind}", arguments))))


def pg_variant(name: str) -> str:
    """ROLL's GRPO run with the worker that has other losses."""
    lines = f"  worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker\n  pg_variant: {name}\n"
    return GSM8K_ROLL.replace("actor_train:\n", "actor_train:\n" + lines.replace(", ", "\n  "))


_REINFORCE = {"credit": "response", "whiten": False, "aggregate": "token-mean"}
CHOSEN: dict[str, tuple[list[str], dict[str, object]]] = {
    "rllm": (
        ["verl", *GRPO_VERL, "algorithm.mask_truncated_samples=True", "algorithm.clip_advantages=True", "actor_rollout_ref.rollout.compute_reward=True"],
        {"advantage": "group", "overlong_zero": True, "overlong_filter": False, "advantage_clip": 1.0},
    ),
    "verl sppo": (
        ["verl", *GRPO_VERL, "-m=recipe.sppo.main_sppo", "algorithm.adv_estimator=null", "algorithm.sppo_eta=2.0", "actor_rollout_ref.actor.sppo_eta=3.0"],
        {"advantage": "step_log_mean_exp", "baseline_temperature": 0.5, "surrogate": "sppo", "eta": 3.0, "aggregate": "seq-mean-token-mean", "credit": "response"},
    ),
    "rllm loop": (["verl", *GRPO_VERL, "algorithm.adv_estimator=loop"], {"advantage": "leave_one_out", "normalize": "none", "surrogate": "ppo_clip"}),
    # Returns are not discounted there, whatever gamma says.
    "verl otb": (
        ["verl", *GRPO_VERL, "algorithm.adv_estimator=optimal_token_baseline", "algorithm.gamma=0.9"],
        {"advantage": "reward", "credit": "discounted", "gamma": 1.0, "token_baseline": True, "whiten": False, "surrogate": "ppo_clip"},
    ),
    # core_algos.py: (r - mean) · samples / samples whose reward is not 0, and the clipped ratio, as loss_mode is vanilla.
    "verl gpg": (["verl", *GRPO_VERL, "algorithm.adv_estimator=gpg"], {"advantage": "nonzero_scaled", "surrogate": "ppo_clip", "dual_clip": 3.0}),
    "verl gpg's loss": (
        ["verl", *GRPO_VERL, "algorithm.adv_estimator=gpg", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"],
        {"advantage": "nonzero_scaled", "surrogate": "log_likelihood", "clip_low": None},
    ),
    # The bounds are those of the divergence, clip_ratio_c that of the weight.
    "verl dppo": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl", "actor_rollout_ref.actor.clip_ratio_low=0.05",
         "actor_rollout_ref.actor.clip_ratio_high=0.06", "actor_rollout_ref.actor.clip_ratio_c=20"],
        {"surrogate": "dppo", "divergence": "kl", "clip_low": 0.05, "clip_high": 0.06, "ratio_cap": 20.0},
    ),
    # verl rejects where -log(trainer / engine) is outside of log 0.6 and log 1.6: 1/1.6 and 1/0.6 of trainer / engine.
    "verl rejection by two statistics": (
        ["verl", *GRPO_VERL, "algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.rollout_is=token",
         "algorithm.rollout_correction.rollout_rs='token_k1,seq_max_k2'", "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0,2.5'"],
        {"rollout_correction.old_logprobs_from": "engine", "rollout_correction.weight": "none", "rollout_correction.reject": "token",
         "rollout_correction.reject_low": 0.5, "rollout_correction.reject_high": 2.0, "rollout_correction.reject_divergence": {"max_k2": 2.5}},
    ),
    "verl weights between two bounds": (
        ["verl", *GRPO_VERL, "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0"],
        {"rollout_correction.weight": "token", "rollout_correction.low": 0.5, "rollout_correction.high": 4.0, "rollout_correction.outside": "mask"},
    ),
    # min(ratio, 3) A log pi with the engine's log-probs below the ratio.
    "verl reinforce with the engine's ratio": (
        ["verl", *GRPO_VERL, "algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.loss_type=reinforce",
         "algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=3.0"],
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 2.0, "rollout_correction.old_logprobs_from": "engine", "dual_clip": None},
    ),
    "verl reinforce": (
        ["verl", *GRPO_VERL, "algorithm.rollout_correction.bypass_mode=true", "algorithm.rollout_correction.loss_type=reinforce"],
        {"surrogate": "log_likelihood", "rollout_correction.old_logprobs_from": "trainer"},
    ),
    "skyrl maxrl": (["skyrl", *SKYRL, "trainer.algorithm.advantage_estimator=maxrl"], {"advantage": "group", "normalize": "mean", "surrogate": "ppo_clip"}),
    # 0 outside of 1 - 0.1 and 1 + 0.3, and below the ratio the engine.
    "skyrl rollout_is": (
        ["skyrl", *SKYRL, "trainer.algorithm.policy_loss_type=rollout_is", "trainer.algorithm.eps_clip_low=0.1", "trainer.algorithm.eps_clip_high=0.3"],
        {"surrogate": "rec", "clip_mode": "two_sided", "token_weight": "ratio", "clip_low": 0.1, "clip_high": 0.3, "proximal_coef": 0.0,
         "rollout_correction.old_logprobs_from": "engine"},
    ),
    "skyrl dppo": (
        ["skyrl", *SKYRL, "trainer.algorithm.policy_loss_type=dppo"],
        {"surrogate": "dppo", "divergence": "tv", "clip_low": 0.2, "clip_high": 0.2, "ratio_cap": None, "rollout_correction.old_logprobs_from": "engine"},
    ),
    "areal m2po": (
        ["areal", GSM8K_AREAL.replace("recompute_logprob: true", "use_decoupled_loss: true\n  m2_threshold: 0.04\n  rejection_sampling: {metric: ratio, upper: 5.0}")],
        {"rollout_correction.reject_divergence": {"second_moment": 0.04}, "rollout_correction.weight": "token", "rollout_correction.high": 5.0,
         "rollout_correction.outside": "mask", "rollout_correction.old_logprobs_from": "trainer"},
    ),
    # Without a decoupled loss both log-probs are the same there, and nothing is left out.
    "areal m2po without decoupled loss": (
        ["areal", GSM8K_AREAL.replace("recompute_logprob: true", "recompute_logprob: true\n  m2_threshold: 0.04")], {"rollout_correction.reject_divergence": {}},
    ),
    "areal estimated old policy": (
        ["areal", GSM8K_AREAL.replace("recompute_logprob: true", "use_decoupled_loss: true\n  prox_logp_method: loglinear\n  rejection_sampling: {metric: ratio, upper: 5.0}")],
        {"rollout_correction.old_logprobs_from": "loglinear", "rollout_correction.weight": "token", "rollout_correction.high": 5.0,
         "rollout_correction.outside": "mask"},
    ),
    # Without values a token's advantage is the return from it on: of the penalties too.
    "areal kl in the reward": (
        ["areal", GSM8K_AREAL.replace("kl_ctl: 0.0", "kl_ctl: 0.1") + "ref: {path: m}\n"],
        {"credit": "discounted", "gamma": 1.0, "kl.place": "reward", "kl.estimator": "k1", "kl.coef": 0.1},
    ),
    "areal advantages normalized in each group": (
        ["areal", GSM8K_AREAL.replace("reward_norm: {mean", "adv_norm: {mean")],
        {"advantage": "reward", "normalize": "none", "whiten": True, "whiten_by": "group"},
    ),
    "areal shown estimates": (
        ["areal", GSM8K_AREAL.replace("recompute_logprob: true", "use_decoupled_loss: true\n  prox_logp_method: metrics")],
        {"rollout_correction.old_logprobs_from": "trainer", "rollout_correction.weight": "none"},
    ),
    "roll difficulty": (["roll", GSM8K_ROLL + "difficulty_mask: true\ndifficulty_high_threshold: 0.9\n"], {"difficulty_low": 0.0, "difficulty_high": 0.9}),
    "roll vanilla": (["roll", pg_variant("vanilla")], {"surrogate": "log_likelihood", "clip_low": None, "dual_clip": None, "advantage": "group"}),
    "roll tis": (["roll", pg_variant("tis, tis_upper_bound: 1.5")], {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.5}),
    "roll topr": (["roll", pg_variant("topr")], {"surrogate": "topr", "clip_low": None, "dual_clip": None}),
    "roll cispo": (["roll", pg_variant("cispo")], {"surrogate": "cispo", "clip_low": 0.1, "clip_high": 0.1}),
    # -A log π + τ/2 (log ρ)², and nothing is left out.
    "roll kimi": (["roll", pg_variant("kimi15")], {"surrogate": "rec", "clip_mode": "none", "token_weight": "none", "proximal_coef": 0.05}),
    "roll ppo of that worker": (["roll", pg_variant("ppo")], {"surrogate": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.4}),
    # Both of them with 0.001: k3 off the reward, k2 in the loss.
    "trinity two penalties": (
        ["trinity", of_type("ppo", "kl_penalty_fn: k3")],
        {"kl.place": "loss", "kl.estimator": "k2", "kl.coef": 0.001, "kl.reward_coef": 0.001, "kl.reward_estimator": "k3"},
    ),
    "verl two penalties": (
        ["verl", *GRPO_VERL, "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.02", "algorithm.use_kl_in_reward=True"],
        {"kl.place": "loss", "kl.estimator": "k3", "kl.coef": 0.02, "kl.reward_coef": 0.001, "kl.reward_estimator": "k1"},
    ),
    # Without arguments: τ 1, the mean of the group, k2 with 0.001.
    "trinity opmd": (
        ["trinity", of_type("opmd")], {**_REINFORCE, "advantage": "group", "normalize": "none", "surrogate": "opmd", "tau": 1.0, "kl.estimator": "k2", "kl.coef": 0.001},
    ),
    "trinity opmd with the exact baseline": (
        ["trinity", of_type("opmd", "advantage_fn_args: {opmd_baseline: logavgexp, tau: 0.5}, policy_loss_fn_args: {tau: 0.5}")],
        {**_REINFORCE, "advantage": "log_mean_exp", "baseline_temperature": 0.5, "tau": 0.5},
    ),
    # No KL and no entropy of its own, whatever the entropy's coefficient.
    "trinity asymre": (
        ["trinity", of_type("asymre", "policy_loss_fn_args: {tau: 0}, entropy_loss_fn_args: {entropy_coef: 0.1}")],
        {**_REINFORCE, "advantage": "group", "baseline_shift": -0.1, "surrogate": "opmd", "tau": 0.0, "kl.coef": 0.0, "entropy_coef": 0.0},
    ),
    "trinity topr": (["trinity", of_type("topr")], {**_REINFORCE, "advantage": "reward", "surrogate": "topr", "kl.estimator": "k2", "kl.coef": 0.001}),
    # A log ρ within 1/1.25 and 1.25, for the mean of the group.
    "trinity sppo": (
        ["trinity", of_type("sppo", "policy_loss_fn_args: {epsilon: 0.25}")],
        {**_REINFORCE, "advantage": "group", "surrogate": "rec", "clip_mode": "two_sided", "token_weight": "none", "clip_low": 0.2, "clip_high": 0.25, "kl.coef": 0.0},
    ),
    "trinity rec": (
        ["trinity", of_type("rec", "policy_loss_fn_args: {epsilon_low: 0.1, clip_mode: one-side}")],
        {**_REINFORCE, "advantage": "group", "normalize": "none", "surrogate": "rec", "clip_mode": "one_sided", "clip_low": 0.1, "clip_high": 0.2,
         "token_weight": "none", "likelihood_coef": 0.0, "proximal_coef": 0.0, "kl.estimator": "k2", "kl.coef": 0.001},
    ),
    "trinity rec by sequences": (
        ["trinity", of_type("rec", "policy_loss_fn_args: {clip_mode: gspo-one-side, weight: gspo_importance_sampling, regularizer: forward-kl, regularizer_coef: 0.1}")],
        {"surrogate": "rec", "clip_mode": "one_sided", "token_weight": "ratio", "importance_sampling_level": "sequence", "aggregate": "seq-mean-token-mean",
         "likelihood_coef": 0.1},
    ),
    "trinity rec in a ring, held back": (
        ["trinity", of_type("rec", "policy_loss_fn_args: {clip_mode: ring, weight: advantage, temp: 2.0, regularizer: k2, regularizer_coef: 0.2}")],
        {"surrogate": "rec", "clip_mode": "ring", "ring_low": 0.6, "ring_high": 2.0, "token_weight": "advantage", "weight_temperature": 2.0, "proximal_coef": 0.2},
    ),
    # default_args of sapo_policy_loss.py: a mean over tokens.
    "trinity sapo": (
        ["trinity", of_type("sapo", "policy_loss_fn_args: {tau_neg: 1.2}")],
        {"surrogate": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.2, "aggregate": "token-mean"},
    ),
    "trinity deviation of the batch": (
        ["trinity", of_type("grpo", "advantage_fn_args: {std_cal_level: batch}")], {"advantage": "group", "normalize": "batch", "surrogate": "ppo_clip"},
    ),
}  # fmt: skip
"""What a run of the other system computes, stated by hand from its formula."""


@pytest.mark.parametrize("name", CHOSEN)
def test_the_method_is_the_one_that_the_other_system_computes(name):
    (system, *words), asked = CHOSEN[name]
    tree = words.pop() if "\n" in words[-1] else ""
    chosen = config(system, *words, tree=tree).algorithm.resolved
    got = {key: attrgetter(key)(chosen) for key in asked}
    numbers = {key for key, value in asked.items() if isinstance(value, float)}
    assert {key: got[key] for key in numbers} == pytest.approx({key: asked[key] for key in numbers})
    assert {key: got[key] for key in asked if key not in numbers} == {key: asked[key] for key in asked if key not in numbers}


def test_a_default_of_trinitys_rec_that_its_mask_does_not_read_is_not_reported():
    """Only keys that were set are, as epsilon_high_prime without a ring."""
    for words, expected in (
        ("", []),
        (", epsilon_high_prime: 3.0", [("algorithm.ring_high", "clip_mode is one_sided, not ring")]),
    ):
        tree = of_type("rec", f"policy_loss_fn_args: {{epsilon_low: 0.1, clip_mode: one-side{words}}}")
        assert [row for row in validate(config("trinity", tree=tree)).ignored if row[0].startswith("algorithm")] == expected


def test_what_trinitys_workflows_say_besides_the_method():
    """math_workflow rewards the form by ±0.1 and asks for it; a system prompt of the run takes that one's place."""
    plain = config("trinity", tree=GSM8K_TRINITY)
    assert plain.reward.functions == {"math": 1.0, "think_answer": 0.1}
    assert "<answer> answer here </answer>" in str(plain.data.system_prompt) and plain.data.chat_template_kwargs == {}
    boxed = config("trinity", tree=GSM8K_TRINITY.replace("math_workflow", "math_boxed_workflow"))
    assert (boxed.reward.functions, "boxed{}" in str(boxed.data.system_prompt)) == ({"math": 1.0}, True)
    workflow = "math_workflow\n    system_prompt: Add.\n    default_reward_fn_type: countdown_reward"
    tree = GSM8K_TRINITY.replace("math_workflow", workflow).replace("model_path: m", "model_path: m, enable_thinking: false")
    run = config("trinity", tree=tree)
    assert (run.reward.functions, run.data.system_prompt) == ({"countdown": 1.0}, "Add.")
    assert run.data.chat_template_kwargs == {"enable_thinking": False}
    without = config("trinity", tree=tree.replace("    system_prompt: Add.\n", ""))
    assert without.data.system_prompt is None


def test_variables_of_verls_chat_template_are_ours():
    run = config(
        "verl",
        *GRPO_VERL,
        "+data.apply_chat_template_kwargs.reasoning_effort=medium",
        "data.apply_chat_template_kwargs.deep=False",
    )
    assert run.data.chat_template_kwargs == {"reasoning_effort": "medium", "deep": False}
    assert config("verl", *GRPO_VERL, "data.apply_chat_template_kwargs={}").data.chat_template_kwargs == {}


def test_a_run_of_areal_before_2025_08_is_the_one_of_its_own_program():
    """By hand: 512 prompts x 16 in 4 updates; rewards of -5 and 5 whitened over all tokens of the step; the engine's
    log-probs are the old ones; float16 with a scale that begins at 2^32; the rate of the tenth of 100 steps is 9/20 of 2e-5."""
    run = config("areal", tree=AREAL_SYNC)
    algorithm, chosen = run.algorithm, run.algorithm.resolved
    assert (run.data.prompts_per_step, algorithm.group_size, algorithm.updates_per_step) == (512, 16, 4)
    assert (run.data.max_prompt_tokens, run.data.max_response_tokens, run.policy.tokens_per_micro_batch) == (
        1024,
        27648,
        30720,
    )
    assert (chosen.advantage, chosen.normalize, chosen.credit, chosen.whiten, chosen.whiten_by) == (
        "reward",
        "none",
        "response",
        True,
        "step",
    )
    assert (chosen.clip_low, chosen.clip_high, chosen.dual_clip, chosen.aggregate, chosen.kl.coef) == (
        0.2,
        0.2,
        None,
        "token-mean",
        0.0,
    )
    assert chosen.rollout_correction.old_logprobs_from == "engine" and not chosen.dynamic_sampling
    assert (run.policy.backend, run.engine.backend, run.engine.placement) == (
        "megatron:d2t1p2",
        "sglang:d4t1",
        "apart",
    )
    assert (run.policy.dtype, run.engine.dtype, run.policy.recompute) == ("float16", None, "full")
    assert run.policy.megatron.optimizer == {
        "initial_loss_scale": 2.0**32,
        "min_loss_scale": 1.0,
        "loss_scale_window": 5.0,
        "hysteresis": 2,
    }
    optimizer = run.policy.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.eps, optimizer.betas) == (2e-5, 0.05, 1e-5, [0.9, 0.95])
    assert (optimizer.warmup_steps, optimizer.warmup_from, optimizer.schedule_per) == (0.2, 0, "step")
    assert rate(run, 10, 100) == pytest.approx(9 / 20 * 2e-5)
    assert (run.trainer.epochs, run.trainer.save_every, run.trainer.resume, run.trainer.run_dir) == (
        5,
        20,
        "auto",
        "/runs/ppo/first",
    )
    assert run.reward.by_source["code"] == {"code": 1.0} and run.reward.functions == {"math_any": 1.0}
    assert (run.data.source_key, run.data.ground_truth_key, run.data.apply_chat_template) == (
        "task",
        "solutions",
        False,
    )
    assert run.engine.sampling.top_k == 0 and run.rollout.max_staleness is None


def test_an_asynchronous_areal_run_before_2025_08_keeps_its_staleness_and_its_filter():
    run = config("areal", tree=AREAL_ASYNC)
    correction = run.algorithm.resolved.rollout_correction
    assert (run.rollout.max_staleness, run.rollout.interrupt, run.rollout.tail) == (16, "continue", "carry")
    assert (correction.old_logprobs_from, correction.weight, correction.high, correction.outside) == (
        "trainer",
        "token",
        5.0,
        "mask",
    )
    assert run.algorithm.resolved.dynamic_sampling
    uncapped = config("areal", tree=AREAL_ASYNC.replace("  behav_imp_weight_cap: 5.0\n", ""))
    assert uncapped.algorithm.resolved.rollout_correction.high == 1e9
    assert not config(
        "areal", tree=AREAL_SYNC + "success_rate_lb: 0.05\nsuccess_rate_ub: 0.95\n"
    ).algorithm.resolved.dynamic_sampling
    penalised = config("areal", tree=AREAL_SYNC.replace("kl_ctl: 0.0", "kl_ctl: 0.01")).algorithm.resolved
    assert (penalised.kl.place, penalised.kl.estimator, penalised.credit, penalised.gamma) == (
        "reward",
        "k1",
        "discounted",
        1.0,
    )
    by_group = config("areal", tree=AREAL_SYNC.replace("group_adv_norm: false", "group_adv_norm: true")).algorithm.resolved
    assert by_group.whiten_by == "group"
    mixed = config("areal", "actor.bf16=true", tree=AREAL_SYNC)
    assert (mixed.policy.dtype, mixed.engine.dtype, mixed.policy.megatron.optimizer) == ("bfloat16", "float16", {})


def test_an_sft_run_of_skyrl_takes_the_rows_the_turns_and_the_length_that_it_names():
    """By hand: 24 rows a step of one update, cut off at 4096 tokens of prompt and response, 6 of them in a micro-batch; all
    turns up to their end tokens, or the last with what is after; packed, a bin's tokens are the budget."""
    run = config("skyrl", *SFT_SKYRL)
    data = run.data
    assert (run.algorithm.name, run.policy.backend, run.policy.recompute) == ("sft", "megatron:d4t1p1", "full")
    assert (data.train, data.val) == (["allenai/tulu-train.parquet[:50000]"], ["allenai/tulu-train.parquet[-500:]"])
    assert (data.prompts_per_step, run.algorithm.updates_per_step, run.policy.tokens_per_micro_batch) == (
        24,
        1,
        6 * 4096,
    )
    assert (data.max_total_tokens, run.max_sequence_tokens, data.learned_turns, data.messages_key) == (
        4096,
        4096,
        "all",
        "messages",
    )
    assert (run.trainer.steps, run.trainer.run_dir, run.trainer.resume, run.eval.generate) == (
        4166,
        "/ckpts",
        "never",
        False,
    )
    assert (run.policy.optimizer.lr, run.policy.optimizer.betas, run.trainer.eval_every) == (1e-6, [0.9, 0.999], 0)
    packed = config("skyrl", *SFT_SKYRL, "use_sequence_packing=true", "max_tokens_per_microbatch=8192")
    assert packed.policy.tokens_per_micro_batch == 8192
    older = [word for word in SFT_SKYRL if not word.startswith(("train_", "eval_", "num_steps"))]
    older = config(
        "skyrl", *older, "dataset_name=yahma/alpaca-cleaned", "dataset_split=train[:200]", "strategy=fsdp", "num_epochs=3"
    )
    assert (older.data.train, older.data.learned_turns) == (["yahma/alpaca-cleaned-train.parquet[:200]"], "last")
    assert (older.trainer.epochs, older.trainer.steps, older.policy.backend) == (3, None, "fsdp:d4t1")


def test_an_sft_run_of_areal_is_known_by_what_it_lacks():
    """In its tests the section is called actor, and there is no generation; a KL of 0.1 is the default of nothing then."""
    tree = "actor: {backend: 'fsdp:d2', path: m, optimizer: {lr: 1.0e-5}}\ntrain_dataset: {type: sft, path: d.parquet, batch_size: 16}\ntokenizer_path: m\n"
    run = config("areal", tree=tree)
    assert (run.algorithm.name, run.policy.backend, run.data.prompts_per_step) == ("sft", "fsdp:d2t1", 16)
    assert "gconfig" not in tree and translated("areal", tree=tree + "gconfig: {n_samples: 4}\n").refusals


@pytest.mark.parametrize("name", ASKED)
def test_the_run_is_the_one_that_the_other_system_would_make(name):
    (system, *words), asked = ASKED[name]
    tree = words.pop() if "\n" in words[-1] else ""
    run = config(system, *words, tree=tree)
    got = summary(run)
    assert got.rate == pytest.approx(asked.rate, rel=1e-6)
    got.rate = asked.rate
    assert got == asked


def test_details_of_those_runs():
    """What only some of them have."""
    ppo = config(*ASKED["verl ppo on megatron"][0])
    assert (ppo.algorithm.resolved.credit, ppo.algorithm.resolved.whiten, ppo.critic.warmup_steps) == ("gae", True, 4)
    assert (ppo.policy.optimizer.clip_grad, ppo.critic.optimizer.lr, ppo.critic.value_clip) == (1.0, 1e-5, 0.5)
    dapo = config(*ASKED["verl dapo"][0]).algorithm
    assert (dapo.resolved.dynamic_sampling, dapo.prompts_per_round, dapo.sampling_rounds) == (True, 768, 10)
    assert (dapo.resolved.overlong_buffer, dapo.resolved.overlong_penalty) == (512, 1.0)
    gspo = config(*ASKED["verl gspo"][0]).algorithm.resolved
    assert (gspo.importance_sampling_level, gspo.penalty_aggregate) == ("sequence-token", "token-mean")
    skyrl = config(*ASKED["skyrl grpo"][0])
    assert skyrl.algorithm.resolved.penalty_aggregate == "seq-mean-token-mean"
    areal = config("areal", tree=GSM8K_AREAL).algorithm.resolved
    assert (areal.advantage, areal.normalize, areal.rollout_correction.old_logprobs_from) == ("group", "group", "trainer")
    roll = config("roll", tree=DPO_ROLL)
    assert (roll.algorithm.name, roll.algorithm.resolved.beta, roll.data.prompt_key) == ("dpo", 0.2, "instruction")
    plus = config(*ASKED["verl reinforce++ with truncated weights"][0]).algorithm.resolved
    assert (plus.credit, plus.gamma, plus.whiten) == ("discounted", 1.0, True)
    assert (plus.rollout_correction.weight, plus.rollout_correction.high, plus.rollout_correction.outside) == (
        "token",
        2.0,
        "truncate",
    )
    sapo = config(*ASKED["verl sapo"][0]).algorithm.resolved
    assert (sapo.temperature_positive, sapo.temperature_negative) == (1.0, 1.05)
    cov = config(*ASKED["verl clip_cov"][0]).algorithm.resolved
    assert (cov.surrogate, cov.cov_fraction, cov.cov_low, cov.cov_high) == ("clip_cov", 2e-4, 1.0, 5.0)
    siirl = config(*ASKED["siirl ppo on fsdp"][0])
    assert (siirl.policy.optimizer.clip_grad, siirl.policy.recompute, siirl.algorithm.resolved.credit) == (
        0.5,
        "full",
        "gae",
    )
    value = config("areal", tree=AREAL_PPO)
    assert (value.critic.path, value.critic.value_clip, value.algorithm.resolved.lam) == ("c", 0.5, 1.0)
    assert config("roll", tree=PPO_ROLL).algorithm.resolved.lam == 0.95
    assert config("trinity", tree=DPO_TRINITY).algorithm.resolved.beta == 0.1
    trinity = config("trinity", tree=PPO_TRINITY)
    assert (trinity.policy.recompute, trinity.algorithm.resolved.credit) == ("full", "gae")


def test_only_areal_continues_truncated_responses_with_the_critics_value():
    critics = [config(*ASKED[name][0][:1], tree=ASKED[name][0][1]) for name in ("areal ppo", "roll ppo")]
    critics += [config("trinity", tree=PPO_TRINITY), config(*ASKED["siirl ppo on fsdp"][0])]
    chosen = [run.algorithm.resolved for run in critics]
    assert [algorithm.credit for algorithm in chosen] == ["gae"] * 4
    assert [algorithm.bootstrap_truncated for algorithm in chosen] == [True, False, False, False]


@pytest.mark.parametrize(("system", "words", "tree", "says"), [
    ("verl", [*GRPO_VERL, "algorithm.adv_estimator=gdpo"], "", "the advantage gdpo"),
    ("verl", [*GRPO_VERL, "algorithm.rollout_correction.rollout_rs='token_k1,seq_sum_k1'", "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0,0.5_2.0'"], "", "and one of token_k1"),
    ("verl", [*GRPO_VERL, "-m=recipe.flowrl.main_flowrl"], "", "a program other than verl.trainer.main_ppo"),
    ("verl", [*GRPO_VERL, "-m=recipe.sppo.main_sppo", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"], "", "with which the recipe fails"),
    ("verl", [*GRPO_VERL, "actor_rollout_ref.actor.ppo_mini_batch_size=100"], "", "updates of unequal size"),
    ("verl", [*GRPO_VERL, "reward_model.enable=True", "reward_model.model.path=j", "custom_reward_function.path=f.py"], "", "on the policy's GPUs: set"),
    ("verl", [*ASKED_MODEL, "reward.reward_model.rollout.name=trtllm"], "", "servers of trtllm that a reward function calls"),
    ("skyrl", [*SKYRL, "trainer.algorithm.loss_reduction=prompt_mean"], "", "the mean prompt_mean"),
    ("skyrl", [*SKYRL, "trainer.strategy=megatron", "trainer.policy.megatron_config.moe_enable_routing_replay=true"], "", "which SkyRL refuses too"),
    ("verl", [*GRPO_VERL, "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.router_replay.mode=R3"], "", "enable_rollout_routing_replay=False, with which verl fails"),
    ("verl", [*GRPO_VERL, "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.router_replay.mode=R2", "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"], "", "enable_rollout_routing_replay=True, with which verl fails"),
    ("verl", [*GRPO_VERL, "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.router_replay.mode=record"], "", "the mode record of router replay"),
    ("verl", [*GRPO_VERL, "actor_rollout_ref.ref.router_replay.mode=R3"], "", "in another model than the policy"),
    ("areal", [], GSM8K_AREAL.replace("kl_ctl: 0.0", "kl_ctl: 0.1"), "a KL without a reference"),
    ("skyrl", [*SFT_SKYRL, "train_dataset_weights=[1.0]"], "", "drawn with replacement by weight"),
    ("skyrl", [*SFT_SKYRL, "train_dataset_splits=['train[:10%]']"], "", "the slice train[:10%]"),
    ("skyrl", [*SFT_SKYRL, "max_length=null"], "", "sequences without a length limit"),
    ("skyrl", [*SFT_SKYRL, "sampler=custom"], "", "your own order of rows"),
    ("skyrl", [*SFT_SKYRL[1:], "-m=x.main_sft_of_mine"], "", "a program other than main_sft"),
    ("areal", ["success_rate_lb=0.3"], AREAL_ASYNC, "by their share of solved responses, 0.3 to 0.95"),
    ("areal", ["ppo.disable_value=false"], AREAL_SYNC, "a critic whose values are normalized"),
    ("areal", ["ppo.early_stop_imp_ratio=1.5"], AREAL_SYNC, "skipped when ratios are large"),
    ("areal", ["ppo.adv_norm=false"], AREAL_SYNC, "only their difference is kept"),
    ("areal", ["ppo.kl_clt=0.1"], AREAL_SYNC, "did you mean ppo.kl_ctl"),
    ("areal", [], GSM8K_AREAL.replace("max_head_offpolicyness: 0", "max_head_offpolicyness: 4"), "in steps of 1 prompts, where a step takes 256"),
    ("roll", [], GSM8K_ROLL + "difficulty_mask: true\nentropy_loss_coef: 0.1\n", "left out of the loss but not of the entropy"),
    ("roll", [], pg_variant("topr").replace("max_steps: 100", "max_steps: 100\nwhiten_advantages: true"), "TOPR by the sign of the reward"),
    ("roll", [], pg_variant("cispo, cispo_use_unified_mask: true"), "a mask in addition to the bounds"),
    ("trinity", [], of_type("rec", "policy_loss_fn_args: {clip_mode: gspo-one-side, weight: importance_sampling}"), "the weight importance_sampling"),
    ("trinity", [], of_type("rec", "advantage_fn_args: {std_normalize: true}"), "a biased deviation"),
    ("trinity", [], of_type("multi_step_grpo", ""), "the algorithm multi_step_grpo"),
    ("areal", [], GSM8K_AREAL.replace("recompute_logprob: true", "use_decoupled_loss: true\n  prox_logp_method: linear"), "log-probs that are estimated"),
    ("trinity", [], GSM8K_TRINITY.replace("sync_interval: 1", "sync_style: dynamic_by_explorer"), "weights that are synchronized on demand"),
    ("trinity", [], of_type("reinforceplusplus").replace("sync_interval: 1", "sync_interval: 8"), "advantages over the samples of each"),
    ("trinity", [], GSM8K_TRINITY.replace("batch_size: 96", "batch_size: 96\n  total_steps: 100").replace("sync_interval: 1", "sync_interval: 8"), "ends between two syncs"),
    ("roll", [], GSM8K_ROLL + "async_generation_ratio: 1.5\n", "a part of a step that is sampled ahead"),
    ("verl", [*SEPARATE, "trainer.v1.separate_async.hybrid_rollout.enable_switch=True"], "", "GPUs that move between"),
    ("verl", [*SEPARATE, "algorithm.adv_estimator=reinforce_plus_plus"], "", "advantages over the samples of each"),
    ("verl", [*SEPARATE, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"], "", "a schedule over the whole run"),
    ("verl", [*GRPO_VERL, "trainer.v1.trainer_mode=own"], "", "known here are sync, colocate_async and separate_async"),
    ("verl", [*GRPO_VERL, *OVERLONG, "reward_model.reward_kwargs.max_resp_len=1024"], "", "a penalty that ends at another length"),
    ("verl", [*FULLY_ASYNC, "algorithm.adv_estimator=gae"], "", "values that are computed again for batches of several updates"),
    ("verl", [*FULLY_ASYNC, "algorithm.adv_estimator=reinforce_plus_plus"], "", "advantages over the samples of each"),
    ("verl", [*FULLY_ASYNC, "actor_rollout_ref.actor.ppo_epochs=2"], "", "several passes over each of the trainer's batches"),
    ("verl", [*FULLY_ASYNC, "actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"], "", "a schedule over the whole run"),
    ("verl", [*FULLY_ASYNC, "async_training.use_rollout_log_probs=False"], "", "old log-probs by the weights of each"),
    ("verl", [*FULLY_ASYNC, "algorithm.filter_groups.enable=True"], "", "dynamic sampling, which this program does not do"),
    ("skyrl", [*SKYRL, "trainer.algorithm.use_kl_in_reward=true"], "", "which SkyRL refuses too"),
    ("verl", [*GRPO_VERL, "actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"], "", "two KL penalties, one with an adaptive coefficient"),
    ("trinity", [], of_type("ppo", "kl_penalty_fn: k3, kl_penalty_fn_args: {adaptive: true}"), "two KL penalties"),
    ("skyrl", [*SKYRL, "trainer.fully_async.enabled=true"], "", "asynchronous training on shared GPUs"),
    ("skyrl", [*SKYRL, "trainer.placement.colocate_all=false", "trainer.fully_async.enabled=true"], "", "another number than train_batch_size"),
])  # fmt: skip
def test_what_would_be_another_run_is_refused_by_name(system, words, tree, says):
    refusals = translated(system, *words, tree=tree).refusals
    assert any(says in refusal for refusal in refusals), refusals


@pytest.mark.parametrize(("system", "tree", "key"), [
    ("roll", GSM8K_ROLL.replace("actor_infer:\n", "actor_infer:\n  generating_args: {presence_penalty: 0.5}\n"), "actor_infer.generating_args.presence_penalty"),
    ("roll", GSM8K_ROLL.replace("actor_train:\n", "actor_train:\n  model_args: {freeze_module_prefix: vision}\n"), "actor_train.model_args.freeze_module_prefix"),
    ("roll", GSM8K_ROLL.replace("actor_train:\n", "actor_train:\n  model_args: {atn_implementation: fa2}\n"), "actor_train.model_args.atn_implementation"),
    ("roll", GSM8K_ROLL.replace("{file_name: [d.jsonl]}", "{file_name: [d.jsonl], mesages: m}"), "actor_train.data_args.mesages"),
    ("roll", GSM8K_ROLL.replace("actor_train:\n", "actor_train:\n  worker_cls: my.Worker\n"), "actor_train.worker_cls"),
    ("trinity", GSM8K_TRINITY.replace("rollout_args: {temperature: 1.0}", "rollout_args: {temperature: 1.0, min_p: 0.1}"), "buffer.explorer_input.taskset.rollout_args.min_p"),
    ("trinity", GSM8K_TRINITY.replace("taskset: {path", "taskset: {sufle: true, path"), "buffer.explorer_input.taskset.sufle"),
    ("trinity", GSM8K_TRINITY.replace("engine_num: 4", "engine_num: 4, repetition_penalty: 1.2"), "explorer.rollout_model.repetition_penalty"),
    ("trinity", GSM8K_TRINITY.replace("synchronizer: {", "synchronizer: {sync_intervall: 4, "), "synchronizer.sync_intervall"),
])  # fmt: skip
def test_a_key_that_no_row_names_is_not_taken_for_one_without_effect(system, tree, key):
    (refused,) = [entry.key for entry in translated(system, tree=tree).outcomes if entry.is_refused]
    assert refused == key


@pytest.mark.parametrize(("system", "word", "says"), [
    ("verl", "actor_rollout_ref.actor.fsdp_config.reshard_after_forwrd=True", "actor_rollout_ref.actor.fsdp_config.reshard_after_forward"),
    ("verl", "actor_rollout_ref.rollout.val_kwargs.temprature=0.6", "actor_rollout_ref.rollout.val_kwargs.temperature"),
    ("verl", "actor_rollout_ref.actr.optim.optimizer=AdamW", "actor_rollout_ref.actor.optim.optimizer"),
    ("verl", "critic.megatron.tensor_model_paralel_size=2", "critic.megatron.tensor_model_parallel_size"),
    ("siirl", "actor_rollout_ref.actor.fsdp_config.ofload_policy=True", "actor_rollout_ref.actor.fsdp_config.offload_policy"),
    ("areal", "actor.fsdp.offload_parms=true", "actor.fsdp.offload_params"),
    ("skyrl", "trainer.policy.fsdp_config.cpu_ofload=true", "trainer.policy.fsdp_config.cpu_offload"),
    ("trinity", "trainer.trainer_config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpus=2", "trainer.trainer_config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("roll", "reference.strategy_args.strategy_config.tensor_model_paralel_size=2", "reference.strategy_args.strategy_config.tensor_model_parallel_size"),
])  # fmt: skip
def test_a_row_with_a_wildcard_takes_no_misspelled_key(system, word, says):
    unknown = outcome(translated(system, word), word.partition("=")[0])
    assert unknown.kind == "unknown" and unknown.is_refused
    assert unknown.reason.endswith(f"did you mean {says}?"), unknown.reason
    right = outcome(translated(system, f"{says}=2"), says)
    assert right.kind != "unknown", "the key that is meant is read"


def test_a_name_that_anyone_may_give_stands_for_any():
    keys = (
        "rewards.mine.world_size",
        "rewards.mine.wrld_size",
        "actor_train.system_envs.MINE",
        "actor_train.sytem_envs.MINE",
    )
    assert [key in known("roll") for key in keys] == [True, False, True, False]


def test_a_key_without_effect_is_not_counted_as_translated():
    """Without a critic nothing reads where it comes from."""
    path = outcome(translated("verl", *GRPO_VERL, "critic.model.path=c"), "critic.model.path")
    assert path.kind == "fixed" and path.reason == "it has no effect with these settings"
    gae = outcome(translated("verl", *VERL, "trainer.critic_warmup=5"), "trainer.critic_warmup")
    assert (gae.kind, gae.ours) == ("translated", ("critic.warmup_steps",))


@pytest.mark.parametrize(("word", "says"), [
    ("actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta2=0.95", "set policy.optimizer.betas"),
    ("actor_rollout_ref.actor.policy_loss.tau_pos=2.0", "verl's loss reads actor.tau_pos"),
])  # fmt: skip
def test_what_nothing_reads_is_said(word, says):
    words = [*GRPO_VERL, "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"]
    assert any(says in refusal for refusal in translated("verl", *words, word).refusals)


def test_the_models_and_the_column_that_roll_names_elsewhere_are_read():
    tree = GSM8K_ROLL.replace("actor_train:\n", "actor_train:\n  model_args: {model_name_or_path: mine}\n")
    tree = tree.replace("pretrain: m\n", "pretrain: m\nreference: {model_args: {model_name_or_path: theirs}}\n")
    run = config("roll", tree=tree.replace("{file_name: [d.jsonl]}", "{file_name: [d.jsonl], messages: conversation}"))
    assert (run.model.path, run.reference.path, run.data.prompt_key) == ("mine", "theirs", "conversation")
    plain = config("roll", tree=GSM8K_ROLL)
    assert (plain.model.path, plain.reference.path, plain.data.prompt_key) == ("m", None, "prompt")


@pytest.mark.parametrize(("metric", "by"), [("acc", "reward"), ("score", "reward"), ("seq_reward", "shaped_reward")])
def test_groups_are_compared_by_the_metric_that_verl_names(metric, by):
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg."
    dapo = ["algorithm.filter_groups.enable=True", f"algorithm.filter_groups.metric={metric}"]
    penalty = [
        "reward_model.reward_manager=dapo",
        *(f"{buffer}{key}" for key in ("enable=True", "len=256", "penalty_factor=1.0")),
    ]
    assert config("verl", *GRPO_VERL, *dapo, *penalty).algorithm.resolved.dynamic_sampling_by == by
    assert config("verl", *GRPO_VERL, *dapo).algorithm.resolved.dynamic_sampling_by == "reward", "nothing else is in it"


@pytest.mark.parametrize(("longest", "buffer"), [("1536", 512), ("null", 512), ("2048", 0), ("4096", 0)])
def test_verls_penalty_is_none_where_no_response_reaches_its_buffer(longest, buffer):
    """Over 512 tokens up to max_resp_len, of responses of 1536 at most."""
    run = config("verl", *GRPO_VERL, *OVERLONG, f"reward_model.reward_kwargs.max_resp_len={longest}")
    assert run.algorithm.resolved.overlong_buffer == buffer


def test_a_program_of_verls_with_rewards_of_its_own_takes_them_from_its_files():
    entropy = [*GRPO_VERL, "-m=recipe.entropy.main_entropy"]
    function = "recipe/entropy/reward_score/__init__.py:_default_compute_score"
    assert config("verl", *entropy).reward.functions == {function: 1.0}
    assert config("verl", *entropy, "custom_reward_function.path=f.py").reward.functions == {"f.py:compute_score": 1.0}
    assert config("verl", *GRPO_VERL).reward.functions == {}


@pytest.mark.parametrize(("words", "dtypes"), [
    ([], ("bfloat16", None)),
    (["actor_rollout_ref.actor.fsdp_config.dtype=float16", "actor_rollout_ref.rollout.dtype=float16"], ("float16", None)),
    (["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"], ("float16", "bfloat16")),
    (["actor_rollout_ref.actor.fsdp_config.dtype=float32", "actor_rollout_ref.rollout.dtype=auto"], ("float32", None)),
    (["actor_rollout_ref.rollout.dtype=half"], ("bfloat16", "float16")),
    (["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.megatron.dtype=float16",
      "actor_rollout_ref.actor.fsdp_config.dtype=float32"], ("float16", "bfloat16")),
])  # fmt: skip
def test_policy_and_engine_have_the_numbers_that_verl_gives_them(words, dtypes):
    run = config("verl", *GRPO_VERL, *words)
    assert (run.policy.dtype, run.engine.dtype) == dtypes


@pytest.mark.parametrize(("system", "words", "mode"), [
    ("verl", [*VERL, f"{_ACTOR}strategy=megatron", f"{_ACTOR}router_replay.mode=R2"], "R2"),
    ("verl", [*VERL, f"{_ACTOR}strategy=megatron", f"{_ACTOR}megatron.router_replay.mode=R2"], "R2"),
    ("verl", [*VERL, "model_engine=veomni", f"{_ACTOR}veomni.router_replay.mode=R2"], "R2"),
    ("verl", [*VERL, f"{_ACTOR}strategy=megatron", f"{_ACTOR}megatron.router_replay.mode=R3", _BY_ENGINE], "R3"),
    ("verl", [*VERL, f"{_ACTOR}strategy=megatron", f"{_ACTOR}router_replay.mode=disabled", _BY_ENGINE], None),
    ("verl", [*VERL, f"{_ACTOR}strategy=fsdp", f"{_ACTOR}router_replay.mode=R2"], None),
    ("verl", VERL, None),
    ("skyrl", [*SKYRL, "trainer.strategy=megatron", _OF_SKYRL, "generator.inference_engine.enable_return_routed_experts=true"], "R3"),
    ("skyrl", [*SKYRL, "trainer.strategy=fsdp", _OF_SKYRL], None),
    ("skyrl", SKYRL, None),
])  # fmt: skip
def test_routes_are_replayed_where_the_other_system_does(system, words, mode):
    assert config(system, *words).policy.router_replay == mode


def test_roll_replays_what_its_engine_chose():
    replay = {
        mode: GSM8K_ROLL.replace("actor_train:", f"actor_train:\n  router_replay: {{mode: {mode}}}")
        for mode in ("R3", "disabled")
    }
    assert config("roll", tree=replay["R3"]).policy.router_replay == "R3"
    assert config("roll", tree=replay["disabled"]).policy.router_replay is None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_model_that_verls_reward_function_asks_is_served_and_adds_nothing_itself(engine):
    reward = config("verl", *ASKED_MODEL, f"reward.reward_model.rollout.name={engine}").reward
    assert (reward.functions, reward.model.path) == ({"f.py:compute_score": 1.0}, None)
    judge = reward.judge
    assert (judge.model, judge.backend, judge.functions_ask, judge.memory_fraction) == ("j", f"{engine}:d8t2", True, 0.95)


@pytest.mark.parametrize(("words", "begin"), [
    ([*GRPO_VERL, "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.actor.optim.lr_warmup_init=2e-7"], 2e-7),
    ([*SFT_VERL, "engine=megatron", "optim.lr_warmup_init=1e-6"], 1e-6),
    ([*SFT_VERL, "engine=automodel", "optim.init_lr_ratio=0.2"], 2e-6),
    # Automodel's default is a tenth.
    ([*SFT_VERL, "engine=automodel"], 1e-6),
    (SFT_VERL, 0.0),
])  # fmt: skip
def test_a_warm_up_of_verls_rises_from_the_rate_that_it_names(words, begin):
    assert config("verl", *words).policy.optimizer.warmup_init_lr == pytest.approx(begin)


def test_groups_compared_with_their_kl_are_refused():
    words = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_final_reward"]
    words += ["algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=False"]
    assert any("rewards that include the KL" in refusal for refusal in translated("verl", *GRPO_VERL, *words).refusals)


def test_evaluation_by_the_keys_of_rllms_verl():
    words_of_eval = ["actor_rollout_ref.rollout.n_val=16", "actor_rollout_ref.rollout.val_temperature=0.7"]
    both, one = config("verl", *VERL, *words_of_eval).eval, config("verl", *VERL, *words_of_eval[:1]).eval
    assert (both.samples, both.temperature, both.top_p) == (16, 0.7, 0.95)
    assert (one.samples, one.temperature) == (16, 0.6)
    assert config("verl", *VERL, "actor_rollout_ref.rollout.val_temperature=0").eval.samples == 0, "greedy"


def test_bounds_of_verls_rejection_are_turned_round():
    """verl keeps log(lower) <= -log(trainer / engine) <= log(upper): 0.5 and 4 of it are 1/4 and 2 of trainer / engine."""
    rejection = [
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_4.0",
    ]
    correction = config("verl", *GRPO_VERL, *rejection).algorithm.resolved.rollout_correction
    assert (correction.reject, correction.reject_low, correction.reject_high) == ("geometric", 0.25, 2.0)


def test_old_logprobs_are_those_that_areal_takes():
    """The engine's unless they are computed again; with the decoupled loss the trainer's, and the engine's give a weight."""
    again, decoupled = (
        "recompute_logprob: true",
        "use_decoupled_loss: true\n  behav_imp_weight_cap: 5.0\n  recompute_logprob: true",
    )
    origins = {}
    for name, setting in (("engine", "recompute_logprob: false"), ("again", again), ("decoupled", decoupled)):
        correction = config("areal", tree=GSM8K_AREAL.replace(again, setting)).algorithm.resolved.rollout_correction
        origins[name] = (correction.old_logprobs_from, correction.weight, correction.outside)
    assert origins == {
        "engine": ("engine", "none", "truncate"), "again": ("trainer", "none", "truncate"), "decoupled": ("trainer", "token", "mask"),
    }  # fmt: skip


def test_verls_fp8_rollout_quantizes_the_policys_weights_in_blocks():
    words = [*GRPO_VERL, "actor_rollout_ref.rollout.quantization=fp8"]
    assert config("verl", *words).engine.vllm["quantization"] == "fp8_per_block"
    assert "quantization" not in config("verl", *GRPO_VERL).engine.vllm
    (refused,) = translated("verl", *words[:-1], "actor_rollout_ref.rollout.quantization=torchao").refusals
    assert "known here is fp8" in refused


@pytest.mark.parametrize("words", [
    ["generator.inference_engine.external_server_urls=['http://h:8001','http://h:8002']", "generator.inference_engine.external_proxy_url=http://h:8000"],
    ["generator.run_engines_locally=false", "generator.remote_inference_engine_urls=['h:8001','h:8002']"],
    ["generator.inference_engine.run_engines_locally=false", "generator.inference_engine.remote_urls=['h:8001','h:8002']"],
])  # fmt: skip
def test_engines_of_skyrl_that_run_elsewhere_are_servers_of_ours(words):
    run = config("skyrl", *SKYRL[:3], "trainer.placement.colocate_all=false", *words)
    assert (run.engine.backend, run.engine.url) == ("vllm", ["http://h:8001", "http://h:8002"])
    assert any("set it to false" in refusal for refusal in translated("skyrl", *SKYRL[:3], *words).refusals), (
        "they share no GPUs"
    )


def test_a_group_of_one_has_the_advantage_that_verl_gives_it():
    algorithm = config("verl", *GRPO_VERL, "actor_rollout_ref.rollout.n=1").algorithm.resolved
    assert (algorithm.advantage, algorithm.normalize) == ("reward", "none")


# --- commands --------------------------------------------------------------------------------------------------------


def test_scripts_yaml_and_arguments_say_the_same(tmp_path):
    (tmp_path / "run.sh").write_text(
        "BS=256\npython3 -m verl.trainer.main_ppo " + " \\\n  ".join(f"'{word}'" for word in GRPO_VERL) + " $@\n"
    )
    (tmp_path / "conf.yaml").write_text("data: {train_batch_size: 999}\n")
    plain = translate_words("verl", GRPO_VERL, HOME)
    assert translate_words("verl", [str(tmp_path / "run.sh")], HOME).tree == plain.tree
    assert translate_words("verl", ["--config", str(tmp_path / "conf.yaml"), *GRPO_VERL], HOME).tree == plain.tree
    assert (
        translate_words("verl", ["--config_path", str(tmp_path), "--config_name=conf", *GRPO_VERL], HOME).tree == plain.tree
    )


@pytest.mark.parametrize("asked", [True, False])
def test_repeatable_sampling_of_sglang_is_carried_from_areal(asked):
    run = config("areal", f"sglang.enable_deterministic_inference={asked}", tree=GSM8K_AREAL)
    assert run.engine.sglang == ({"enable_deterministic_inference": True} if asked else {})


def test_the_commands_of_the_pages_are_read_as_they_are_printed():
    moe = "actor.backend=megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"
    for spelled in (moe, moe.replace("=", "='") + "'", moe.replace("(", "").replace(")", "")):
        words = ["scheduler.type=ray", "experiment_name=megatron-moe-gsm8k-grpo", "trial_name=trial-0", "rollout.backend=sglang:d4t4", spelled, "cluster.n_nodes=4",
                 "cluster.n_gpus_per_node=8", "actor.path=Qwen/Qwen3-30B-A3B", "actor.megatron.use_deterministic_algorithms=True", "actor.kl_ctl=0",
                 "train_dataset.path=d", "train_dataset.batch_size=64"]  # fmt: skip
        run = config("areal", *words)
        assert (run.policy.backend, run.trainer.deterministic) == ("megatron:d1t2p4c2e4", True)


@pytest.mark.parametrize(("words", "says"), [
    (["nothing"], "no setting of verl"), (["--config", "/no/such.yaml"], "no configuration file at /no/such.yaml"), (["no.sh"], "no file at no.sh"),
])  # fmt: skip
def test_a_command_without_settings_is_a_sentence(words, says):
    with pytest.raises(ConfigError, match=says):
        translate_words("verl", words, HOME)


ROLL_PAGE = """
pretrain: Qwen/Qwen3-30B-A3B
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 512
response_length: 512
adv_estimator: grpo
rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}
actor_train:
  model_args: {disable_gradient_checkpointing: false, dtype: bf16, model_type: ~}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1, gradient_accumulation_steps: 32, warmup_steps: 20, num_train_epochs: 50}
  data_args: {file_name: [d.jsonl]}
  strategy_args:
    strategy_name: megatron_train
    strategy_config:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: 8
      expert_model_parallel_size: 4
      expert_tensor_parallel_size: 1
      context_parallel_size: 1
      use_distributed_optimizer: true
      sequence_parallel: true
      moe_token_dispatcher_type: "alltoall"
      moe_grouped_gemm: true
      moe_layer_recompute: true
  device_mapping: list(range(0,32))
  infer_batch_size: 2
actor_infer: {strategy_args: {strategy_name: vllm}, num_gpus_per_worker: 2}
reference:
  model_args: {disable_gradient_checkpointing: true, dtype: bf16, model_type: ~}
  strategy_args:
    strategy_name: megatron_infer
    strategy_config: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, expert_model_parallel_size: 4, moe_token_dispatcher_type: "alltoall", moe_grouped_gemm: true}
  device_mapping: list(range(0,32))
  infer_batch_size: 2
"""


def test_the_configuration_of_rolls_page_is_read_key_by_key():
    run = config("roll", tree=ROLL_PAGE)
    assert run.policy.backend == "megatron:d8t2p2e4"
    assert run.policy.megatron.pipeline == {"virtual_pipeline_model_parallel_size": 8}
    moe = {
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    }
    assert run.policy.megatron.transformer == moe
    assert (run.policy.optimizer.lr, run.policy.optimizer.weight_decay, run.algorithm.updates) == (1e-6, 0.0, 2)


DOMAINS_ROLL = (
    GSM8K_ROLL.replace("adv_estimator: grpo", "adv_estimator: reinforce\nwhiten_advantages: true\ndifficulty_mask: true")
    .replace("use_kl_loss: true\nkl_loss_coef: 0.01\n", "")
    .replace(
        "{file_name: [d.jsonl]}",
        "{file_name: [d.jsonl], domain_interleave_probs: {math_rule: 0.4, code_sandbox: 0.3, llm_judge: 0.1, crossthinkqa: 0.1, ifeval: 0.1}}",
    )
    .replace("rewards: {math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker}}", """
rewards:
  crossthinkqa: {worker_cls: a.CrossThinkQARuleRewardWorker, reward_type: soft, response_length_penalty_coef: 0.0, tag_included: [crossthinkqa], world_size: 8}
  ifeval: {worker_cls: a.GeneralRuleRewardWorker, reward_type: soft, tag_included: [ifeval]}
  math_rule: {worker_cls: a.MathRuleRewardWorker, tag_included: [deepmath_103k, aime]}
  code_sandbox: {use_local: true, worker_cls: a.CodeSandboxRewardWorker, tag_included: [KodCode]}
  llm_judge:
    worker_cls: a.LLMJudgeRewardWorker
    judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt
    judge_model_type: inference
    tag_included: [RLVR]
    model_args: {model_name_or_path: judge/7b, dtype: bf16}
    generating_args: {max_new_tokens: 100, top_p: 0.8, top_k: 50, num_beams: 1, temperature: 0.8}
    strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.7, block_size: 16, max_model_len: 8000}}
    device_mapping: list(range(12,16))
""")
)  # fmt: skip


def test_a_roll_run_of_several_domains_has_its_prompts_samples_updates_and_rewards():
    """By hand: of 64 prompts int(25.6), int(19.2), int(6.4) and int(6.4), and the 8 that are left to the last; 512 samples
    over 4 replicas of t2 that take 2 x 8 each are 8 updates; whitened and masked domain by domain, by scores of 0 and 1."""
    run = config("roll", tree=DOMAINS_ROLL)
    assert summary(run) == replace(
        summary(run), prompts=64, samples=512, updates=8, kl=None, clip=(0.2, 0.2, 1.4), aggregate="seq-mean-token-mean",
        layout="megatron:d4t2p1", sampler="vllm:d4t2",
    )  # fmt: skip
    by_hand = {"math_rule": 25, "code_sandbox": 19, "llm_judge": 6, "crossthinkqa": 6, "ifeval": 8}
    assert counts(run.data.mixture, 64) == by_hand
    domain_of = domains_of(run.data.domains)
    tags = ("deepmath_103k", "aime", "another", "KodCode", "RLVR", "crossthinkqa", "ifeval")
    assert [domain_of(tag) for tag in tags] == ["math_rule"] * 3 + ["code_sandbox", "llm_judge", "crossthinkqa", "ifeval"]
    assert run.data.source_key == "tag" and run.data.ground_truth_by_source == {"KodCode": "test_cases"}
    rewards = [choose_rewards(run.reward, tag) for tag in tags[2:]]
    assert [(chosen.weights, chosen.accuracy) for chosen in rewards] == [
        ({"math": 1.0}, "math"),
        ({"code": 1.0}, "code"),
        ({"judge": 1.0}, "judge"),
        ({"multiple_choice": 0.0, "multiple_choice_soft": 1.0, "repetition": -0.5}, "multiple_choice"),
        ({"ifeval": 1.0, "repetition": -0.5}, "ifeval"),
    ]
    chosen = run.algorithm.resolved
    assert (chosen.whiten, chosen.whiten_by, chosen.difficulty_by, chosen.difficulty_low) == (True, "domain", "correct", 0.0)
    judge = run.reward.judge
    assert (judge.model, judge.backend, judge.url) == ("judge/7b", "vllm:d4t1", [])
    assert (judge.temperature, judge.max_tokens, judge.request) == (0.8, 100, {"top_p": 0.8, "top_k": 50})
    assert (judge.memory_fraction, judge.max_model_len) == (0.7, 8000)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("use_local: true", "use_local: false", "a remote sandbox"),
        ("reward_type: soft, response", "reward_type: strict, response", "the reward strict for multiple choice"),
        ("response_length_penalty_coef: 0.0", "response_length_penalty_coef: 0.1", "a penalty for fewer than 400 tokens"),
        ("a.MathRuleRewardWorker", "mine.MyWorker", "your own reward worker"),
        ("Qwen2.5-7B-Instruct-RLVR-prompt", "~", "the prompt None"),
        ("judge_model_type: inference", "judge_model_type: ~", "the judge None: known here are api and inference"),
        ("ifeval: 0.1}}", "ifeval: 0.1, other: 0.1}}", "a domain without a section in rewards"),
        ("whiten_advantages: true", "add_token_level_kl: true\ntarget_kl: 0.1", "a KL coefficient that every domain adapts"),
    ],
)
def test_what_a_domain_of_roll_asks_for_and_we_lack_is_refused(old, new, says):
    assert old in DOMAINS_ROLL
    assert any(says in refusal for refusal in translated("roll", tree=DOMAINS_ROLL.replace(old, new)).refusals)


def test_shares_of_roll_below_1_leave_the_rest_to_the_last_domain_that_is_used():
    tree = DOMAINS_ROLL.replace("llm_judge: 0.1, ", "")
    run = config("roll", tree=tree)
    assert counts(run.data.mixture, 64) == {"math_rule": 25, "code_sandbox": 19, "crossthinkqa": 6, "ifeval": 14}
    assert run.data.domains["llm_judge"] == ["RLVR"], "its rows are no rows of math_rule"


def test_a_judge_of_roll_at_an_address_is_used_there_and_its_key_is_not_copied():
    asked = (
        "judge_model_type: api\n    judge_api_url: http://host/v1\n    judge_model_name: big\n    judge_api_key: sk-secret"
    )
    tree = DOMAINS_ROLL.replace("judge_model_type: inference", asked)
    translation = translated("roll", tree=tree)
    judge = translation.tree["reward"]["judge"]
    assert (judge["url"], judge["model"], judge["api_key_variable"]) == (["http://host/v1"], "big", "JUDGE_API_KEY")
    assert "backend" not in judge and not translation.refusals
    assert "sk-secret" not in writer.write(translation, "roll") + str(writer.notes(translation))


def test_ground_truths_are_looked_for_where_each_system_has_them():
    """Elsewhere a response would be compared with nothing, and its reward be 0."""
    configs = {
        "verl": config("verl", *GRPO_VERL), "skyrl": config(*ASKED["skyrl grpo"][0]), "skyrl aime": config(*ASKED["skyrl dapo on megatron"][0]),
        "roll": config("roll", tree=GSM8K_ROLL), "trinity": config("trinity", tree=GSM8K_TRINITY),
    }  # fmt: skip
    assert {name: run.data.ground_truth_key for name, run in configs.items()} == {
        "verl": "reward_model.ground_truth", "skyrl": "reward_spec.ground_truth", "skyrl aime": "reward_model.ground_truth",
        "roll": "ground_truth", "trinity": "answer",
    }  # fmt: skip


def test_the_megatron_section_of_trinitys_page_is_read_key_by_key():
    actor = """
    strategy: megatron
    megatron:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      param_offload: false
      grad_offload: false
      optimizer_offload: false
      use_mbridge: false
      use_dist_checkpointing: false
      dist_checkpointing_path: null
      override_transformer_config: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}
    """
    section = "\n".join(f"    {line}" for line in actor.splitlines())
    translation = translated(
        "trinity", tree=GSM8K_TRINITY + f"  trainer_config:\n    actor_rollout_ref:\n      actor:\n{section}\n"
    )
    assert translation.refusals == [] and not [
        entry for entry in translation.outcomes if entry.kind in ("unknown", "unsupported")
    ]
    run = RunConfig.of(translation.tree)
    assert (run.policy.backend, run.policy.recompute) == ("megatron:d2t2p1", "full")


def test_an_older_release_has_the_defaults_that_it_had():
    """SkyRL's CISPO was bounded at 0 and 5 in 2026-03, at 1 and 4 in 2026-08; a release without a name is the latest."""
    words = [*SKYRL, "trainer.algorithm.policy_loss_type=cispo", "trainer.logger=console"]
    bounds = {}
    for system in ("skyrl", "skyrl@2026-03"):
        algorithm = RunConfig.of(translate_words(system, words, HOME).tree).algorithm.resolved
        bounds[system] = (algorithm.clip_low, algorithm.clip_high)
    assert bounds == {"skyrl": (1.0, 4.0), "skyrl@2026-03": (0.0, 5.0)}
    with pytest.raises(ValueError, match=r"the version of SkyRL must be one of 2026-03, 2025-09; got '2024'"):
        translate_words("skyrl@2024", words, HOME)


@pytest.mark.parametrize(
    ("mapping", "engine", "placement"),
    [
        ("list(range(8,12))", "vllm:d2t2p1", "apart"),
        ("list(range(0,8))", "vllm:d4t2p1", "colocated"),
        ("list(range(4,12))", "vllm:d4t2p1", "colocated"),
    ],
)
def test_a_roll_engine_on_gpus_of_its_own_is_apart(mapping, engine, placement):
    """Where it has some of the policy's GPUs and others, it shares all of the policy's."""
    run = config("roll", tree=GSM8K_ROLL + f"  device_mapping: {mapping}\n")
    assert (str(run.engine.layout), run.engine.placement) == (engine, placement)
    assert run.policy.backend == "megatron:d4t2p1"


@pytest.mark.parametrize("section", ["reward_model", "reward.reward_model"])
def test_verl_s_pool_of_a_reward_model_is_ranks_of_its_own(section):
    path = f"{section}.{'model.path' if section == 'reward_model' else 'model_path'}=judge"
    pool = [f"{section}.{key}" for key in ("enable=true", "enable_resource_pool=true", "nnodes=1", "n_gpus_per_node=2")]
    run = config("verl", *GRPO_VERL, "trainer.n_gpus_per_node=4", path, *pool)
    model = run.reward.model
    assert (model.path, model.backend, model.first_rank) == ("judge", "megatron:d2", run.layout.world_size)
    assert (run.engine.mode, run.roles.world_size) == ("server", run.layout.world_size + 2)


@pytest.mark.parametrize(
    ("reference", "infer", "backend", "first_rank", "mode"),
    [
        ("list(range(8,16))", "list(range(0,8))", "megatron:d8t1p1", 8, "server"),
        ("list(range(8,12))", "list(range(12,16))", "megatron:d4t1p1", 8, "server"),
        # None of its GPUs is its own alone.
        ("list(range(4,12))", "list(range(0,8))", "megatron:d8t1p1", 0, None),
        ("list(range(8,16))", "list(range(8,16))", "megatron:d8t1p1", 0, None),
        ("list(range(0,8))", "list(range(0,8))", "megatron:d8t1p1", 0, None),
    ],
)
def test_a_roll_reference_on_gpus_of_its_own_has_ranks_of_its_own(reference, infer, backend, first_rank, mode):
    strategy = "{strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 1}}"
    section = f"reference:\n  strategy_args: {strategy}\n  device_mapping: {reference}\n"
    run = config("roll", tree=GSM8K_ROLL + f"  device_mapping: {infer}\n{section}")
    assert (run.reference.backend, run.reference.first_rank, run.engine.mode) == (backend, first_rank, mode)


ASYNC_AREAL = GSM8K_AREAL.replace(
    "max_head_offpolicyness: 0",
    'max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}", max_concurrent_rollouts: 96',
)
ONE_STEP_OFF = [*GRPO_VERL, "trainer.n_gpus_per_node=6", "rollout.nnodes=1", "rollout.n_gpus_per_node=2"]
ASYNC_SKYRL = [
    *SKYRL[:3], "trainer.placement.colocate_all=false", "generator.inference_engine.num_engines=2", "trainer.train_batch_size=64",
    "generator.inference_engine.tensor_parallel_size=2", "trainer.policy_mini_batch_size=64", "generator.n_samples_per_prompt=8",
]  # fmt: skip
AHEAD = {
    # 96 prompts at once, of 4 samples on 4 servers.
    "areal": (
        ["areal", ASYNC_AREAL], (2, "continue", "carry"), ("fsdp:d4t1", "sglang:d4t1p1", "apart", 96), (256, 2, "trainer"),
    ),
    "areal on the trainer's GPUs": (
        ["areal", ASYNC_AREAL.replace('backend: "sglang:d4t1"', 'backend: "sglang:d4t1", scheduling_strategy: {type: colocation, target: actor}')],
        (2, "continue", "carry"), ("fsdp:d4t1", "sglang:d4t1p1", "colocated", 96), (256, 2, "trainer"),
    ),
    "areal that waits": (
        ["areal", ASYNC_AREAL + "async_training: false\n"],
        (None, "continue", "wait"), ("fsdp:d4t1", "sglang:d4t1p1", "apart", 256), (256, 2, "trainer"),
    ),
    # Eight of the trainer's steps of 96 prompts have samples of the same weights, two such periods ahead.
    "trinity": (
        ["trinity", GSM8K_TRINITY.replace("sync_interval: 1", "sync_interval: 8, sync_offset: 16")],
        (2, "finish", "wait"), ("fsdp:d4t1", "vllm:d4t1p1", "apart", 256), (768, 8, "engine"),
    ),
    # Half such a period ahead.
    "trinity, half a step off": (
        ["trinity", GSM8K_TRINITY.replace("sync_interval: 1", "sync_interval: 8, sync_offset: 4")],
        (0.5, "finish", "wait"), ("fsdp:d4t1", "vllm:d4t1p1", "apart", 256), (768, 8, "engine"),
    ),
    # 16 prompts of 5 samples at once in each engine.
    "verl, half a step off": (
        ["verl", *FULLY_ASYNC], (0.5, "continue", "carry"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 80), (512, 8, "engine"),
    ),
    "verl, with log-probs of the last sync": (
        ["verl", *FULLY_ASYNC, "algorithm.rollout_correction.bypass_mode=False", "async_training.partial_rollout=False"],
        (0.5, "finish", "carry"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 80), (512, 8, "trainer"),
    ),
    "verl until 2026-02": (
        ["verl", *FULLY_ASYNC, "async_training.use_rollout_log_probs=True", "async_training.compute_prox_log_prob=True",
         "async_training.staleness_threshold=0"],
        (None, "continue", "wait"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 80), (512, 8, "trainer"),
    ),
    "trinity, one step off": (
        ["trinity", GSM8K_TRINITY.replace("sync_interval: 1", "sync_offset: 1")],
        (1, "finish", "wait"), ("fsdp:d4t1", "vllm:d4t1p1", "apart", 256), (96, 1, "engine"),
    ),
    "verl, on GPUs of its own": (
        ["verl", *SEPARATE], (2, "continue", "carry"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 256), (256, 4, "trainer"),
    ),
    # What is in flight continues while the policy trains.
    "verl, on shared GPUs": (
        ["verl", *GRPO_VERL, "trainer.v1.trainer_mode=colocate_async", "actor_rollout_ref.rollout.free_cache_engine=True"],
        (1, "continue", "carry"), ("fsdp:d8t1", "vllm:d8t1p1", "colocated", 256), (256, 4, "trainer"),
    ),
    "verl, of another trainer": (
        ["verl", *GRPO_VERL, "trainer.use_v1=False", "trainer.v1.trainer_mode=colocate_async"],
        (None, "continue", "wait"), ("fsdp:d8t1", "vllm:d8t1p1", "colocated", 256), (256, 4, "trainer"),
    ),
    "verl's partial rollouts": (
        ["verl", *GRPO_VERL, "-m=recipe.partial_rollout.main_ppo"],
        (1, "continue", "carry"), ("fsdp:d8t1", "vllm:d8t1p1", "colocated", 256), (256, 4, "trainer"),
    ),
    "verl, scored while others are sampled": (
        ["verl", *FULLY_ASYNC, "-m=recipe.reward_queue.main", "async_training.enable_reward_queue=True"],
        (0.5, "continue", "carry"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 80), (512, 8, "engine"),
    ),
    "rllm": (
        ["verl", *GRPO_VERL, "-m=verl.trainer.main_ppo_async", "trainer.n_training_gpus_per_node=6",
         "actor_rollout_ref.rollout.enable_log_prob=True"],
        (1, "finish", "wait"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 256), (256, 4, "engine"),
    ),
    "verl until 2025-11": (
        ["verl", *ONE_STEP_OFF, "-m=recipe.one_step_off_policy.main_ppo"],
        (1, "finish", "wait"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 256), (256, 4, "trainer"),
    ),
    "verl": (
        ["verl", *ONE_STEP_OFF, "-m=verl.experimental.one_step_off_policy.main_ppo"],
        (1, "finish", "wait"), ("fsdp:d6t1", "vllm:d2t1p1", "apart", 256), (256, 4, "engine"),
    ),
    "roll": (
        ["roll", GSM8K_ROLL + "  device_mapping: list(range(8,12))\nasync_generation_ratio: 2\n"],
        (2, "continue", "wait"), ("megatron:d4t2p1", "vllm:d2t2p1", "apart", 256), (64, 8, "trainer"),
    ),
    # 80 prompts at once, of 8 samples on 2 engines: below the 128 that may be given out.
    "skyrl": (
        ["skyrl", *ASYNC_SKYRL, "-m=examples.train.fully_async.main_fully_async", "trainer.fully_async.max_staleness_steps=1",
         "trainer.fully_async.num_parallel_generation_workers=80"],
        (1, "continue", "carry"), ("fsdp:d8t1", "vllm:d2t2p1", "apart", 320), (64, 1, "trainer"),
    ),
    "skyrl, one step off": (
        ["skyrl", *ASYNC_SKYRL, "-m=examples.train.async.main_async"],
        (1, "finish", "wait"), ("fsdp:d8t1", "vllm:d2t2p1", "apart", 1024), (64, 1, "trainer"),
    ),
    "skyrl in turns on GPUs of its own": (
        ["skyrl", *ASYNC_SKYRL], (None, "continue", "wait"), ("fsdp:d8t1", "vllm:d2t2p1", "apart", 1024), (64, 1, "trainer"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AHEAD)
def test_a_run_that_samples_ahead_has_samples_as_old_as_there(name):
    (system, *words), ahead, places, updates = AHEAD[name]
    run = config(system, tree=words[0]) if "\n" in words[0] else config(system, *words)
    assert (run.rollout.max_staleness, run.rollout.interrupt, run.rollout.tail) == ahead
    engine, algorithm = run.engine, run.algorithm
    assert (run.policy.backend, str(engine.layout), engine.placement, engine.max_num_seqs) == places
    old = algorithm.resolved.rollout_correction.old_logprobs_from
    assert (run.data.prompts_per_step, algorithm.updates_per_step, old) == updates


def test_responses_continue_in_servers_that_stay_where_verl_samples():
    """On GPUs of their own they need not stay, and an engine in the ranks would finish them first."""
    for words in (["trainer.v1.trainer_mode=colocate_async"], ["-m=recipe.partial_rollout.main_ppo"]):
        engine = config("verl", *GRPO_VERL, *words, "actor_rollout_ref.rollout.free_cache_engine=True").engine
        assert engine.is_server and not engine.sleep
    assert not config("verl", *GRPO_VERL).engine.is_server


def test_trinitys_steps_are_counted_in_its_syncs():
    tree = GSM8K_TRINITY.replace("sync_interval: 1", "sync_interval: 8").replace(
        "batch_size: 96", "batch_size: 96\n  total_steps: 160"
    )
    run = config("trinity", tree=tree.replace("max_token_len", "save_interval: 100\n  max_token_len"))
    assert (run.trainer.steps, run.trainer.save_every, run.policy.optimizer.warmup_steps) == (20, 13, 20)
    # The warm-up over 20 of its steps is one over 20 updates.
    assert run.policy.optimizer.schedule_per == "update"


BOXED_TRINITY = GSM8K_TRINITY.replace("math_workflow", "math_boxed_workflow")


def of_taskset(text: str, tree: str = BOXED_TRINITY) -> RunConfig:
    """Trinity's run with this in its task set."""
    return config("trinity", tree=tree.replace("{path: d.parquet,", f"{{path: d.parquet, {text},"))


def test_trinitys_workflow_of_boxed_answers_asks_and_scores_as_its_arguments_say():
    plain, base = of_taskset("split: train"), of_taskset("workflow_args: {use_base: true}")
    assert plain.data.chat_template is None and plain.reward.functions == {"math": 1.0}
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    template = jinja2.Template(base.data.chat_template, trim_blocks=True, lstrip_blocks=True)
    # format_prompt of customized_math_workflows.py.
    assert template.render(messages=turns) == "System:Add.\nUser:\n1+1?\nAssistant:\n"
    assert template.render(messages=turns[1:]) == "User:\n1+1?\nAssistant:\n"
    for arguments, weight in (("with_think: true", 0.1), ("with_think: true, format_score_coef: 0.5", 0.5)):
        run = of_taskset(f"workflow_args: {{{arguments}}}")
        assert run.reward.functions == {"math": 1.0, "think": weight}
        assert "<think>\n ...your reasoning process here... </think>\n first." in str(run.data.system_prompt)
    taskset = (
        'default_reward_fn_type: math_dapo_reward, workflow_args: {with_think: true}, format: {system_prompt: "Add.\\n"}'
    )
    tree = BOXED_TRINITY.replace("format: {prompt_key: question, response_key: answer}, ", "")
    dapo = of_taskset(taskset, tree)
    assert (dapo.reward.functions, dapo.data.system_prompt) == ({"math": 1.0}, "Add.\n")
    for tree, argument in ((BOXED_TRINITY, "tools: [search]"), (GSM8K_TRINITY, "use_base: true")):
        changed = tree.replace("{path: d.parquet,", f"{{path: d.parquet, workflow_args: {{{argument}}},")
        assert "an argument of math_" in translated("trinity", tree=changed).refusals[0]


def test_trinitys_evaluation_is_sampled_as_its_sets_say():
    def evaluated(*sets: str):
        tree = GSM8K_TRINITY.replace("    default_workflow", f"    eval_tasksets: [{', '.join(sets)}]\n    default_workflow")
        return translated("trinity", tree=tree.replace("model_path: m", "model_path: m, temperature: 0.8"))

    plain, sampled, greedy = (
        "{path: v.parquet}",
        "{path: v.parquet, repeat_times: 32, rollout_args: {temperature: 0.6, top_p: 0.7}}",
        ("{path: v.parquet, rollout_args: {temperature: 0.0}}"),
    )
    for sets, expected in (
        ((plain,), (1, 0.8, 1.0)),
        ((sampled, sampled), (32, 0.6, 0.7)),
        ((greedy,), (0, 1.0, 1.0)),
        ((), (0, 1.0, 1.0)),
    ):
        eval_config = RunConfig.of(evaluated(*sets).tree).eval
        assert (eval_config.samples, eval_config.temperature, eval_config.top_p) == expected
    (outcome,) = [entry for entry in evaluated(sampled, plain).outcomes if entry.kind == "unsupported"]
    assert "evaluation sets with different sampling" in outcome.reason and not outcome.is_refused


def test_trinitys_penalty_of_long_responses_is_that_of_dapo():
    """dapo_reward.py: nothing up to max - cache tokens, then linear to -penalty_factor at max."""
    taskset = "default_reward_fn_type: math_dapo_reward, reward_fn_args: {enable_overlong_penalty: %s, penalty_factor: 0.5, max_response_length: %d, cache_length: 256}"
    on, off = (of_taskset(taskset % (flag, 1024)).algorithm for flag in ("true", "false"))
    assert (on.resolved.overlong_buffer, on.resolved.overlong_penalty, off.resolved.overlong_buffer) == (256, 0.5, 0)
    lengths_N = torch.tensor([767, 768, 896, 1023, 1024])
    rewards_N = Objective.of(on.resolved).shaping(torch.zeros(5), lengths_N, 1024)
    expected = [0.0 if length < 768 else (768 - length) / 256 * 0.5 for length in lengths_N.tolist()]
    assert rewards_N.tolist() == pytest.approx(expected)
    other = BOXED_TRINITY.replace("{path: d.parquet,", f"{{path: d.parquet, {taskset % ('true', 2048)},")
    assert "another length than model.max_response_tokens" in translated("trinity", tree=other).refusals[0]


def test_trinitys_tasks_come_in_the_order_of_the_file_unless_it_is_asked_to_shuffle():
    orders = {
        "split: train": False,
        "data_selector: {selector_type: sequential}": False,
        "data_selector: {selector_type: shuffle}": True,
    }
    assert {order: of_taskset(order).data.shuffle for order in orders} == orders
    random = BOXED_TRINITY.replace("{path: d.parquet,", "{path: d.parquet, data_selector: {selector_type: random},")
    assert "the order of tasks random" in translated("trinity", tree=random).refusals[0]
    assert "1+1" in str(
        config(
            "trinity", tree=GSM8K_TRINITY.replace("model_path: m", "model_path: m, custom_chat_template: '{{ 1+1 }} '")
        ).data.chat_template
    )


MIX_TRINITY = of_type(
    "mix_chord",
    "kl_loss_fn_args: {kl_coef: 0.0}, sample_strategy_args: {expert_data_ratio: 0.2}, policy_loss_fn_args: {mu_warmup_steps: 20, "
    "mu_decay_steps: 40, mu_peak: 0.5, mu_valley: 0.02, use_dynamic_bsz: true, ppo_mini_batch_size: 960, "
    "train_batch_size_usual: 768, train_batch_size_expert: 192, ngpus_trainer: 4}",
).replace(
    "buffer:\n",
    "buffer:\n  train_batch_size: 960\n  trainer_input: {auxiliary_buffers: {sft_dataset: {path: e.parquet, total_epochs: 9, "
    "format: {prompt_type: messages, messages_key: turns}}}}\n",
)


def test_trinitys_mixture_with_an_expert_is_grpo_with_one():
    """A fifth of 960 samples are the expert's; μ is counted in the trainer's steps, of which two between syncs are one here."""
    run = config("trinity", tree=MIX_TRINITY.replace("sync_interval: 1", "sync_interval: 2"))
    data, chosen = run.data, run.algorithm.resolved
    assert (data.prompts_per_step, data.expert_per_step, data.expert, data.messages_key) == (
        192,
        384,
        ["e.parquet"],
        "turns",
    )
    assert chosen.expert == Imitation(0.5, 0.02, 20, 40, "phi", "token-mean")
    assert (chosen.advantage, chosen.normalize, chosen.surrogate, chosen.dual_clip, chosen.kl.coef) == (
        "group", "group", "ppo_clip", 3.0, 0.0,
    )  # fmt: skip
    plain = MIX_TRINITY.replace("mix_chord", "mix").replace(
        "mu_warmup_steps: 20, mu_decay_steps: 40, mu_peak: 0.5, mu_valley: 0.02", "mu: 0.3"
    )
    texts = plain.replace(
        "prompt_type: messages, messages_key: turns", "prompt_type: plaintext, prompt_key: question, response_key: said"
    )
    for tree in (plain, texts):
        assert config("trinity", tree=tree).algorithm.resolved.expert == Imitation(0.3, None, 0, 0, "none", "token-mean")
    assert config("trinity", tree=texts).data.response_key == "said"
    steady = MIX_TRINITY.replace("mu_warmup_steps: 20, mu_decay_steps: 40, mu_peak: 0.5, ", "enable_phi_function: false, ")
    assert config("trinity", tree=steady).algorithm.resolved.expert == Imitation(0.02, None, 0, 0, "none", "token-mean")


@pytest.mark.parametrize(
    ("passage", "instead", "reason"),
    [
        ("train_batch_size: 960", "train_batch_size: 900", "96 x 8 and 180 of an expert: both numbers must be equal"),
        (
            "ppo_mini_batch_size: 960",
            "ppo_mini_batch_size: 256",
            "a loss scaled by another batch size than the run's: set it to 960",
        ),
        ("train_batch_size_expert: 192, ", "", "set it to 192"),
        ("use_dynamic_bsz: true", "use_dynamic_bsz: false", "scaled by the number of GPUs"),
        ("kl_coef: 0.0", "kl_coef: 0.1", "a penalty that also counts the expert's tokens"),
        ("mu_decay_steps: 40", "mu_decay_steps: 0", "drops at once"),
        (
            "prompt_type: messages, messages_key: turns",
            "prompt_type: plaintext, prompt_key: other",
            "a column of prompts that is not the tasks' column",
        ),
        ("expert_data_ratio: 0.2", "expert_data_ratio: 0.2, other: 1", "another choice of samples"),
        (
            "sample_strategy_args",
            "sample_strategy: staleness_control, sample_strategy_args",
            "another choice of samples: staleness_control",
        ),
    ],
)
def test_a_mixture_with_an_expert_that_would_be_another_is_refused(passage, instead, reason):
    assert passage in MIX_TRINITY
    refusals = translated("trinity", tree=MIX_TRINITY.replace(passage, instead, 1)).refusals
    assert refusals and any(reason in refusal for refusal in refusals)


EXPLORER_TRINITY = GSM8K_TRINITY.replace("mode: both", "mode: explore").replace("gpu_per_node: 8", "gpu_per_node: 4")
TRAINER_TRINITY = (
    GSM8K_TRINITY.replace("mode: both", "mode: train")
    .replace("gpu_per_node: 8", "gpu_per_node: 4")
    .replace("buffer:\n  batch_size: 96", "buffer:\n  train_batch_size: 768")
    .replace("explorer: {rollout_model: {engine_num: 4, tensor_parallel_size: 1}}\n", "")
)


def test_explorer_and_trainer_of_trinity_in_two_files_are_the_run_of_mode_both(tmp_path):
    """Each has four GPUs; the explorer waits for weights every sync_interval of its steps, the trainer for its samples."""
    files = {"explorer.yaml": EXPLORER_TRINITY, "trainer.yaml": TRAINER_TRINITY}
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("sync_interval: 1", "sync_interval: 10"))
    whole = config("trinity", tree=GSM8K_TRINITY.replace("sync_interval: 1", "sync_interval: 10"))
    for names in (list(files), list(files)[::-1]):
        words = [word for name in names for word in ("--config", str(tmp_path / name))]
        translation = translate_words("trinity", words, HOME)
        # Each file counts the GPUs of its own half.
        assert translation.refusals == [] and "launch" not in translation.tree
        assert replace(RunConfig.from_tree(translation.tree), launch=whole.launch) == whole
        (refusal,) = translate_words("trinity", [*words, "synchronizer.sync_style=explorer_driven"], HOME).refusals
        assert "weights that are synchronized on demand" in refusal
    assert whole.algorithm.updates_per_step == 10
    for text in files.values():
        assert "pass the other program's file too" in translated("trinity", tree=text).refusals[0]
    (tmp_path / "trainer.yaml").write_text(TRAINER_TRINITY.replace("repeat_times: 8", "repeat_times: 4"))
    with pytest.raises(
        ConfigError, match=r"must have the same algorithm.repeat_times, synchronizer.sync_interval: got .*=8"
    ):
        translate_words("trinity", [str(tmp_path / name) for name in files], HOME)


def in_buffer(text: str) -> str:
    """Trinity's GRPO run with this in its experience buffer."""
    return GSM8K_TRINITY.replace("buffer:\n", f"buffer:\n  trainer_input: {{experience_buffer: {{{text}}}}}\n")


@pytest.mark.parametrize(
    "queue",
    [
        "replay_buffer: {enable: true, priority_fn: linear_decay, priority_fn_args: {decay: 0.1}}",
        "replay_buffer: {enable: true, priority_fn: decay_limit_randomization}",
        "use_priority_queue: true, replay_buffer_kwargs: {priority_fn: linear_decay, decay: 0.1}",
        "capacity: 96, replay_buffer: {enable: false, reuse_cooldown_time: 40}",
    ],
)
def test_a_queue_that_reads_every_sample_once_and_latest_first_needs_no_priorities(queue):
    # The older spelling tells an older release, whose other defaults are its own.
    without = in_buffer("use_priority_queue: false") if queue.startswith("use_priority_queue") else GSM8K_TRINITY
    assert config("trinity", tree=in_buffer(queue)) == config("trinity", tree=without)


@pytest.mark.parametrize(
    ("queue", "interval", "reason"),
    [
        ("replay_buffer: {enable: true, reuse_cooldown_time: 40}", "sync_interval: 1", "after some seconds"),
        ("use_priority_queue: true, reuse_cooldown_time: 40", "sync_interval: 1", "after some seconds"),
        ("replay_buffer: {enable: true, priority_fn: best}", "sync_interval: 1", "the priority best"),
        ("replay_buffer: {enable: true, priority_fn_args: {sigma: 0.1}}", "sync_interval: 1", "noise"),
        ("replay_buffer: {enable: true}", "sync_interval: 2, sync_offset: 1", "keeps older ones"),
        ("capacity: 100, replay_buffer: {enable: true}", "sync_interval: 2", "drops samples"),
    ],
)
def test_a_queue_that_learns_again_or_leaves_samples_over_is_refused(queue, interval, reason):
    (refusal,) = translated("trinity", tree=in_buffer(queue).replace("sync_interval: 1", interval)).refusals
    assert reason in refusal


def test_keys_of_trinity_before_2025_06_say_what_verls_said():
    """trainer.actor_* came over verl's keys for the same; β of dpo was the coefficient; beta1 and beta2 were read by no one."""
    section = "  actor_use_kl_loss: true\n  actor_kl_loss_coef: 0.2\n"
    dpo = "  trainer_config: {actor_rollout_ref: {actor: {optim: {beta1: 0.9, beta2: 0.95}}}}\n"
    before = DPO_TRINITY.replace("trainer: {max_token_len_per_gpu: 16384}\n", "trainer:\n  max_token_len_per_gpu: 16384\n")
    run = config("trinity", tree=before + section + dpo)
    assert (run.algorithm.resolved.beta, run.policy.optimizer.betas) == (0.2, [0.9, 0.999])
    verl = "  trainer_config: {actor_rollout_ref: {actor: {kl_loss_type: mse, entropy_coeff: 0.01, clip_ratio: 0.3}}}\n"
    chosen = config("trinity", tree=GSM8K_TRINITY + section + "  actor_grad_clip: 0.5\n" + verl)
    resolved = chosen.algorithm.resolved
    assert (resolved.kl.estimator, resolved.kl.coef, resolved.kl.place, resolved.entropy_coef) == ("k2", 0.2, "loss", 0.01)
    assert (resolved.clip_low, resolved.clip_high, chosen.policy.optimizer.clip_grad) == (0.3, 0.3, 0.5)
    # What neither file says was verl's default: a penalty in the reward, where there is none in the loss, and an entropy.
    without = config("trinity", tree=GSM8K_TRINITY + "  actor_clip_ratio: 0.1\n").algorithm.resolved
    assert (without.kl.place, without.kl.estimator, without.kl.coef) == ("reward", "k1", 0.001)
    assert (without.entropy_coef, without.clip_low) == (0.001, 0.1)
    # Today Trinity's own keys come over verl's.
    today = config("trinity", tree=GSM8K_TRINITY + verl).algorithm.resolved
    assert (today.kl.estimator, today.kl.coef, today.entropy_coef, today.clip_low) == ("k2", 0.001, 0.0, 0.2)
    gamma = PPO_TRINITY.replace("repeat_times: 4,", "repeat_times: 4, gamma: 0.9, lam: 0.8,")
    assert (
        config("trinity", tree=gamma).algorithm.resolved.gamma,
        config("trinity", tree=gamma).algorithm.resolved.lam,
    ) == (
        0.9,
        0.8,
    )


def test_operators_on_data_of_trinity_act_where_a_server_or_a_pipeline_is_named():
    asked = (
        "data_processor: {source_data_path: d, dj_process_desc: sort by difficulty, agent_model_config: {model_name: q}}\n"
    )
    assert config("trinity", tree=GSM8K_TRINITY + asked) == config("trinity", tree=GSM8K_TRINITY)
    for acts in ("{data_workflow_url: 'http://s:5005'}", "{experience_pipeline: {operators: [{name: reward_filter}]}}"):
        (refusal,) = translated("trinity", tree=f"{GSM8K_TRINITY}data_processor: {acts}\n").refusals
        assert "operators on data" in refusal


def test_a_critic_recomputes_values_where_several_steps_of_another_trainer_are_one():
    assert config("trinity", tree=PPO_TRINITY).algorithm.values_per == "step"
    run = config("trinity", tree=PPO_TRINITY.replace("sync_interval: 1", "sync_interval: 8"))
    assert (run.algorithm.values_per, run.algorithm.updates_per_step) == ("update", 8)
    assert (run.critic.optimizer.schedule_per, run.policy.optimizer.schedule_per) == ("update", "update")
    words = ["algorithm.adv_estimator=gae", "critic.model.path=c", "async_training.require_batches=1"]
    assert config("verl", *FULLY_ASYNC, *words).algorithm.values_per == "update"
    assert config("verl", *SEPARATE, *words[:2]).algorithm.values_per == "update"
    assert (
        config("trinity", tree=GSM8K_TRINITY.replace("sync_interval: 1", "sync_interval: 8")).algorithm.values_per == "step"
    )


def test_verls_asynchronous_steps_are_counted_in_its_syncs():
    """51200 prompts of 512 a sync; rollout.test_freq said it until 2026-02."""
    run = config("verl", *FULLY_ASYNC, "trainer.test_freq=20", "trainer.save_freq=30")
    assert (run.trainer.steps, run.trainer.eval_every, run.trainer.save_every) == (100, 20, 30)
    assert run.policy.optimizer.schedule_per == 2
    assert config("verl", *FULLY_ASYNC, "rollout.test_freq=7", "trainer.test_freq=20").trainer.eval_every == 7


OWN_REFERENCE = (
    "reference: {{strategy_args: {{strategy_name: {}, strategy_config: {}}}, device_mapping: 'list(range(0,8))'}}\n"
)


@pytest.mark.parametrize(("words", "reference"), [
    (["roll", GSM8K_ROLL + OWN_REFERENCE.format("megatron_infer", "{pipeline_model_parallel_size: 4}")], "megatron:d2t1p4"),
    (["roll", GSM8K_ROLL + OWN_REFERENCE.format("megatron_infer", "{tensor_model_parallel_size: 2}")], None),
    (["roll", GSM8K_ROLL + OWN_REFERENCE.format("megatron_infer", "{tensor_model_parallel_size: 16}")], None),
    (["roll", GSM8K_ROLL + OWN_REFERENCE.format("hf_infer", "~")], None),
    (["areal", AREAL_PPO.replace("ref: {path: m}", "ref: {path: m, backend: 'megatron:d1t4'}")], "megatron:d1t4p1"),
    (["areal", AREAL_PPO.replace("ref: {path: m}", "ref: {path: m, backend: '${actor.backend}'}")], None),
    # verl lays its reference out as the actor, whatever these say.
    (["verl", *GRPO_VERL, "actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2"], None),
])  # fmt: skip
def test_a_reference_has_the_layout_that_it_has_there(words, reference):
    system, *rest = words
    run = config(system, tree=rest[0]) if "\n" in rest[0] else config(system, *rest)
    assert run.reference.backend == reference


def test_a_critic_has_the_layout_that_it_has_there():
    tree = AREAL_PPO.replace("critic: {path: c,", "critic: {path: c, backend: 'megatron:d4',")
    assert config("areal", tree=tree).critic.backend == "megatron:d4t1p1"
    learns = "training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 16}"
    sizes = "{strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 4}}"
    section = f"critic: {{{learns}, strategy_args: {sizes}}}\n"
    assert config("roll", tree=PPO_ROLL + section).critic.backend == "megatron:d2t4p1"


@pytest.mark.parametrize("system", ["verl", "siirl"])
def test_weights_of_a_megatron_core_checkpoint_go_to_the_role_that_names_it(system):
    """verl reads config.json and tokenizer of the model's directory all the same."""
    words = ["actor_rollout_ref.actor.strategy=megatron", "actor_rollout_ref.model.path=hf", "data.train_files=d.parquet"]
    ours = [
        "actor_rollout_ref.actor.megatron.use_dist_checkpointing=True",
        "actor_rollout_ref.actor.megatron.dist_checkpointing_path=mc",
    ]
    reference = [word.replace(".actor.", ".ref.").replace("=mc", "=mr") for word in ours]
    kl = ["actor_rollout_ref.actor.use_kl_loss=True"]

    def weights(*more: str) -> tuple[str, str | None, str | None]:
        run = config(system, *words, *more)
        return run.model.path, run.model.config, run.reference.path

    assert weights() == weights(ours[1]) == ("hf", None, None)
    assert weights(*ours) == ("mc", "hf", None)
    assert weights(*ours, *kl) == ("mc", "hf", "hf")
    assert weights(*ours, *reference, *kl) == ("mc", "hf", "mr")
    assert weights(*reference, *kl) == ("hf", "hf", "mr")
    value = [
        "algorithm.adv_estimator=gae",
        "critic.megatron.use_dist_checkpointing=True",
        "critic.megatron.dist_checkpointing_path=mv",
    ]
    run = config(system, *words, *value, "critic.model.path=hf")
    assert (run.critic.path, run.model.path, run.model.config) == ("mv", "hf", "hf")
    grpo = config(system, *words, "algorithm.adv_estimator=grpo", *value[1:], "actor_rollout_ref.rollout.n=2")
    assert (grpo.critic.path, grpo.model.config) == (None, None), "GRPO has no critic"
    judge = [
        "reward_model.enable=True",
        "reward_model.megatron.use_dist_checkpointing=True",
        "reward_model.megatron.dist_checkpointing_path=mj",
    ]
    assert config(system, *words, *judge, "reward_model.model.path=hf").reward.model.path == "mj"
    (refused,) = translated(system, *words, *value, "critic.model.path=other").refusals
    assert "a Megatron-Core checkpoint of another model" in refused


def test_a_value_of_several_lines_does_not_leave_the_comment_that_shows_it():
    translation = translated("verl", "trainer.balance_batch=1\nmodel: {path: evil}", "trainer.x\nseed=1")
    assert set(read_mapping(writer.write(translation, "verl", strict=False), "run.yaml")) <= set(translation.tree)
