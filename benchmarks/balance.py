"""How evenly samples are dealt to replicas, and how long micro-batches take to plan: a simulation, without torch.

128 prompts with 8 responses each, lengths log-normal as in training (median 665 tokens, at most 8192). For each optimizer
step the slowest replica over the mean, in tokens: prompts dealt in turn, as before, and samples dealt by length.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.distributed.balance import deal, micro_batches_needed

PROMPTS, GROUP, STEPS = 128, 8, 20
CONTEXT = 30_000
"""Tokens at which attention costs as much as everything else (Qwen3-1.7B)."""


def lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(8192, max(16, int(draw.lognormvariate(6.5, 1.0)))) for _ in range(PROMPTS * GROUP)]


def slowest(tokens: list[int], owner: list[int], minibatch: list[int], replicas: int, updates: int) -> float:
    """Mean over optimizer steps of the fullest replica over the mean."""
    loads = [[0] * replicas for _ in range(updates)]
    for token, o, m in zip(tokens, owner, minibatch, strict=True):
        loads[m][o] += token
    return sum(max(load) * replicas / sum(load) for load in loads) / updates


def main() -> None:
    print("| replicas | optimizer steps | samples per replica | by prompt, in turn | by length | worst of 20 steps |")
    print("|---|---|---|---|---|---|")
    for replicas, updates in ((4, 8), (8, 8), (64, 1), (64, 8)):
        before, after = [], []
        for seed in range(STEPS):
            tokens = lengths(seed)
            minibatch = [i * updates // len(tokens) for i in range(len(tokens))]
            in_turn = [i // GROUP % replicas for i in range(len(tokens))]
            by_length = deal([n + n * n / CONTEXT for n in tokens], minibatch, replicas)
            before.append(slowest(tokens, in_turn, minibatch, replicas, updates))
            after.append(slowest(tokens, by_length, minibatch, replicas, updates))
        samples = PROMPTS * GROUP // updates // replicas
        mean = [sum(shares) / STEPS for shares in (before, after)]
        print(f"| {replicas} | {updates} | {samples} | {mean[0]:.2f} | {mean[1]:.3f} | {max(after):.3f} |")
    print("\n| 4096 samples, budget 8192 | micro-batches | at least | seconds of the processor |")
    print("|---|---|---|---|")
    for name, shortest in (("uniform lengths", 1), ("most above half the budget", 4000)):
        draw = random.Random(0)
        many = [draw.randint(shortest, 8192) for _ in range(4096)]
        begin = time.process_time()
        count = micro_batches_needed(many, 8192)
        seconds = time.process_time() - begin
        print(f"| {name} | {count} | {-(-sum(many) // 8192)} | {seconds:.3f} |")


if __name__ == "__main__":
    main()
