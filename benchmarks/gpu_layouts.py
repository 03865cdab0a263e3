"""Layouts, experts, offload and determinism on four GPUs. `make gpu-test` runs it; on a CPU it runs the same, tiny.

Every number is printed, each claim is asserted with its reason, and the exit code says whether all held.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.multiprocessing as mp

from fivefold.algo import make_objective
from fivefold.algo.advantages import AdvantageInputs
from fivefold.config.schema import MegatronConfig, OffloadConfig, OptimizerConfig, PolicyConfig
from fivefold.launch.local import free_port
from fivefold.layout import ParallelLayout, PipelineSplit
from fivefold.models.families import load_spec
from fivefold.plan.memory import estimate_memory, training_flops
from fivefold.types import TokenBatch

GPU = torch.cuda.is_available()
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, clip_grad=1.0, weight_decay=0.1)
OBJECTIVE = replace(make_objective("grpo"), kl_coef=0.5)
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
COMMON = {"max_position_embeddings": 8192, "vocab_size": 32000 if GPU else 500}
MIDDLE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8}
SIZE = {**COMMON, **(MIDDLE if GPU else TINY), "num_key_value_heads": 4, "head_dim": 64 if GPU else 16}
EXPERT_FFN = 512 if GPU else 32
LATENT = {"q_lora_rank": 384, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
TINY_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", SIZE),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZE, "moe_intermediate_size": EXPERT_FFN, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{key: value for key, value in SIZE.items() if key != "head_dim"},
            **(LATENT if GPU else TINY_LATENT),
            "num_key_value_heads": SIZE["num_attention_heads"],
            "moe_intermediate_size": EXPERT_FFN,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    # Qwen3-30B-A3B with 8 of its 48 layers.
    "a3b": (
        "Qwen3Moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        },
    ),
}
DENSE = [("t2", {}), ("p2", {}), ("d2", {}), ("c2", {}), ("t2c2", {}), ("d2c2", {}), ("t4", {}), ("c4", {})]
DENSE += [
    ("p2", VPP2),
    ("p2c2", VPP2),
    ("t2p2", VPP2),
    ("d2p2", {}),
    ("p4", {}),
    ("p2", {"variable_seq_lengths": False, **VPP2}),
]
EXPERTS = [("t2", {}), ("d2e2", {}), ("t2e2", {}), ("d4e4", {}), ("t4e4", {}), ("c2e2", {}), ("c2t2e4", {}), ("d2p2e2", {})]
EXPERTS += [("t2p2e2", {}), ("(attn:t2|ffn:t2)", {}), ("(attn:d2t2|ffn:t2e2)", {}), ("t2p2e2", VPP2), ("p2c2", VPP2)]
ROUTER = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_router_bias_update_rate": 0.01}


def make_model(name: str, directory: Path) -> None:
    import transformers

    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**settings)
    with torch.device("cuda" if GPU else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    del model
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def make_batch(samples: int, mean_length: int, vocab: int) -> TokenBatch:
    """GRPO's inputs for `samples` sequences of lengths around the mean, the first quarter of each a prompt."""
    generator = torch.Generator().manual_seed(1)
    lengths = (mean_length * (0.5 + torch.rand(samples, generator=generator))).long().tolist()
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    mask = torch.cat([torch.arange(n) >= max(1, n // 4) for n in lengths])
    batch = TokenBatch(tokens, mask, lengths, temperature=1.0)
    responses = torch.tensor([n - max(1, n // 4) for n in lengths])
    rewards = torch.rand(samples, generator=generator)
    batch.advantages_T = batch.expand_to_tokens(
        OBJECTIVE.advantage(AdvantageInputs(rewards, torch.arange(samples) // 4, responses))
    )
    batch.loss_weights_T = batch.expand_to_tokens(OBJECTIVE.loss_weights(responses, 2 * mean_length))
    batch.update_tokens = int(responses.sum())
    noise = torch.randn(2, len(tokens), generator=generator) * mask
    batch.old_logprobs_T = 0.1 * noise[0]
    # A reference that does not come from the model: the loss shows what a layout computes.
    batch.ref_logprobs_T = noise[1] - torch.log(torch.tensor(float(vocab))) * mask
    return batch


def rank_main(rank: int, world: int, ports: list[int], jobs: list[Any], out: str) -> None:
    """All jobs of one world size, one after another, in one set of processes."""
    import warnings

    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8", NCCL_ALGO="Ring")
    from fivefold.distributed.ranks import Ranks
    from fivefold.megatron import mesh as megatron_mesh

    torch.set_num_threads(1)
    if GPU:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if GPU else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for number, (function, layout, arguments) in enumerate(jobs):
        # New groups for each job, and the old ones really gone: NCCL keeps memory for each.
        os.environ["MASTER_PORT"] = str(ports[number])
        megatron_mesh.init_process_group(device, 3)
        mesh = megatron_mesh.build_mesh(Ranks(ParallelLayout.parse(f"megatron:{layout}")), device, 0, 3)
        begin = time.perf_counter()
        try:
            value = (function if callable(function) else globals()[function])(mesh, *arguments)
        except Exception:
            # The other ranks cannot go on without this one; the jobs behind it run in new processes.
            print(f"     {function} {layout} rank {rank}: {traceback.format_exc()[-1500:]}", flush=True)
            os._exit(3)
        if rank == 0:
            results.append((value, time.perf_counter() - begin))
            torch.save(results, out + ".new")
            os.replace(out + ".new", out)
            told = f"{arguments[:3]} {value}" if function == "step_job" else ""
            print(f"     . {function} {layout} {results[-1][1]:.1f} s {told}", file=sys.stderr, flush=True)
        megatron_mesh.destroy()
        # A model and its optimizer refer to each other: without this the next job would find the memory taken.
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


def run(world: int, jobs: list[Any]) -> list[Any]:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as scratch:
        while len(found) < len(jobs):
            out = Path(scratch) / str(len(found))
            expected = len(found) + 1
            try:
                left = jobs[len(found) :]
                # A peak of memory is only a job's own in processes of its own.
                alone = left[0][0] == "speed_job"
                left = left[:1] if alone else list(itertools.takewhile(lambda job: job[0] != "speed_job", left))
                expected = len(found) + len(left)
                mp.spawn(rank_main, (world, [free_port() for _ in left], left, str(out)), nprocs=world)
            except Exception as error:
                print(f"     {str(error).strip().splitlines()[-1]}", flush=True)
            found += torch.load(out, weights_only=False) if out.exists() else []
            if len(found) < expected:
                found.append(({"error": "it failed"}, 0.0))
    return found


def build(mesh, directory: str, dtype: str, tokens: int, pipeline=None, transformer=None, **changes):
    from fivefold.megatron.model import MegatronModel

    megatron = MegatronConfig(pipeline=pipeline or {}, transformer=transformer or {}, ddp=changes.pop("ddp", {}),
                              optimizer=changes.pop("optimizer_options", {}))  # fmt: skip
    policy = PolicyConfig(dtype=dtype, tokens_per_micro_batch=tokens, optimizer=OPTIMIZER, megatron=megatron, **changes)
    return MegatronModel(Path(directory), policy, mesh, total_updates=100)


def step_job(mesh, directory: str, dtype: str, pipeline, transformer, changes=None):
    """Two GRPO steps: [(loss, gradient norm)], and in float32 how far the parameters are from those of one GPU, over lr."""
    model = build(mesh, directory, dtype, 4096 if GPU else 64, pipeline, transformer, **(changes or {}))
    samples = 16 if GPU else 4
    batch = make_batch(samples, 512 if GPU else 24, model.spec.vocab)
    mine = batch.select(mesh.ranks.shard_of_replica(range(samples)))
    base = model.forward(mine)
    mine.old_logprobs_T = base + mine.old_logprobs_T
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(2)]
    model.verify()
    numbers = [(report.loss, report.grad_norm) for report in reports]
    if dtype != "float32":
        return numbers, None
    kept = Path(directory) / "expected.pt"
    if mesh.layout.world_size == 1:
        torch.save({name: tensor.cpu() for name, tensor in model.weights()}, kept)
        return numbers, None
    expected = torch.load(kept, mmap=True) if mesh.ranks.rank == 0 else None
    gap = count = 0.0
    # Every rank takes part in the stream; one compares.
    for name, tensor in model.weights():
        if expected is not None:
            gap += float((tensor - expected[name].to(tensor.device)).square().sum())
            count += tensor.numel()
    return numbers, gap**0.5 / (OPTIMIZER.lr * max(count, 1.0) ** 0.5)


def speed_job(mesh, directory: str, pipeline, transformer, tokens: int, samples: int, length: int, changes=None):
    """Steady step time, tokens a second, peak memory."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    model = build(mesh, directory, "bfloat16", tokens, pipeline, transformer, **(changes or {}))
    batch = make_batch(samples, length, model.spec.vocab)
    mine = batch.select(mesh.ranks.shard_of_replica(range(samples)))
    times = []
    for _ in range(4):
        synchronize()
        begin = time.perf_counter()
        report = model.train_step(mine, OBJECTIVE.loss)
        synchronize()
        times.append(time.perf_counter() - begin)
    seconds = min(times[1:])
    flops = training_flops(model.spec, report.tokens, report.tokens / report.sequences)
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(report.tokens / seconds),
        "tflops_per_gpu": round(flops / seconds / mesh.layout.world_size / 1e12, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if GPU else 0.0,
        "micro_batches": report.micro_batches,
        "tokens": report.tokens,
    }


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def experts_job(mesh):
    """Grouped against sequential experts: largest differences of output and gradients, and times of one layer."""
    from types import SimpleNamespace

    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from fivefold.megatron.layers.moe import GroupedExperts

    count, width, ffn, tokens = (128, 2048, 768, 65536) if GPU else (8, 64, 32, 256)
    dtype = torch.bfloat16 if GPU else torch.float32
    generator = torch.Generator().manual_seed(3)
    config: Any = SimpleNamespace(
        moe_ffn_hidden_size=ffn, hidden_size=width, params_dtype=dtype, use_cpu_initialization=not GPU,
        recompute_granularity=None, moe_grouped_gemm=True,
    )  # fmt: skip
    experts = GroupedExperts(count, config, get_default_pg_collection()).to(mesh.device)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    counts = torch.multinomial(torch.rand(count, generator=generator), tokens, True, generator=generator).bincount(
        minlength=count
    )
    counts[5], counts[6] = 0, counts[5] + counts[6]
    x = torch.randn(tokens, width, generator=generator).to(mesh.device, dtype).requires_grad_()
    weights = torch.rand(tokens, generator=generator).to(mesh.device).requires_grad_()
    seed = torch.randn(tokens, width, generator=generator).to(mesh.device, dtype)
    found, times = {}, {}
    for kind, grouped in (("grouped", True), ("sequential", False)):
        config.moe_grouped_gemm = grouped
        for _ in range(3):
            for tensor in (x, weights, *experts.parameters()):
                tensor.grad = None
            synchronize()
            begin = time.perf_counter()
            output, _ = experts(x, counts, weights)
            output.backward(seed)
            synchronize()
            times[kind] = time.perf_counter() - begin
        found[kind] = [
            output.detach().float(),
            x.grad.float(),
            weights.grad.float(),
            *(p.grad.float() for p in experts.parameters()),
        ]
    # What rounding to bfloat16 does, so that a difference of 0 between the two forms is not mistaken for no comparison.
    config.params_dtype = torch.float32
    exact = GroupedExperts(count, config, get_default_pg_collection()).to(mesh.device)
    for target, source in zip(exact.parameters(), experts.parameters(), strict=True):
        target.data.copy_(source.data)
    with torch.no_grad():
        reference, _ = exact(x.float(), counts, weights)
    rounding = float((found["grouped"][0] - reference).norm() / reference.norm())
    differences = [float((a - b).norm() / b.norm()) for a, b in zip(found["grouped"], found["sequential"], strict=True)]
    empty = float(experts.fc1.grad[5].abs().max())
    flops = 3 * 2 * 3 * tokens * width * ffn
    tflops = {kind: round(flops / seconds / 1e12, 1) for kind, seconds in times.items()}
    return {"differences": differences, "empty": empty, "tflops": tflops, "rounding": rounding}


def offload_job(mesh, directory: str):
    """Bytes named and freed, exactness, and times of moving a model's state to the host and back."""
    settings = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model = build(mesh, directory, "bfloat16", 4096 if GPU else 64, offload=settings)
    batch = make_batch(8, 512 if GPU else 24, model.spec.vocab)
    mine = batch.select(mesh.ranks.shard_of_replica(range(8)))
    model.train_step(mine, OBJECTIVE.loss)
    before = [tensor.clone() for name in ("parameters", "optimizer") for tensor in model._offload._tensors(name)]
    before = [tensor.cpu() for tensor in before]
    found: dict[str, Any] = {}
    for turn in range(2):
        synchronize()
        held = torch.cuda.memory_allocated() if GPU else 0
        begin = time.perf_counter()
        moved = model.offload()
        issued = time.perf_counter() - begin
        synchronize()
        away = time.perf_counter() - begin
        freed = held - torch.cuda.memory_allocated() if GPU else sum(moved.values())
        begin = time.perf_counter()
        model.onload()
        synchronize()
        back = time.perf_counter() - begin
        found = {"named": moved, "freed": freed, "issued_s": issued, "away_s": away, "back_s": back, "turn": turn}
    after = [tensor for name in ("parameters", "optimizer") for tensor in model._offload._tensors(name)]
    found["exact"] = all(torch.equal(a, b.cpu()) for a, b in zip(before, after, strict=True))
    report = model.train_step(mine, OBJECTIVE.loss)
    found["loss_after"] = report.loss
    return found


def deterministic_job(mesh, directory: str, on: bool):
    """Two runs of three steps: whether all bits agree, and seconds of the last step."""
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False
    states, seconds = [], 0.0
    for _ in range(2):
        model = build(mesh, directory, "bfloat16", 8192 if GPU else 64)
        samples = 32 if GPU else 4
        batch = make_batch(samples, 1024 if GPU else 24, model.spec.vocab)
        mine = batch.select(mesh.ranks.shard_of_replica(range(samples)))
        for _ in range(3):
            synchronize()
            begin = time.perf_counter()
            report = model.train_step(mine, OBJECTIVE.loss)
            synchronize()
            seconds = time.perf_counter() - begin
        states.append((report.loss, report.grad_norm, [tensor.clone().cpu() for _, tensor in model.weights()]))
        del model
    torch.use_deterministic_algorithms(False)
    same = states[0][:2] == states[1][:2] and all(torch.equal(a, b) for a, b in zip(states[0][2], states[1][2], strict=True))
    return {"same": same, "seconds": seconds}


def main(parts: list[str]) -> int:
    """`layouts` (or `layouts2`, `layouts4`: those of so many GPUs), `rest` and `speed`, or some of them."""
    gpus = torch.cuda.device_count() if GPU else 4
    name = torch.cuda.get_device_name(0) if GPU else "CPU"
    print(f"hardware: {gpus} x {name}; torch {torch.__version__}; python {sys.version.split()[0]}", flush=True)
    failures: list[str] = []

    def claim(text: str, holds: bool) -> None:
        print(f"{'ok  ' if holds else 'FAIL'} {text}", flush=True)
        if not holds:
            failures.append(text)

    def good(result: Any, what: str) -> bool:
        bad = isinstance(result, dict) and "error" in result
        if bad:
            claim(f"{what}: {result['error']}", False)
        return not bad

    if gpus < 4:
        print("four GPUs are needed")
        return 1
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if GPU else None))
    worlds = [world for world in (2, 4) if "layouts" in parts or f"layouts{world}" in parts]
    directories = {model: str(root / model) for model in MODELS if model != "a3b" or (GPU and "speed" in parts)}
    for model, directory in directories.items():
        make_model(model, Path(directory))
        print(f"     {model}: {load_spec(directory).parameters / 1e6:,.0f} M parameters", flush=True)

    jobs: dict[int, list[Any]] = {1: [], 2: [], 4: []}
    labels: dict[int, list[Any]] = {1: [], 2: [], 4: []}
    for model in ("qwen3", "qwen3_moe", "deepseek_v3"):
        table = DENSE if model == "qwen3" else EXPERTS
        options = {} if model == "qwen3" else ROUTER
        # DeepSeek-V3's shape shows the layouts of experts once more, in float32.
        for dtype in ("float32", "bfloat16") if GPU and model != "deepseek_v3" else ("float32",):
            for layout, pipeline in [("d1", {}), *table]:
                world = ParallelLayout.parse(f"megatron:{layout}").world_size
                base = world == 1 and (worlds or ("rest" in parts and model == "qwen3_moe"))
                if not base and world not in worlds:
                    continue
                jobs[world].append(("step_job", layout, (directories[model], dtype, pipeline, options)))
                labels[world].append(("step", model, dtype, layout, pipeline))
    variants = {
        "overlap of gradient reduce and parameter gather": {
            "ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}
        },
        "without the distributed optimizer": {"ddp": {"use_distributed_optimizer": False}},
        "optimizer on the CPU": {"optimizer_options": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
        "full recompute": {"recompute": "full"},
    }
    for what, changes in variants.items() if "rest" in parts else ():
        # Megatron-Core's optimizer on the CPU takes float32 copies only, not float32 parameters themselves.
        dtype = "bfloat16" if "CPU" in what else "float32"
        if GPU or dtype == "float32":
            jobs[2].append(("step_job", "d2", (directories["qwen3_moe"], dtype, {}, ROUTER, changes)))
            labels[2].append(("variant", "qwen3_moe", dtype, what, changes))
    if "rest" in parts:
        dispatched = {**ROUTER, "moe_token_dispatcher_type": "allgather"}
        jobs[4].append(("step_job", "d4e4", (directories["qwen3_moe"], "float32", {}, dispatched)))
        labels[4].append(("variant", "qwen3_moe", "float32", "d4e4 with the allgather dispatcher", {}))
        jobs[1].append(("experts_job", "d1", ()))
        labels[1].append(("experts",))
        jobs[1].append(("offload_job", "d1", (directories["qwen3_moe"],)))
        labels[1].append(("offload",))
        for on in (False, True):
            for model in ("qwen3", "qwen3_moe"):
                jobs[2].append(("deterministic_job", "d2", (directories[model], on)))
                labels[2].append(("deterministic", model, on))
    if GPU and "speed" in parts:
        for layout in ("d2t2e4", "d4e4", "t4e4", "c2t2e4"):
            jobs[4].append(("speed_job", layout, (directories["a3b"], {}, {}, 16384, 64, 2048)))
            labels[4].append(("speed", layout))
    results: dict[Any, Any] = {}
    # float32: sums in another order, about 1e-6 of each number after some thousand terms; a router may break a tie the
    # other way, so parameters are compared by the norm of their difference. bfloat16 against float32: products are rounded
    # to 2^-9 = 2e-3, and a loss is a mean over thousands of them, a norm the root of one. This is claimed of the first
    # update; the second starts from parameters that Adam has moved by lr in directions that rounding decided here and there.
    limits = {"float32": [1e-5, 1e-4, 1e-4], "bfloat16": [2e-3, 5e-3]}

    def distance(value: Any, base: Any, updates: int) -> list[float]:
        pairs = list(zip(value[0], base[0], strict=True))[:updates]
        loss, norm = (max(abs(x[i] - y[i]) / abs(y[i]) for x, y in pairs) for i in (0, 1))
        return [loss, norm] if value[1] is None else [loss, norm, value[1]]

    for world in (1, 2, 4):
        if not jobs[world]:
            continue
        begin = time.perf_counter()
        for label, (value, seconds) in zip(labels[world], run(world, jobs[world]), strict=True):
            results[json.dumps(label)] = value
            del seconds
        print(f"     {len(jobs[world])} jobs on {world} in {time.perf_counter() - begin:.0f} s", flush=True)
        for label in labels[world]:
            value = results[json.dumps(label)]
            if label[0] in ("step", "variant"):
                kind, model, dtype, layout, pipeline = label
                if (layout == "d1" and dtype == "float32") or not good(value, f"{model} {layout}"):
                    continue
                # bfloat16 is compared with float32 on one GPU: it shows the rounding and the layout together.
                base = results[json.dumps(("step", model, "float32", "d1", {}))]
                if not good(base, f"{model} d1"):
                    continue
                found = distance(value, base, updates=2 if dtype == "float32" else 1)
                names = ("loss", "norm", "parameters / lr")[: len(found)]
                text = ", ".join(
                    f"{what} {number:.1e} <= {bound:.0e}"
                    for what, number, bound in zip(names, found, limits[dtype], strict=True)
                )
                if dtype == "bfloat16":
                    text += ", after the second update {:.1e} and {:.1e}".format(*distance(value, base, updates=2))
                claim(
                    f"{dtype} {model} {layout}{' ' + json.dumps(pipeline) if pipeline and kind == 'step' else ''}: {text}",
                    all(number <= bound for number, bound in zip(found, limits[dtype], strict=True)),
                )
            elif not good(value, str(label)):
                continue
            elif label[0] == "experts":
                # bfloat16 sums of 2048 products in another order: 2^-9 of the size of the result.
                claim(
                    f"grouped experts equal sequential ones: relative differences "
                    f"{[float(f'{d:.1e}') for d in value['differences']]} "
                    f"<= 4e-3 (either differs from float32 by {value['rounding']:.1e}); an expert without tokens has "
                    f"gradient {value['empty']}",
                    max(value["differences"]) <= 4e-3 and value["empty"] == 0.0 and value["rounding"] <= 1e-2,
                )
                print(f"     forward and backward of a layer's experts, TFLOP/s: {json.dumps(value['tflops'])}")
            elif label[0] == "offload":
                named = sum(value["named"].values())
                claim(
                    f"offload freed {value['freed'] / named:.1%} of {named / 2**30:.2f} GiB named, >= 95 %",
                    value["freed"] >= 0.95 * named,
                )
                claim("what came back is bit for bit what left", value["exact"])
                moved = named - value["named"].get("gradients", 0)
                print(
                    f"     {json.dumps({k: round(v / 2**30, 2) for k, v in value['named'].items()})} GiB; the call returned "
                    f"after {value['issued_s'] * 1e3:.0f} ms, away after {value['away_s']:.3f} s "
                    f"({moved / value['away_s'] / 1e9:.0f} GB/s), back after "
                    f"{value['back_s']:.3f} s ({moved / value['back_s'] / 1e9:.0f} GB/s)"
                )
            elif label[0] == "deterministic":
                if label[2]:
                    claim(f"deterministic {label[1]}: two runs, same bits", value["same"])
                    off = results[json.dumps(("deterministic", label[1], False))]
                    if good(off, "non-deterministic"):
                        print(
                            f"     {label[1]}: {value['seconds']:.3f} s a step against {off['seconds']:.3f} s without "
                            f"({value['seconds'] / off['seconds']:.2f} x; same bits without: {off['same']})"
                        )
            elif label[0] == "speed":
                shape, layout = load_spec(directories["a3b"]), ParallelLayout.parse(f"megatron:{label[1]}")
                guess = estimate_memory(
                    shape, layout, dtype="bfloat16", recompute="none", tokens_per_micro_batch=16384, reference=False,
                    engine_sequences=0, max_sequence_tokens=4096, stages=PipelineSplit(),
                )  # fmt: skip
                print(
                    f"     Qwen3-30B-A3B with 8 layers, {label[1]}: {json.dumps(value)}; "
                    f"estimated {guess.total / 2**30:.2f} GiB",
                    flush=True,
                )
    if GPU:
        whole = load_spec(directories["a3b"])
        one = estimate_memory(
            whole, ParallelLayout(), dtype="bfloat16", recompute="none", tokens_per_micro_batch=16384, reference=False,
            engine_sequences=0, max_sequence_tokens=4096,
        )  # fmt: skip
        print(f"     one GPU would need about {one.total / 2**30:.0f} GiB for these 8 layers: {one.describe()}")
    print(f"{len(failures)} claims failed" if failures else "all claims hold")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["layouts", "rest", "speed"]))
