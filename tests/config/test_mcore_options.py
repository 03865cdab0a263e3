"""Megatron-Core's own options: checked by name and type, refused with a reason, and those that pass act."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config import RunConfig, mcore_options
from fivefold.config.learners import MegatronConfig
from fivefold.config.mcore_options import Options
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout, PipelineSplit
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2
from tests.support.shards import shard_of_replica
from tests.support.two_steps import (
    LENGTHS,
    OBJECTIVE,
    POLICY,
    ROUTER,
    assert_equal,
    expected,
    megatron_step,
    run_step,
    whole_batch,
)


def options(**sections: dict[str, Any]) -> Options:
    return Options(**{name: sections.get(name, {}) for name in mcore_options.SECTIONS})


def errors(chosen: Options, section: str) -> list[str]:
    findings = Findings(section=section)
    chosen.check(findings)
    return findings.errors


@pytest.mark.parametrize(
    ("section", "given", "says"),
    [
        ("transformer", {"recompute_granularty": "full"}, "did you mean 'recompute_granularity'"),
        ("transformer", {"hidden_size": 64}, "comes from the model's config.json"),
        ("transformer", {"tensor_model_parallel_size": 2}, "layout string"),
        ("transformer", {"virtual_pipeline_model_parallel_size": 2}, "belongs into policy.megatron.pipeline"),
        ("pipeline", {"recompute_method": "uniform"}, "belongs into policy.megatron.transformer"),
        ("transformer", {"fp8": "hybrid"}, "needs Transformer Engine"),
        ("transformer", {"moe_router_dtype": "fp16"}, "must be fp32 or fp64 or null, got 'fp16'"),
        ("transformer", {"moe_z_loss_coeff": "small"}, "must be a number or null, got 'small'"),
        ("transformer", {"moe_aux_loss_coeff": True}, "must be a number or a list of values, each a number, got True"),
        ("transformer", {"moe_router_load_balancing_type": "sinkhorn"}, "must be none, seq_aux_loss"),
        ("transformer", {"moe_token_dispatcher_type": "flex"}, "deep_ep"),
        ("transformer", {"moe_expert_capacity_factor": 1.0}, "never drop tokens"),
        ("ddp", {"overlap_param_gather": True}, "needs overlap_grad_reduce"),
        ("ddp", {"use_megatron_fsdp": True}, "is Megatron-FSDP's"),
        ("ddp", {"data_parallel_sharding_strategy": "optim"}, "use_distributed_optimizer shards"),
        ("transformer", {"use_kitchen": True}, "it needs nvidia-kitchen"),
        ("optimizer", {"lr": 1e-3}, "set policy.optimizer.lr"),
        ("optimizer", {"exp_avg_dtype": "bfloat16"}, "needs use_precision_aware_optimizer"),
        ("optimizer", {"exp_avg_dtype": "int8"}, "must be float32 or bfloat16 or float16, got 'int8'"),
        ("optimizer", {"loss_scale_window": "1e3 steps"}, "must be a number, got '1e3 steps'"),
        ("optimizer", {"hysteresis": "1e0"}, "must be a whole number, got '1e0'"),
        ("optimizer", {"muon_momentum": 0.9}, "the optimizer is Adam"),
        ("pipeline", {"overlap_p2p_comm": False}, "messages overlap with virtual stages"),
        ("optimizer", {"loss_scale": 0.0}, "must be above 0: got 0.0"),
        ("optimizer", {"decoupled_weight_decay": False, "use_precision_aware_optimizer": True}, "must be true with"),
        ("optimizer", {"loss_scale_window": 0.0}, "must be above 0: got 0.0"),
        ("optimizer", {"min_loss_scale": 2.0, "initial_loss_scale": 1.0}, "must not be above initial_loss_scale = 1: got 2"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_with_the_reason(section, given, says):
    (error,) = errors(options(**{section: given}), "policy")
    assert f"policy.megatron.{section}" in error and says in error


def test_a_number_with_an_exponent_is_read_as_a_number(tmp_path):
    path = tmp_path / "run.yaml"
    kinds = "moe_router_load_balancing_type: [aux_loss, seq_aux_loss], moe_aux_loss_coeff: [1e-2, 1E-3]"
    path.write_text(f"{{model: {{path: m}}, policy: {{megatron: {{transformer: {{{kinds}}}}}}}}}")
    config = RunConfig.from_yaml(path, ["policy.megatron.transformer.moe_z_loss_coeff=1e-3"])
    chosen = config.policy.megatron.options
    assert (chosen.transformer["moe_aux_loss_coeff"], chosen.transformer["moe_z_loss_coeff"]) == ([0.01, 0.001], 0.001)
    assert errors(chosen, "policy") == []


@pytest.mark.parametrize("section", mcore_options.SECTIONS)
def test_what_an_option_must_be_is_said_in_words(section):
    kinds = {
        word
        for name, option in mcore_options.table(section).items()
        if option.part in ("acts", "no_effect")
        for word in mcore_options._described(mcore_options._fields(section)[name])
    }
    assert not [word for word in kinds if "[" in word or "Megatron" in word]


def test_an_error_and_what_to_do_name_the_section_of_the_model():
    chosen = options(optimizer={"lr": 1e-3}, pipeline={"recompute_method": "uniform"}, transformer={"bf16": True})
    assert errors(chosen, "critic") == [
        "critic.megatron.transformer.bf16 cannot be set: set policy.dtype",
        "critic.megatron.pipeline.recompute_method belongs into critic.megatron.transformer",
        "critic.megatron.optimizer.lr cannot be set: set critic.optimizer.lr",
    ]


@pytest.mark.parametrize(
    ("pipeline", "virtual", "key"),
    [
        ({"batch_p2p_comm": True}, 2, "batch_p2p_comm"),
        ({"overlap_p2p_comm_warmup_flush": True}, 1, "overlap_p2p_comm_warmup_flush"),
        ({"batch_p2p_comm": False}, 1, None),
        ({"overlap_p2p_comm_warmup_flush": True}, 2, None),
    ],
)
def test_messages_that_do_not_fit_the_virtual_stages_are_refused(pipeline, virtual, key):
    assert (mcore_options.messages_fault(pipeline, virtual) or (None,))[0] == key


def test_what_changes_nothing_is_reported_and_not_passed_on():
    chosen = options(ddp={"average_in_collective": True, "bucket_size": 7}, transformer={"moe_aux_loss_coeff": 0.1})
    assert errors(chosen, "policy") == []
    assert chosen.effective("ddp") == {"bucket_size": 7}
    findings = Findings(section="critic")
    chosen.report_ignored(findings, experts=True, recompute="none")
    keys = [key for key, _ in findings.ignored]
    assert keys == ["critic.megatron.ddp.average_in_collective", "critic.megatron.transformer.moe_aux_loss_coeff"]
    chosen.report_ignored(findings, experts=False, recompute="none")
    assert findings.ignored[-1] == ("critic.megatron.transformer.moe_aux_loss_coeff", "the model has no experts")


def test_options_are_checked_without_torch():
    code = (
        "import sys; from fivefold.config.mcore_options import Options; from fivefold.keys.findings import Findings;"
        "found = Findings(); Options({'fp8': 'hybrid'}, {}, {}, {}).check(found); assert found.errors; assert 'torch' not in sys.modules and 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- stages ----------------------------------------------------------------------------------------------------------


def layers_of_megatron_core(mesh, settings: dict[str, Any], layers: int) -> list[list[int]]:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=mesh.layout.pp,
        pipeline_dtype=torch.float32, **settings,
    )  # fmt: skip
    virtual, stages = config.virtual_pipeline_model_parallel_size, []
    with mesh.active():
        parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
        for stage in range(virtual or 1):
            first = get_transformer_layer_offset(config, vp_stage=stage if virtual else None)
            stages.append(list(range(first, first + get_num_layers_to_build(config, vp_stage=stage if virtual else None))))
    return stages


@pytest.mark.parametrize(
    ("layout", "layers", "settings"),
    [
        ("p2", 4, {}),
        ("p4", 8, VPP2),
        ("p2", 12, {"virtual_pipeline_model_parallel_size": 3}),
        ("p4", 7, {"num_layers_in_first_pipeline_stage": 1}),
        ("p4", 8, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3}),
        ("p3", 8, {"num_layers_in_last_pipeline_stage": 2}),
        ("p4", 14, {"num_layers_in_first_pipeline_stage": 2, **VPP2}),
        ("p4", 6, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
        ("p2", 6, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True, **VPP2}),
        ("p3", 5, {"account_for_loss_in_pipeline_split": True}),
        ("p2", 6, {"pipeline_model_parallel_layout": "Et*2|t*4L"}),
        ("p2", 6, {"pipeline_model_parallel_layout": "E|(tt|)*2ttL"}),
        ("p4", 4, {"pipeline_model_parallel_layout": "E|t,t|tt|L"}),
    ],
)
def test_stages_are_cut_as_megatron_core_cuts_them(cluster, layout, layers, settings):
    parsed = ParallelLayout.parse(f"megatron:{layout}")
    theirs = cluster.run(layers_of_megatron_core, f"megatron:{layout}", settings, layers)
    chunks = PipelineSplit.of(settings).split_layers(layers, parsed)
    for stage, counts in enumerate(theirs):
        # Where a chunk has no layer Megatron-Core's offset says nothing.
        assert [list(chunk) for chunk in chunks[stage]] == [layers if layers else [] for layers in counts]


@pytest.mark.parametrize(
    ("layout", "layers", "settings", "says"),
    [
        ("p3", 4, {}, "layers must be divisible by pp: got 4 layers for pp=3"),
        ("p2", 4, {"virtual_pipeline_model_parallel_size": 4}, "divisible by the virtual stages"),
        ("p1", 4, VPP2, "virtual stages need a pipeline"),
        ("p1", 4, {"num_layers_in_first_pipeline_stage": 1}, "need a pipeline"),
        ("p2", 4, {"num_layers_in_first_pipeline_stage": 5}, "divisible by pp"),
        (
            "p2",
            4,
            {"num_layers_in_first_pipeline_stage": 1, "account_for_loss_in_pipeline_split": True},
            "exclude each other",
        ),
        ("p2", 4, {"pipeline_model_parallel_layout": "Et|ttL"}, "4 times t"),
        ("p2", 4, {"pipeline_model_parallel_layout": "Et|t|ttL"}, "multiple of p stages"),
        ("p2", 4, {"pipeline_model_parallel_layout": "Ex|tL"}, "made of E, t, L"),
        ("p2", 4, {"pipeline_model_parallel_layout": "Ett|ttL", **VPP2}, "leave it out"),
    ],
)
def test_a_cut_that_is_not_possible_is_refused(layout, layers, settings, says):
    with pytest.raises(ValueError, match=says):
        PipelineSplit.of(settings).split_layers(layers, ParallelLayout.parse(f"megatron:{layout}"))


# --- options that act ------------------------------------------------------------------------------------------------


def calls_of(mesh, directory: Path, policy, base_T, watched: list[str]):
    """The step, and how often each of these functions of Megatron-Core ran in the first update."""
    import importlib

    counts = dict.fromkeys(watched, 0)

    def count(name: str) -> None:
        module, _, attribute = name.rpartition(":")
        owner: Any = importlib.import_module(module)
        *parents, last = attribute.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, last)

        def counted(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        setattr(owner, last, counted)

    for name in watched:
        count(name)
    return megatron_step(mesh, directory, policy, base_T), counts


def with_options(transformer: dict[str, Any], **changes: Any):
    return replace(POLICY, megatron=MegatronConfig(transformer=transformer), **changes)


ROUTED = with_options(ROUTER)
CHECKPOINT = "megatron.core.tensor_parallel.random:CheckpointFunction.forward"
WITHOUT_OUTPUT = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint"


RECOMPUTE = [
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, CHECKPOINT, 8),
    ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, CHECKPOINT, 4),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, CHECKPOINT, 6),
    ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, CHECKPOINT, 8),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, CHECKPOINT, 6),
    ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, CHECKPOINT, 2),
    ({"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}, CHECKPOINT, 6),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}, WITHOUT_OUTPUT, 6),
    ({"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}, WITHOUT_OUTPUT, 8),
    ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, WITHOUT_OUTPUT, 16),
]
"""Options, the function to watch, and how often it runs in two updates of one micro-batch."""


@pytest.fixture(scope="module")
def recomputed(cluster, models):
    """Results by place in RECOMPUTE."""
    directory, base_T = models("deepseek_v3"), expected(models("deepseek_v3"), ROUTED)[2]
    calls = {
        number: ("megatron:t2e2", calls_of, directory, with_options({**ROUTER, **transformer}), base_T, [watched])
        for number, (transformer, watched, _) in enumerate(RECOMPUTE)
    }
    return Together(cluster, calls)


@pytest.mark.parametrize("number", range(len(RECOMPUTE)), ids=lambda number: str(RECOMPUTE[number][0]))
def test_recompute_runs_as_often_as_it_says_and_changes_nothing(recomputed, models, number):
    """DeepSeek-V3's shape: 4 layers of latent attention, of which 3 have experts."""
    _, watched, times = RECOMPUTE[number]
    for result, counts in recomputed[number]:
        assert_equal([result], expected(models("deepseek_v3"), ROUTED))
        assert counts[watched] == times


