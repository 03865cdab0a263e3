"""Critic, reward model and PPO on GPUs: values against transformers, the step on several layouts, times and memory.

On a CPU it runs the same, tiny. Every claim is asserted, and the exit code says whether all held.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import gpu_layouts
import torch
from gpu_layouts import GPU, MODELS, OPTIMIZER, make_batch, run, synchronize

from fivefold.algo import make_objective
from fivefold.algo.advantages import AdvantageInputs
from fivefold.algo.values import ValueLoss
from fivefold.config.schema import PolicyConfig
from fivefold.layout import PipelineSplit
from fivefold.plan.memory import estimate_memory

PPO = make_objective("ppo", gamma=0.99, lam=0.95)
BIG = {
    **gpu_layouts.COMMON, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Qwen3-1.7B, untied."""
MODELS["big"] = ("Qwen3", BIG if GPU else {**gpu_layouts.SIZE})
LENGTH, SAMPLES = (512, 16) if GPU else (24, 4)
CLAIMS: list[tuple[str, bool, str]] = []


def claim(name: str, holds: bool, told: str) -> None:
    CLAIMS.append((name, holds, told))
    print(f"{'ok  ' if holds else 'FAIL'} {name}: {told}", flush=True)


def make_classifier(name: str, directory: Path) -> None:
    import transformers

    kind, settings = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**settings, num_labels=1)
    with torch.device("cuda" if GPU else "cpu"):
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        torch.nn.init.normal_(model.score.weight, std=0.02)
    model.save_pretrained(directory)


def build(mesh, directory: str, dtype: str, value_head: bool, tokens: int = 4096 if GPU else 64):
    from fivefold.megatron.model import MegatronModel

    policy = PolicyConfig(dtype=dtype, tokens_per_micro_batch=tokens, optimizer=OPTIMIZER)
    return MegatronModel(Path(directory), policy, mesh, total_updates=100, value_head=value_head)


def values_job(mesh, directory: str, dtype: str):
    """Largest and mean difference of values from transformers' in float32, and the values' own spread."""
    import transformers

    model = build(mesh, directory, dtype, value_head=True)
    batch = make_batch(SAMPLES, LENGTH, model.spec.vocab)
    found = model.forward(batch)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    reference = reference.to(mesh.device).eval()
    gaps, start = [], 0
    with torch.no_grad():
        for length in batch.lengths_N:
            tokens = batch.token_ids_T[start : start + length][None].to(mesh.device)
            expected = (reference.model(tokens)[0][0] @ reference.score.weight[0]).cpu()
            own = found[start : start + length]
            first = int(batch.loss_mask_T[start : start + length].nonzero()[0]) - 1
            gaps.append((own - expected)[first:])
            assert not own[:first].any()
            start += length
    gap = torch.cat(gaps)
    return float(gap.abs().max()), float(gap.abs().mean()), float(found[found != 0].std())


def ppo_job(mesh, directory: str, critic_directory: str, dtype: str):
    """Two PPO steps: [(losses and norms of critic and policy)], in float32 also how far parameters are from one GPU's."""
    policy, critic = build(mesh, directory, dtype, False), build(mesh, critic_directory, dtype, True)
    whole = make_batch(SAMPLES, LENGTH, policy.spec.vocab)
    own = mesh.ranks.shard_of_replica(range(SAMPLES))
    mine = whole.select(own)
    mine = replace(mine, old_logprobs_T=policy.forward(mine) + mine.old_logprobs_T, values_T=critic.forward(mine))

    generator = torch.Generator().manual_seed(3)
    responses = torch.tensor([int(whole.loss_mask_T[whole.token_index([i])].sum()) for i in range(SAMPLES)])
    scores = AdvantageInputs(torch.rand(SAMPLES, generator=generator), torch.arange(SAMPLES), responses)
    finished = torch.rand(SAMPLES, generator=generator) < 0.7
    advantages_T, returns_T = PPO.advantages(mine, scores, finished, mesh.ranks)
    weights = mine.expand_to_tokens(PPO.loss_weights(responses, 2 * LENGTH)[own])
    mine = replace(mine, advantages_T=advantages_T, returns_T=returns_T, loss_weights_T=weights)
    numbers = []
    for _ in range(2):
        of_critic, of_policy = critic.train_step(mine, ValueLoss(0.5)), policy.train_step(mine, PPO.loss)
        numbers.append((of_critic.loss, of_critic.grad_norm, of_policy.loss, of_policy.grad_norm))
    critic.verify()
    policy.verify()
    gaps = []
    for name, model in (("critic", critic), ("policy", policy)) if dtype == "float32" else ():
        kept = Path(directory) / f"expected-{name}.pt"
        if mesh.layout.world_size == 1:
            torch.save({key: tensor.cpu() for key, tensor in model.weights()}, kept)
            continue
        expected = torch.load(kept, mmap=True)
        total = count = 0.0
        for key, tensor in model.weights():
            total += float((tensor - expected[key].to(tensor.device)).square().sum())
            count += tensor.numel()
        gaps.append(total**0.5 / (OPTIMIZER.lr * count**0.5))
    return numbers, gaps


