"""What only GPUs can show: bfloat16 against float32, layouts over NCCL, speed and memory. `make gpu-test` runs it.

Every number is printed, each claim is asserted with its reason, and the exit code says whether all held. Without a GPU
it runs the same on the CPU with a tiny model (for a look at the script itself). Run it on one GPU and on two or more.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.multiprocessing as mp

from fivefold.algo import make_objective
from fivefold.algo.advantages import AdvantageInputs
from fivefold.config.schema import OptimizerConfig, PolicyConfig
from fivefold.launch.local import free_port
from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec
from fivefold.plan.memory import estimate_memory, training_flops
from fivefold.types import TokenBatch

GPU = torch.cuda.is_available()
BIG = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SMALL = BIG | {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16}
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, clip_grad=1.0, weight_decay=0.1)
OBJECTIVE = replace(make_objective("grpo"), kl_coef=0.5)


def make_model(directory: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(BIG if GPU else SMALL))
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)


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
    batch.old_logprobs_T = 0.1 * torch.randn(len(tokens), generator=generator) * mask
    batch.ref_logprobs_T = torch.randn(len(tokens), generator=generator) * mask
    return batch


def place(rank: int, world: int, port: int) -> torch.device:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), CUDA_DEVICE_MAX_CONNECTIONS="1")
    if GPU:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    torch.set_num_threads(1)
    return torch.device("cpu")


def rank_main(rank: int, layout: str, port: int, directory: str, out: str, job: str, dtype: str) -> None:
    """One rank of one job; rank 0 saves the job's result."""
    import warnings

    warnings.simplefilter("ignore")
    from fivefold.distributed.ranks import Ranks
    from fivefold.megatron import mesh as megatron_mesh

    parsed = ParallelLayout.parse(layout)
    device = place(rank, parsed.world_size, port)
    megatron_mesh.init_process_group(device, 5)
    mesh = megatron_mesh.build_mesh(Ranks(parsed), device, 0, 5)
    result = {"logprobs": logprobs_job, "step": step_job, "speed": speed_job}[job](mesh, Path(directory), dtype)
    if rank == 0:
        torch.save(result, out)
    megatron_mesh.destroy()


def build(mesh, directory: Path, dtype: str, tokens: int, updates: int | None):
    from fivefold.megatron.model import MegatronModel

    policy = PolicyConfig(dtype=dtype, tokens_per_micro_batch=tokens, optimizer=OPTIMIZER)
    return MegatronModel(directory, policy, mesh, total_updates=updates)


def logprobs_job(mesh, directory: Path, dtype: str):
    model = build(mesh, directory, dtype, 4096, None)
    return model.forward(make_batch(16, 512 if GPU else 24, model.spec.vocab))


def step_job(mesh, directory: Path, dtype: str):
    """One GRPO step: (loss, gradient norm, parameters by Hugging Face name)."""
    model = build(mesh, directory, dtype, 4096 if GPU else 64, 2)
    batch = make_batch(16, 512 if GPU else 24, model.spec.vocab)
    mine = batch.select(mesh.ranks.shard_of_replica(range(16)))
    base = model.forward(mine)
    mine.old_logprobs_T = base + mine.old_logprobs_T
    # A reference that does not come from this model: otherwise the loss would be the same whatever the layout computes.
    mine.ref_logprobs_T = (mine.ref_logprobs_T - math.log(model.spec.vocab)) * mine.loss_mask_T
    report = model.train_step(mine, OBJECTIVE.loss)
    # Every rank takes part in the stream; one keeps it.
    weights = {name: tensor.float().cpu() for name, tensor in model.weights()}
    return report.loss, report.grad_norm, weights


