"""At start: are our log-probs those of transformers' own forward pass, one sequence at a time?

Both trainers compare two short sequences of different length before anything is trained, where no table of the family
has been compared with transformers by tests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers.initialization import no_init_weights

from fivefold.backend.micro_batches import BatchingConfig
from fivefold.distributed.heartbeat import Heartbeat
from fivefold.models.headers import tensor_places
from fivefold.types import TokenBatch

LENGTHS = (37, 23)
"""Lengths of the two sequences, the longest first as in micro-batches.

With the padding for context parallelism they differ on every layout.
"""
HIGHEST = 1e-4
"""Largest difference of a log-prob in float32."""
SQUARES = 0.01
"""Largest half mean square of the differences of a sequence's log-probs in 16 bits.

It is an estimate of the KL divergence (k2) and grows with depth by rounding alone: 0.002 for SmolLM2-135M as published and
0.003 for Qwen3-8B's shape were measured between two implementations (benchmarks/results/h200-gate.txt), whose mean
differences are 0.04 and 0.06.
"""
_SEED = 7
Settings = TypeVar("Settings", bound=BatchingConfig)


def check_batch(vocab: int) -> TokenBatch:
    """Return the two sequences, of random tokens."""
    tokens_T = torch.randint(0, vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(_SEED))
    mask_T = torch.ones(sum(LENGTHS), dtype=torch.bool)
    mask_T[0] = mask_T[LENGTHS[0]] = False
    return TokenBatch(tokens_T, mask_T, list(LENGTHS))


def check_batching(batching: Settings) -> Settings:
    """Return settings by which the sequences are packed into one micro-batch that is no place in the run."""
    # Only the ranks of this model take part.
    ranks = copy.copy(batching.ranks)
    ranks.heartbeat = Heartbeat()
    return replace(batching, ranks=ranks, budget=max(batching.budget, 4 * sum(LENGTHS)), sequences=None)


@dataclass(frozen=True)
class Gap:
    """How far two computations of the sequences are apart."""

    value: float
    bound: float
    measure: str
    """Quantity that `value` and `bound` are, as error messages name it."""

    @classmethod
    def between(cls, ours_T: Tensor, theirs_T: Tensor, dtype: torch.dtype) -> Gap:
        difference_T = (ours_T - theirs_T).abs()
        if dtype == torch.float32:
            return cls(float(difference_T.max()), HIGHEST, "each of them")
        squares = torch.stack([part_T.square().mean() / 2 for part_T in difference_T.split(LENGTHS)])
        return cls(float(squares.max()), SQUARES, "half the mean square of a sequence's differences")

    @property
    def is_rounding(self) -> bool:
        """Whether rounding can explain it; NaN is no rounding."""
        return self.value <= self.bound


def logprobs_alone(model: Any, ids_T: Tensor) -> Tensor:
    """[T] log-prob of each token of one sequence but the first (0), as a model of transformers computes them."""
    logprobs_TV = torch.log_softmax(model(input_ids=ids_T[None], use_cache=False).logits[0].float(), -1)
    logprobs_T = logprobs_TV.new_zeros(len(ids_T))
    logprobs_T[1:] = logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
    return logprobs_T


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within this context, parameters of new modules take no memory; buffers, which files do not have, are real."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    with no_init_weights(), patch.object(torch.nn.Module, "register_parameter", on_meta):
        yield


@torch.no_grad()
def logprobs_of_files(directory: Path, batch: TokenBatch, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T] log-probs of the sequences by transformers' model in `directory`, which reads each weight when it is used."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.tie_weights()
    for module in model.eval().modules():
        module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None})
    places = tensor_places(directory)
    # A tied parameter has its first name.
    names = {parameter: name for name, parameter in model.named_parameters()}

    def fill(module: Any, _: Any) -> None:
        for name, parameter in parameters[module].items():
            with safe_open(directory / places[names[parameter]], framework="pt") as file:
                values = file.get_tensor(names[parameter])
            module._parameters[name] = torch.nn.Parameter(values.to(device, dtype), requires_grad=False)

    def free(module: Any, _: Any, __: Any) -> None:
        module._parameters.update(parameters[module])

    parameters = {module: dict(module.named_parameters(recurse=False)) for module in model.modules()}
    for module in parameters:
        module.register_forward_pre_hook(fill)
        module.register_forward_hook(free)
    return torch.cat([logprobs_alone(model, ids_T) for ids_T in batch.token_ids_T.to(device).split(batch.lengths_N)])