def speed_job(mesh, directory: str, critic_directory: str):
    """Seconds of a step of policy and critic on the same tokens, and memory with both."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    tokens, samples, length = (16384, 32, 2048) if GPU else (64, 4, 24)
    policy, critic = (
        build(mesh, path, "bfloat16", values, tokens) for path, values in ((directory, False), (critic_directory, True))
    )
    batch = make_batch(samples, length, policy.spec.vocab)
    batch.values_T, batch.returns_T = torch.zeros(2, len(batch.token_ids_T))
    times: dict[str, float] = {}
    for _ in range(3):
        for name, work in (
            ("policy step", lambda: policy.train_step(batch, PPO.loss)),
            ("critic step", lambda: critic.train_step(batch, ValueLoss(0.5))),
            ("policy forward", lambda: policy.forward(batch)),
            ("critic forward", lambda: critic.forward(batch)),
        ):
            synchronize()
            begin = time.perf_counter()
            work()
            synchronize()
            times[name] = min(times.get(name, 1e9), time.perf_counter() - begin)
    begin = time.perf_counter()
    scores = AdvantageInputs(torch.rand(samples), torch.arange(samples), torch.ones(samples))
    alone = type("Alone", (), {"all_reduce_sum": lambda _, sums: sums})()
    PPO.advantages(batch, scores, torch.ones(samples, dtype=torch.bool), alone)
    times["GAE and whitening"] = time.perf_counter() - begin
    memory = estimate_memory(
        policy.spec, mesh.layout, dtype="bfloat16", recompute="none", tokens_per_micro_batch=tokens, reference=False,
        engine_sequences=0, max_sequence_tokens=4 * length, critic=(critic.spec, PipelineSplit()),
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    tokens_of_batch = len(batch.token_ids_T)
    return {name: round(s, 4) for name, s in times.items()}, peak, memory.total / 2**30, tokens_of_batch


def worst(found: Any, expected: Any) -> list[float]:
    """Largest relative differences of (critic's loss, norm, policy's loss, norm) over two steps."""
    scale = [max(abs(row[i]) for row in expected) for i in range(4)]
    return [max(abs(a[i] - b[i]) for a, b in zip(found, expected, strict=True)) / scale[i] for i in range(4)]


def main() -> None:
    name = torch.cuda.get_device_name() if GPU else "CPU"
    print(f"{name}, torch {torch.__version__}, {torch.cuda.device_count() if GPU else 0} GPUs", flush=True)
    worlds = [world for world in (2, 4) if not GPU or torch.cuda.device_count() >= world]
    with tempfile.TemporaryDirectory() as scratch:
        paths = {kind: str(Path(scratch) / kind) for kind in ("qwen3", "qwen3-critic", "big", "big-critic")}
        for kind, path in paths.items():
            if kind.endswith("-critic"):
                make_classifier(kind.removesuffix("-critic"), Path(path))
            else:
                gpu_layouts.make_model(kind, Path(path))
        pair = (paths["qwen3"], paths["qwen3-critic"])
        one = run(1, [
            (values_job, "d1", (pair[1], "float32")),
            (values_job, "d1", (pair[1], "bfloat16")),
            (ppo_job, "d1", (*pair, "float32")),
            (ppo_job, "d1", (*pair, "bfloat16")),
            (speed_job, "d1", (paths["big"], paths["big-critic"])),
        ])  # fmt: skip
        (exact, _), (half, _), ((numbers, _), _), ((rounded, _), _), ((times, peak, estimate, tokens), _) = one
        claim(
            "values in float32 are transformers'",
            exact[0] < 1e-4 * max(1.0, exact[2]),
            f"largest {exact[0]:.1e}, values spread {exact[2]:.2f}",
        )
        claim(
            "values in bfloat16 are near",
            half[1] < 0.02 * half[2] + 1e-3,
            f"mean {half[1]:.1e}, largest {half[0]:.1e}, values spread {half[2]:.2f}",
        )
        gap = worst(rounded, numbers)
        claim(
            "PPO in bfloat16 is near float32",
            max(gap[0], gap[1], gap[3]) < 1e-2,
            f"critic loss {gap[0]:.1e} norm {gap[1]:.1e}, policy norm {gap[3]:.1e}",
        )
        for world in worlds:
            layouts = {2: ["d2", "t2", "p2", "c2"], 4: ["t2c2", "t2p2", "d2p2"]}[world]
            for layout, ((found, gaps), _) in zip(
                layouts, run(world, [(ppo_job, layout, (*pair, "float32")) for layout in layouts]), strict=True
            ):
                gap = worst(found, numbers)
                told = ", ".join(
                    f"{what} {value:.1e}"
                    for what, value in zip(("value loss", "norm", "policy loss", "norm"), gap, strict=True)
                )
                claim(
                    f"PPO on {layout} is PPO on d1",
                    max(gap) < 1e-5 and max(gaps) < 1e-4,
                    f"{told}; parameters {max(gaps):.1e} of lr",
                )
        for what, seconds in times.items():
            print(f"     {what}: {seconds:.4f} s ({tokens / seconds:,.0f} tokens/s)", flush=True)
        claim(
            "the critic's step costs no more than the policy's",
            times["critic step"] < 1.02 * times["policy step"],
            f"{times['critic step'] / times['policy step']:.2f} x",
        )
        if GPU:
            claim(
                "memory with a critic is as estimated",
                abs(peak / estimate - 1) < 0.15,
                f"{peak:.1f} GiB, estimated {estimate:.1f}",
            )
    sys.exit(0 if all(holds for _, holds, _ in CLAIMS) else 1)


if __name__ == "__main__":
    main()