def speed_job(mesh, directory: Path, dtype: str):
    """Steady step time, tokens a second, peak memory."""
    model = build(mesh, directory, dtype, 16384 if GPU else 64, 10)
    batch = make_batch(64, 1024 if GPU else 24, model.spec.vocab)
    mine = batch.select(mesh.ranks.shard_of_replica(range(64)))
    times = []
    for _ in range(4):
        if GPU:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        report = model.train_step(mine, OBJECTIVE.loss)
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = min(times[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    flops = training_flops(model.spec, report.tokens, report.tokens / report.sequences)
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(report.tokens / seconds),
        "tflops_per_gpu": round(flops / seconds / mesh.layout.world_size / 1e12, 1),
        "peak_gib": round(peak, 2),
        "micro_batches": report.micro_batches,
        "tokens": report.tokens,
    }


def run(job: str, layout: str, directory: Path, dtype: str):
    with tempfile.NamedTemporaryFile() as out:
        world = ParallelLayout.parse(layout).world_size
        mp.spawn(rank_main, (layout, free_port(), str(directory), out.name, job, dtype), nprocs=world)
        return torch.load(out.name, weights_only=True)


def hf_logprobs(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    import transformers

    device = torch.device("cuda" if GPU else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    batch = make_batch(16, 512 if GPU else 24, model.config.vocab_size)
    found, start = torch.zeros(len(batch.token_ids_T)), 0
    for length in batch.lengths_N:
        tokens = batch.token_ids_T[start : start + length].to(device)
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].float()
        own = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0].cpu()
        found[start + 1 : start + length] = own * batch.loss_mask_T[start + 1 : start + length]
        start += length
    del model
    return found


def hf_speed(directory: Path) -> dict[str, float]:
    """The same training step as one would write it with transformers: bf16, SDPA, padded batches, fused AdamW."""
    import transformers

    device = torch.device("cuda" if GPU else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=GPU)
    batch = make_batch(64, 1024 if GPU else 24, model.config.vocab_size)
    rows, start = [], 0
    for length in batch.lengths_N:
        rows.append(batch.token_ids_T[start : start + length])
        start += length
    rows.sort(key=len)
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(3):
        if GPU:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for first in range(0, 64, 8):
            part = rows[first : first + 8]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in part], batch_first=True).to(device)
            labels = ids.masked_fill(mask == 0, -100)
            model(ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = min(times[1:])
    tokens = sum(batch.lengths_N)
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    return {"seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds), "peak_gib": round(peak, 2)}


def engine_speed(directory: Path) -> dict[str, float]:
    """Decoding speed of the embedded engine, with the weights it loads itself."""
    from types import SimpleNamespace

    from fivefold.engines.transformers import TransformersEngine
    from fivefold.types import Prompt, Sampling

    device = torch.device("cuda" if GPU else "cpu")
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **options: "")
    engine = TransformersEngine(directory, tokenizer, device, torch.bfloat16, 256)
    engine.version = 0
    prompts = [Prompt(i, list(range(10, 138 if GPU else 20)), "s", "", "") for i in range(32)]
    length = 256 if GPU else 8
    engine.generate(prompts[:2], 2, Sampling(max_tokens=8))
    begin = time.perf_counter()
    groups = engine.generate(prompts, 8, Sampling(max_tokens=length))
    seconds = time.perf_counter() - begin
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    return {"seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds), "sequences": 256}


def main() -> int:
    gpus = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) if GPU else "CPU"
    print(f"hardware: {gpus} x {name}; torch {torch.__version__}; python {sys.version.split()[0]}")
    failures: list[str] = []

    def claim(text: str, holds: bool) -> None:
        print(f"{'ok  ' if holds else 'FAIL'} {text}", flush=True)
        if not holds:
            failures.append(text)

    torch.backends.cuda.matmul.allow_tf32 = False
    directory = Path(tempfile.mkdtemp()) / "model"
    make_model(directory)
    shape = load_spec(directory)
    print(f"model: {shape.parameters / 1e6:.0f} M parameters (Qwen3-0.6B's shape)" if GPU else "model: tiny")

    exact, rounded = hf_logprobs(directory, torch.float32), hf_logprobs(directory, torch.bfloat16)
    theirs = (rounded - exact).abs()
    mask = exact != 0
    ours32 = (run("logprobs", "megatron:d1", directory, "float32") - exact).abs()
    claim(
        f"float32 log-probs equal transformers': mean {ours32[mask].mean():.2e}, max {ours32.max():.2e} <= 1e-3",
        bool(ours32.max() <= 1e-3),
    )
    ours = (run("logprobs", "megatron:d1", directory, "bfloat16") - exact).abs()
    # transformers in bfloat16 shows what rounding alone does to this model; we may be at most half as far off again.
    claim(
        f"bfloat16 log-probs against transformers in float32: mean {ours[mask].mean():.4f}, max {ours.max():.3f}; "
        f"transformers' own bfloat16: mean {theirs[mask].mean():.4f}, max {theirs.max():.3f}; ours <= 1.5 x theirs",
        bool(ours[mask].mean() <= 1.5 * theirs[mask].mean() and ours.max() <= 1.5 * theirs.max()),
    )

    layouts = ["megatron:t2", "megatron:p2", "megatron:d2"] if gpus >= 2 or not GPU else []
    layouts += ["megatron:t4", "megatron:d2t2", "megatron:t2p2", "megatron:d2p2"] if gpus >= 4 else []
    # float32: sums in another order, about 1e-6 of each number. bfloat16: each product is rounded to 2^-9 and layouts
    # round at other places, so losses and norms differ by a fraction of that over ~10^4 tokens. Parameters are compared in
    # float32 only: one step moves them by less than two layouts' rounding to bfloat16 can differ.
    for dtype, bounds in {"float32": (1e-5, 1e-4, 2e-5), "bfloat16": (2e-3, 2e-3)}.items():
        loss, norm, weights = run("step", "megatron:d1", directory, dtype)
        print(f"     {dtype} d1: loss {loss:.6f}, gradient norm {norm:.6f}")
        for layout in layouts:
            other = run("step", layout, directory, dtype)
            differences = [abs(other[0] - loss) / abs(loss), abs(other[1] - norm) / norm]
            differences.append(max(float((other[2][key] - weights[key]).abs().max()) for key in weights))
            text = ", ".join(
                f"{what} {value:.1e} <= {bound:.0e}"
                for what, value, bound in zip(("loss", "norm", "parameters"), differences, bounds, strict=False)
            )
            claim(
                f"{dtype} {layout} takes the step of d1: {text}",
                all(d <= b for d, b in zip(differences, bounds, strict=False)),
            )

    for layout in ["megatron:d1", *layouts]:
        speed = run("speed", layout, directory, "bfloat16")
        guess = estimate_memory(
            shape, ParallelLayout.parse(layout), dtype="bfloat16", recompute="none", tokens_per_micro_batch=16384,
            reference=False, engine_sequences=0, max_sequence_tokens=2048,
        )  # fmt: skip
        print(f"     train {layout}: {json.dumps(speed)}; estimated memory {guess.total / 2**30:.2f} GiB", flush=True)
    if gpus <= 1:
        print(f"     train with transformers: {json.dumps(hf_speed(directory))}", flush=True)
        print(f"     embedded engine: {json.dumps(engine_speed(directory))}", flush=True)
    print(f"{len(failures)} claims failed" if failures else "all claims hold")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