REDUCE_SCATTER = "torch.distributed:reduce_scatter_tensor"


DDP = [
    {"use_distributed_optimizer": False},
    {"overlap_grad_reduce": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
    {"overlap_grad_reduce": True, "bucket_size": 5000},
    {"grad_reduce_in_fp32": False},
]
EXPERTS = [{"moe_token_dispatcher_type": "allgather"}, {"moe_grouped_gemm": False}, {"moe_router_dtype": "fp64"}]


@pytest.fixture(scope="module")
def steps(cluster, models):
    """Results by (layout, str(options)) of a model with experts."""
    directory, base_T = models("qwen3_moe"), expected(models("qwen3_moe"), ROUTED)[2]
    chosen = [
        *(
            (layout, keys, MegatronConfig(transformer=ROUTER, ddp=keys))
            for layout in ("d2", "d2e2", "d2p2e2")
            for keys in DDP
        ),
        *(
            (layout, keys, MegatronConfig(transformer={**ROUTER, **keys}))
            for layout in ("d2e2", "t2e2", "(attn:d2t2|ffn:t2e2)")
            for keys in EXPERTS
        ),
        *(
            (layout, PRECISION_AWARE, MegatronConfig(transformer=ROUTER, optimizer=PRECISION_AWARE))
            for layout in ("d1", "d2", "d2e2")
        ),
    ]
    calls = {}
    for layout, keys, megatron in chosen:
        policy = replace(POLICY, tokens_per_micro_batch=32, megatron=megatron)
        calls[layout, str(keys)] = (f"megatron:{layout}", megatron_step, directory, policy, base_T)
    return Together(cluster, calls)


PRECISION_AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize("layout", ["d2", "d2e2", "d2p2e2"])
@pytest.mark.parametrize("given", DDP, ids=str)
def test_data_parallel_options_change_no_number(steps, models, layout, given):
    assert_equal(steps[layout, str(given)], expected(models("qwen3_moe"), ROUTED))


def built_with(mesh, directory: Path, policy):
    """What the options did to the objects that Megatron-Core built."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2)
    updater = model._updater
    batch = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    model.train_step(batch, OBJECTIVE.loss)
    adam = updater.optimizer.chained_optimizers[0].optimizer
    state = next(iter(adam.state.values()))
    return {
        "outer": type(updater.optimizer.chained_optimizers[0]).__name__,
        "inner": type(adam).__name__,
        "buckets": len(updater.ddps[0].buffers[0].buckets),
        "grads": str(updater.ddps[0].buffers[0].grad_dtype),
        "hooks": len(updater.ddps[0].remove_forward_pre_hook_handles),
        "dtypes": {name: str(value.dtype) for name, value in state.items() if name != "step"},
        "rates": sorted({group["lr"] for group in updater.optimizer.param_groups}),
    }


@pytest.mark.parametrize(
    ("ddp", "optimizer", "name", "value"),
    [
        ({"use_distributed_optimizer": False}, {}, "outer", "FP32Optimizer"),
        ({"overlap_grad_reduce": True, "bucket_size": 5000}, {}, "buckets", lambda n: n > 1),
        ({}, {}, "hooks", 0),
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, {}, "hooks", lambda n: n > 0),
        (
            {},
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp32"},
            "dtypes",
            {"exp_avg": "torch.bfloat16", "exp_avg_sq": "torch.float32", "master_param": "torch.float32"},
        ),
        ({}, {"decoupled_lr": 5e-4}, "rates", [5e-4, 1e-3]),
    ],
)
def test_an_option_reaches_what_megatron_core_builds(cluster, models, ddp, optimizer, name, value):
    policy = replace(POLICY, megatron=MegatronConfig(ddp=ddp, optimizer=optimizer))
    for attributes in cluster.run(built_with, "megatron:d2", models("qwen3"), policy):
        assert value(attributes[name]) if callable(value) else attributes[name] == value


def test_gradients_are_kept_in_the_parameters_dtype_when_asked(cluster, models):
    policy = replace(POLICY, dtype="bfloat16", megatron=MegatronConfig(ddp={"grad_reduce_in_fp32": False}))
    assert {attributes["grads"] for attributes in cluster.run(built_with, "megatron:d2", models("qwen3"), policy)} == {
        "torch.bfloat16"
    }
    plain = replace(POLICY, dtype="bfloat16")
    assert {attributes["grads"] for attributes in cluster.run(built_with, "megatron:d2", models("qwen3"), plain)} == {
        "torch.float32"
    }


@pytest.mark.parametrize("layout", ["d1", "d2", "d2e2"])
def test_the_precision_aware_optimizer_with_float32_moments_takes_the_same_step(steps, models, layout):
    assert_equal(steps[layout, str(PRECISION_AWARE)], expected(models("qwen3_moe"), ROUTED))


def test_an_optimizer_on_the_cpu_is_refused_where_everything_is(cluster, models):
    """`megatron/test_layouts_on_gpus.py` has its updates."""
    megatron = MegatronConfig(optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0})
    with pytest.raises(RuntimeError, match="optimizer_cpu_offload needs a GPU"):
        cluster.run(built_with, "megatron:d1", models("qwen3"), replace(POLICY, dtype="bfloat16", megatron=megatron))


@pytest.mark.parametrize("given", EXPERTS, ids=str)
@pytest.mark.parametrize("layout", ["d2e2", "t2e2", "(attn:d2t2|ffn:t2e2)"])
def test_dispatchers_and_forms_of_experts_compute_the_same(steps, models, layout, given):
    assert_equal(steps[layout, str(given)], expected(models("qwen3_moe"), ROUTED))


def test_the_shared_expert_may_overlap_with_the_dispatcher(cluster, models):
    transformer = {**ROUTER, "moe_shared_expert_overlap": True}
    policy = replace(POLICY, megatron=MegatronConfig(transformer=transformer))
    oracle = expected(models("deepseek_v3"), replace(POLICY, megatron=MegatronConfig(transformer=ROUTER)))
    assert_equal(run_step(cluster, "t2e2", models("deepseek_v3"), policy, oracle=oracle), oracle)


def test_moments_in_bfloat16_follow_a_loop_written_out():
    from fivefold.megatron.optim.adam import PrecisionAwareAdam

    generator = torch.Generator().manual_seed(2)
    parameter = torch.nn.Parameter(torch.randn(7, generator=generator).bfloat16())
    adam = PrecisionAwareAdam(
        [parameter], lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6,
        exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16,
    )  # fmt: skip
    master, mean, square = parameter.detach().float().clone(), torch.zeros(7).bfloat16(), torch.zeros(7).bfloat16()
    for step in range(1, 6):
        gradient = torch.randn(7, generator=generator)
        parameter.decoupled_grad = gradient
        adam.step()
        exact_mean = 0.8 * mean.float() + 0.2 * gradient
        exact_square = 0.95 * square.float() + 0.05 * gradient**2
        mean, square = exact_mean.bfloat16(), exact_square.bfloat16()
        master = master * (1 - 0.01 * 0.1)
        master = master - 0.01 * (exact_mean / (1 - 0.8**step)) / ((exact_square / (1 - 0.95**step)).sqrt() + 1e-6)
        assert torch.allclose(adam.state[parameter]["master_param"], master, atol=1e-6)
        assert torch.equal(parameter.detach(), adam.state[parameter]["master_param"].bfloat16())
        assert adam.state[parameter]["exp_avg"].dtype == torch.bfloat16


def resumed(mesh, directory: Path, policy, path: Path):
    """Parameters after three updates in one go, and after one, a checkpoint, and two in a new model."""
    from fivefold.megatron.model import MegatronModel

    batch = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    model = MegatronModel(directory, policy, mesh, total_updates=3)
    model.train_step(batch, OBJECTIVE.loss)
    model.save(path)
    fresh = MegatronModel(directory, policy, mesh, total_updates=3, read_weights=False)
    fresh.load(path)
    states = []
    for one in (model, fresh):
        for _ in range(2):
            one.train_step(batch, OBJECTIVE.loss)
        states.append({name: tensor.clone() for name, tensor in one.weights()})
    return states


@pytest.mark.parametrize("layout", ["d2", "d2e2"])
@pytest.mark.parametrize(
    ("ddp", "optimizer", "dtype"),
    [
        ({"overlap_grad_reduce": True, "overlap_param_gather": True}, {}, "float32"),
        ({}, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, "bfloat16"),
        ({"use_distributed_optimizer": False}, {}, "float32"),
        ({"use_distributed_optimizer": False}, {}, "bfloat16"),
        ({}, {"decoupled_weight_decay": False}, "bfloat16"),
    ],
)
def test_a_run_with_these_options_continues_from_its_checkpoint_as_if_never_stopped(
    cluster, models, tmp_path, layout, ddp, optimizer, dtype
):
    policy = replace(POLICY, dtype=dtype, megatron=MegatronConfig(transformer=ROUTER, ddp=ddp, optimizer=optimizer))
    for undisturbed, stopped in cluster.run(resumed, f"megatron:{layout}", models("qwen3_moe"), policy, tmp_path):
        assert all(torch.equal(undisturbed[name], stopped[name]) for name in undisturbed)


@pytest.mark.parametrize(
    "given",
    [
        {"pipeline": {"batch_p2p_comm": False}},
        {"pipeline": {**VPP2, "overlap_p2p_comm_warmup_flush": True}},
        {
            "transformer": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "num_microbatches_with_partial_activation_checkpoints": 1,
            }
        },
        {"transformer": {"bias_activation_fusion": True}},
    ],
    ids=str,
)
def test_messages_between_stages_and_partial_recomputation_change_no_number(cluster, models, given):
    policy = replace(POLICY, tokens_per_micro_batch=32, megatron=MegatronConfig(**given))
    oracle = expected(models("qwen3"), POLICY)
    assert_equal(run_step(cluster, "p2", models("qwen3"), policy, oracle=oracle), oracle)
