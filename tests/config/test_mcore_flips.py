"""Each option of Megatron-Core that acts, flipped once: other functions run, other objects are built, or numbers differ."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fivefold.config import mcore_options
from fivefold.config.learners import MegatronConfig
from fivefold.config.mcore_options import RECOMPUTE, section_of, table
from tests.support.cluster import Together
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import make_model
from tests.support.two_steps import LENGTHS, OBJECTIVE, OPTIMIZER, POLICY, whole_batch

SECTIONS = ("transformer", "ddp", "optimizer")


@dataclass(frozen=True)
class Flip:
    """One option with a value that is not its default."""

    name: str
    value: Any
    section: str = "transformer"
    layout: str = "d1"
    model: str = "qwen3"
    base: dict[str, Any] = field(default_factory=dict)
    """Options of the same section that both runs have, because the flipped one is read with them only."""
    also: dict[str, Any] = field(default_factory=dict)
    """Options of `base` that change with the flipped one, because the two exclude each other."""
    dtype: str = "float32"
    pipeline: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = True
    schedule: str = "constant"

    def policy(self, flipped: bool) -> Any:
        options: dict[str, dict[str, Any]] = {"ddp": dict(self.ddp), "pipeline": dict(self.pipeline)}
        section = section_of(self.name) if self.section == "transformer" else self.section
        of_section = self.base | (self.also | {self.name: self.value} if flipped else {})
        options[section] = options.get(section, {}) | of_section
        return replace(
            POLICY,
            dtype=self.dtype,
            sequence_parallel=self.sequence_parallel,
            tokens_per_micro_batch=32,
            optimizer=replace(OPTIMIZER, schedule=self.schedule),
            megatron=MegatronConfig(**options),
        )

    def run(self, flipped: bool, time: int) -> tuple[Any, ...]:
        """Return the name of a run, which several flips may have in common."""
        return self.layout, self.model, str(self.policy(flipped)), time


FULL = RECOMPUTE["full"]
ODD = "qwen3 of 5 layers"
LOSS, EMBED = ({f"account_for_{name}_in_pipeline_split": True} for name in ("loss", "embedding"))
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
VIRTUAL = {"virtual_pipeline_model_parallel_size": 2}
AWARE = {"use_precision_aware_optimizer": True}
BALANCED = {"moe_router_load_balancing_type": "aux_loss"}
FUSED = {"bias_activation_fusion": True}
EXPERTS = {"layout": "d2e2", "model": "qwen3_moe"}
FLIPS = [
    Flip("recompute_granularity", "full", base={name: FULL[name] for name in FULL if name != "recompute_granularity"}),
    Flip("recompute_method", "block", base=FULL | {"recompute_num_layers": 2}),
    Flip("recompute_num_layers", 2, base=FULL),
    Flip("recompute_modules", ["layernorm"], base={"recompute_granularity": "selective"}),
    Flip("distribute_saved_activations", True, layout="t2", base=FULL, sequence_parallel=False),
    Flip("num_microbatches_with_partial_activation_checkpoints", 1, layout="p2", base=FULL),
    Flip("fp32_residual_connection", True, dtype="bfloat16"),
    Flip("moe_router_dtype", "fp64", **EXPERTS),
    Flip("moe_router_load_balancing_type", "seq_aux_loss", base=BALANCED | {"moe_aux_loss_coeff": 0.5}, **EXPERTS),
    Flip("moe_aux_loss_coeff", 0.5, base=BALANCED, **EXPERTS),
    Flip("moe_z_loss_coeff", 0.5, **EXPERTS),
    Flip("moe_router_bias_update_rate", 0.1, layout="d2e2", model="deepseek_v3"),
    Flip("moe_token_dispatcher_type", "allgather", **EXPERTS),
    Flip("moe_grouped_gemm", False, **EXPERTS),
    Flip("moe_shared_expert_overlap", True, layout="d2e2", model="deepseek_v3"),
    Flip("bias_activation_fusion", True),
    Flip("activation_func_fp8_input_store", True, base=FUSED),
    Flip("disable_bf16_reduced_precision_matmul", True, dtype="bfloat16"),
    Flip("clone_scatter_output_in_embedding", False, layout="t2"),
    Flip("account_for_embedding_in_pipeline_split", True, layout="p2", model=ODD, base=LOSS, also={next(iter(LOSS)): False}),
    Flip("account_for_loss_in_pipeline_split", True, layout="p2", model=ODD, base=EMBED, also={next(iter(EMBED)): False}),
    Flip("num_layers_in_first_pipeline_stage", 1, layout="p2"),
    Flip("num_layers_in_last_pipeline_stage", 1, layout="p2"),
    Flip("pipeline_model_parallel_layout", "Et|tttL", layout="p2"),
    Flip("virtual_pipeline_model_parallel_size", 2, layout="p2"),
    Flip("microbatch_group_size_per_vp_stage", 4, layout="p2", pipeline=VIRTUAL),
    Flip("variable_seq_lengths", False, layout="p2"),
    Flip("batch_p2p_comm", False, layout="p2"),
    Flip("batch_p2p_sync", False, layout="p2"),
    Flip("overlap_p2p_comm_warmup_flush", True, layout="p2", pipeline=VIRTUAL),
    Flip("deallocate_pipeline_outputs", False, layout="p2"),
    *(
        Flip(name, value, "ddp", "d2", ddp=base, dtype=dtype)
        for name, value, base, dtype in [
            ("use_distributed_optimizer", False, {}, "float32"),
            ("overlap_grad_reduce", True, {}, "float32"),
            ("overlap_param_gather", True, {"overlap_grad_reduce": True}, "float32"),
            ("bucket_size", 5000, {"overlap_grad_reduce": True}, "float32"),
            ("pad_buckets_for_high_nccl_busbw", True, {"overlap_grad_reduce": True}, "float32"),
            ("grad_reduce_in_fp32", False, {}, "bfloat16"),
            ("check_for_nan_in_grad", True, {}, "float32"),
            ("check_for_large_grads", True, {}, "float32"),
            # The last one of this layout: Megatron-Core replaces a function for every model of the process.
            ("reduce_scatter_with_fp32_accumulation", True, {"grad_reduce_in_fp32": False}, "bfloat16"),
        ]
    ),
    Flip("align_param_gather", True, "ddp", "d2p2", ddp=BOTH | {"bucket_size": 5000}, pipeline=VIRTUAL),
    Flip("decoupled_lr", 1e-4, "optimizer"),
    Flip("decoupled_min_lr", 9e-5, "optimizer", base={"decoupled_lr": 1e-4}, schedule="linear"),
    Flip("apply_wd_to_qk_layernorm", True, "optimizer"),
    Flip("decoupled_weight_decay", False, "optimizer"),
    Flip("use_precision_aware_optimizer", True, "optimizer"),
    Flip("exp_avg_dtype", "bfloat16", "optimizer", base=AWARE),
    Flip("exp_avg_sq_dtype", "bfloat16", "optimizer", base=AWARE),
    Flip("initial_loss_scale", 1024.0, "optimizer", dtype="float16"),
    Flip("loss_scale", 1024.0, "optimizer", dtype="float16"),
    Flip("min_loss_scale", 2.0, "optimizer", dtype="float16"),
    Flip("loss_scale_window", 7.0, "optimizer", dtype="float16"),
    Flip("hysteresis", 3, "optimizer", dtype="float16"),
    Flip("log_num_zeros_in_grad", True, "optimizer"),
]
ON_GPUS = {
    "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params",
}  # fmt: skip
"""Options of an optimizer on the host, which only a GPU's run can have: `test_an_optimizer_on_the_host_acts` flips them."""


