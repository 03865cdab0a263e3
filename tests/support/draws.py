"""What tests of random draws share: a model with one known distribution, and checks of what an engine draws from it.

A grid of draws has five axes: seed of the run, step, prompt, number of the response, position in it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fivefold.types import Sampling
from tests.support.tiny_models import load_tensors, make_model

LOGITS = torch.tensor([0.9, -0.4, 1.6, -1.2, 0.3, 2.0, -0.1, 0.6])
"""Logits of every token after every prompt: the most likely one has 0.37."""
VOCAB = len(LOGITS)
AXES = ("seed", "step", "prompt", "response", "position")
SAMPLINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 3},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
}
RARE = 1e-5
"""Chance of the result of a check at which it fails; keys are fixed, so a test fails always or never."""
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def constant_model(directory: Path, width: int = 8) -> Path:
    """Write a model whose logits are LOGITS whatever it reads: nothing but its embedding reaches its output layer."""
    from safetensors.torch import save_file

    sizes = {"vocab_size": VOCAB, "hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1}
    make_model("llama", directory, **sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=width)
    state = load_tensors(directory)
    for name, tensor in state.items():
        tensor.fill_(1.0 if "norm" in name or "embed_tokens" in name else 0.0)
    state["lm_head.weight"][:] = LOGITS[:, None] / width
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def expected(sampling: Sampling) -> Tensor:
    """Probability of each token, by transformers' own processors."""
    from transformers.generation import logits_process as theirs

    scores = LOGITS[None].clone() / sampling.temperature
    if sampling.top_k:
        scores = theirs.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = theirs.TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores[0].double().softmax(0)


def mixed(state: np.ndarray) -> np.ndarray:
    """The output of splitmix64 for its state, in numpy: a second one, next to the engine's."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(FIRST)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(SECOND)
    return state ^ (state >> np.uint64(31))


def noise(shape: tuple[int, ...]) -> np.ndarray:
    """The number in [0, 1) that each draw of a grid takes: the key is a chain of splitmix64 over the first four axes."""
    golden, key = np.uint64(GOLDEN), np.zeros(shape[:-1], np.uint64)
    with np.errstate(over="ignore"):
        for part in np.indices(shape[:-1], np.uint64):
            key = mixed(key + golden + part)
        state = key[..., None] + golden * np.arange(1, shape[-1] + 1, dtype=np.uint64)
        return (mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def rarity(statistic: float, freedom: int) -> float:
    """Chance that chi-squared with so many degrees of freedom is larger."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


def chi_squared(counts: Tensor, p: Tensor) -> float:
    """Chance of counts that differ so much from those of the probabilities `p`; 0 if an impossible token was drawn."""
    counts, p = counts.flatten().double(), p.flatten()
    if counts[p == 0].any():
        return 0.0
    means = counts.sum() * p[p > 0]
    return rarity(float(((counts[p > 0] - means) ** 2 / means).sum()), len(means) - 1)


def pairs(grid: Tensor, axis: int) -> Tensor:
    """How often each pair of tokens stands next to each other on an axis, no draw in two pairs."""
    length = grid.shape[axis] // 2 * 2
    first, second = (grid.narrow(axis, 0, length).unflatten(axis, (-1, 2)).select(axis + 1, side) for side in (0, 1))
    return torch.bincount((VOCAB * first + second).flatten(), minlength=VOCAB**2)


def failed(grid: Tensor, sampling: Sampling) -> set[str]:
    """The checks that a grid of draws fails: its distribution, that of neighbors on each axis, and responses that differ."""
    p = expected(sampling)
    assert p.numel() == VOCAB and grid.ndim == len(AXES)
    checks = {"distribution"} if chi_squared(torch.bincount(grid.flatten(), minlength=VOCAB), p) < RARE else set()
    checks |= {name for axis, name in enumerate(AXES) if chi_squared(pairs(grid, axis), p[:, None] * p) < RARE}
    responses = grid.flatten(0, -2)
    return checks | ({"same response"} if len(responses.unique(dim=0)) < len(responses) else set())