@contextmanager
def calls_counted():
    """Count the calls of Megatron-Core's and our own functions, and what these call of PyTorch."""
    counts: Counter[str] = Counter()
    ours = ("megatron.core.", "fivefold.megatron.")

    def count(frame: Any, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(ours) and event == "call":
            counts[f"{module}.{frame.f_code.co_qualname}"] += 1
        elif module.startswith(ours) and event == "c_call":
            counts[f"{module}.{frame.f_code.co_qualname} -> {argument.__name__}"] += 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


def observed(mesh, directory: Path, policy) -> dict[str, Any]:
    """What an update did: calls, numbers, and what was built for it."""
    from fivefold.megatron.model import MegatronModel

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    if "deallocate_pipeline_outputs" in policy.megatron.pipeline or mesh.layout.pp > 1:
        from fivefold.megatron.transformer_config import transformer_config
        from fivefold.models.families import load_spec

        with mesh.active():
            spec = load_spec(directory)
            on_gpu = transformer_config(spec, replace(mesh, device=torch.device("cuda")), policy)
    batch = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    with calls_counted() as counts:
        model = MegatronModel(directory, policy, mesh, total_updates=2)
        reports = [model.train_step(batch, OBJECTIVE.loss) for _ in range(2)]
    updater = model._updater
    first = updater.optimizer.chained_optimizers[0].optimizer
    buffers = [buffer for ddp in updater.ddps for buffer in ddp.buffers]
    return {
        "calls": dict(counts),
        # As text: an update that float16 overflows has NaN, which equals nothing.
        "numbers": [str((report.loss, report.grad_norm, report.lr, report.metrics, report.loss_scale)) for report in reports],
        "weights": {name: float(tensor.double().abs().sum()) for name, tensor in model.weights()},
        "layers": [list(chunk.layers_of_model) for chunk in model._chunks],
        "buffers": [(buffer.numel, len(buffer.buckets), str(buffer.grad_dtype)) for buffer in buffers],
        "state": {name: str(value.dtype) for name, value in next(iter(first.state.values()), {}).items() if name != "step"},
        "loss scale": None if updater.loss_scale is None else {
            name: str(value) for name, value in vars(updater.loss_scale).items()
        },
        "bf16 sums": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sent tensors stay": mesh.layout.pp > 1 and not on_gpu.deallocate_pipeline_outputs,
    }  # fmt: skip


@pytest.fixture(scope="module")
def flipped(request, cluster, models, tmp_path_factory):
    """Results of the selected flips by layout, model, policy and time, all of a layout in one start of its ranks."""
    chosen = [item.callspec.params["flip"] for item in request.session.items if "flip" in getattr(item, "fixturenames", ())]
    odd_model = make_model("qwen3", tmp_path_factory.mktemp("odd"), num_hidden_layers=5)
    calls: dict[Any, Any] = {}
    for flip in chosen:
        # What is made once a process and kept is seen in the first run only, which is not read.
        for is_flipped, time in ((False, 0), (False, 1), (False, 2), (True, 3)):
            directory, policy = odd_model if flip.model == ODD else models(flip.model), flip.policy(is_flipped)
            calls[flip.run(is_flipped, time)] = (f"megatron:{flip.layout}", observed, directory, policy)
    return Together(cluster, calls)


def test_every_field_of_the_installed_release_is_in_the_table_once():
    content = yaml.safe_load(Path(mcore_options.__file__).with_suffix(".yaml").read_text())
    for section in SECTIONS:
        names = [name for reasons in content[section].values() for listed in reasons.values() for name in listed.split()]
        assert sorted(names) == sorted(mcore_options._fields(section)), f"{section} of mcore_options.yaml"
    assert sum(len(table(section)) for section in SECTIONS) == 334


def test_every_option_that_acts_is_flipped():
    acting = {(section, name) for section in SECTIONS for name, option in table(section).items() if option.part == "acts"}
    assert {(flip.section, flip.name) for flip in FLIPS} | {("optimizer", name) for name in ON_GPUS} == acting


@pytest.mark.slow
@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: flip.name)
def test_flipping_an_option_changes_what_runs_or_what_is_built(flipped, flip):
    base, other, again = (flipped[flip.run(*which)] for which in ((False, 1), (True, 3), (False, 2)))
    unlike = [name for one, two in zip(base, again, strict=True) for name in one if one[name] != two[name]]
    assert not unlike, "two runs without the option differ: what is observed is not the option's"
    assert base != other


HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
HOST_FLIPS = {
    "optimizer_cpu_offload": ({}, HOST),
    "optimizer_offload_fraction": (HOST, HOST | {"optimizer_offload_fraction": 0.5}),
    "overlap_cpu_optimizer_d2h_h2d": (HOST, HOST | {"overlap_cpu_optimizer_d2h_h2d": True}),
    "pin_cpu_grads": (HOST, HOST | {"pin_cpu_grads": False}),
    "pin_cpu_params": (HOST, HOST | {"pin_cpu_params": False}),
}
"""Options of the optimizer without and with each of ON_GPUS flipped."""


def built_on_host(mesh, directory: Path, policy) -> dict[str, Any]:
    """The class of the optimizer that Megatron-Core built, and its settings."""
    from fivefold.megatron.model import MegatronModel

    optimizer = MegatronModel(directory, policy, mesh, total_updates=1)._updater.optimizer.chained_optimizers[0].optimizer
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, (bool, float))}
    return {"class": type(optimizer).__name__, **plain}


@pytest.mark.gpu
def test_an_optimizer_on_the_host_acts(gpus, gpu_models):
    if gpus.kind == "cpu":
        pytest.skip("on the CPU the optimizer is there already, and the option is refused")
    assert set(HOST_FLIPS) == ON_GPUS
    optimizers = [options for pair in HOST_FLIPS.values() for options in pair]
    policies = [replace(POLICY, dtype="bfloat16", megatron=MegatronConfig(optimizer=options)) for options in optimizers]
    outcomes = gpus.run_all("megatron:d1", [(built_on_host, gpu_models["qwen3"], policy) for policy in policies])
    for place, name in enumerate(HOST_FLIPS):
        assert outcomes[2 * place] != outcomes[2 * place + 1], name
