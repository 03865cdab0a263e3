"""Seconds of sampling and of weight sync: an engine's layout, requests, rates -> time by part. No torch here.

A decoding step on the GPU reads the weights it uses and the keys and values of every sequence. At the same time the host
prepares the next step; the longer of the two counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal

from fivefold.models.spec import ModelSpec
from fivefold.plan.efficiency import Efficiencies

TAIL = 0.9
"""Standard deviation of the logarithm of response lengths, if some responses reach the maximum and most do not."""
_QUANTILES = 64
_LOGPROBS = {"collected": "logprob_host", "objects": "object_host"}
"""How log-probs leave vLLM -> the kind of rate that a sequence's cost."""


@dataclass(frozen=True)
class Requests:
    """Requests of a step, over all replicas of the engine."""

    count: float
    group: float
    """Responses per prompt; the prompt's keys are computed once for all of them."""
    prompt: float
    response: float
    """Mean response length in tokens."""
    longest: float

    def lengths(self) -> list[float]:
        """Return quantiles of response lengths: all equal if the mean is near the maximum, otherwise with a long tail."""
        if self.response > 0.95 * self.longest:
            return [self.response] * _QUANTILES
        normal = NormalDist()
        shape = [math.exp(TAIL * normal.inv_cdf((place + 0.5) / _QUANTILES)) for place in range(_QUANTILES)]
        low, high = 0.0, self.longest
        for _ in range(40):
            middle = (low + high) / 2
            mean = sum(min(self.longest, middle * one) for one in shape) / _QUANTILES
            low, high = (middle, high) if mean < self.response else (low, middle)
        lengths = [min(self.longest, low * one) for one in shape]
        # The longest of many responses is longer than the middle of the last quantile.
        if self.count > _QUANTILES:
            lengths[-1] = max(lengths[-1], min(self.longest, low * math.exp(TAIL * normal.inv_cdf(1 - 0.5 / self.count))))
        return lengths


@dataclass(frozen=True)
class Sampler:
    """One replica of an engine."""

    spec: ModelSpec
    tp: int
    ep: int
    max_num_seqs: int
    cache_bytes: float
    """Bytes of the KV cache on each rank of the replica."""
    number_bytes: int = 2
    is_server: bool = False
    processes: int = 1
    """Processes that share the replica's GPUs; each has a part of the sequences."""
    logprobs: Literal["none", "collected", "objects"] = "collected"
    """How log-probs leave vLLM: collected by its workers, as the engine does it, or as objects, as vLLM itself does."""
    is_eager: bool = False
    """True for the transformers engine, which launches each kernel of each step from Python."""

    @property
    def token_bytes(self) -> float:
        """Return the bytes of one token's keys and values on a rank."""
        return self.spec.kv_numbers_per_token * self.number_bytes / min(self.tp, self.spec.kv_heads)

    def room(self, length: float) -> int:
        """Return how many sequences of this length fit at once."""
        return max(1, int(min(self.max_num_seqs, self.cache_bytes / (self.token_bytes * length))))

    @cached_property
    def _parameters(self) -> tuple[int, int, float]:
        """Return (parameters that every token uses, routed expert parameters, FLOPs per token)."""
        layers, head = range(self.spec.layers), self.spec.vocab * self.spec.hidden
        dense = sum(map(self.spec.shared_parameters, layers)) + head
        active = sum(map(self.spec.active_parameters, layers)) + head
        return dense, sum(map(self.spec.expert_parameters, layers)), 2.0 * active

    def _weights(self, sequences: float) -> float:
        """Return the bytes of weights that a rank reads in a step: of the experts, only those that some token chose."""
        dense, experts, _ = self._parameters
        part = self.spec.moe
        used = 1.0 if part is None else 1 - (1 - part.top_k / part.num_experts) ** sequences
        return (dense + used * experts) * self.number_bytes / self.tp

    def arithmetic(self, tokens: float, rates: Efficiencies) -> float:
        """Return the seconds of the matrix products for so many tokens."""
        return tokens * self._parameters[2] / self.tp / rates.rate("gemm", self.spec.hidden)

    def step_seconds(self, sequences: float, length: float, rates: Efficiencies) -> tuple[float, float]:
        """Return (host, GPU) seconds of a decoding step: one token of each sequence.

        Of several processes, each prepares the steps of its part of the sequences at the same time, and the GPU computes
        them one after another. A sequence costs the host more the more of them a process has, so that two processes take
        less than half of one's time.
        """
        host, gpu = self._process_seconds(sequences / self.processes, length, rates)
        return host, gpu * self.processes

    def _process_seconds(self, sequences: float, length: float, rates: Efficiencies) -> tuple[float, float]:
        spec = self.spec
        read = self._weights(sequences) + sequences * length * self.token_bytes
        # Logits are written in float32, then read by the softmax and by sampling.
        read += 16 * sequences * spec.vocab / self.tp
        gpu = read / rates.rate("decode_memory" if self.processes == 1 else "shared_decode_memory")
        gpu += self.arithmetic(sequences, rates)
        if self.tp > 1:
            gpu += 2 * spec.layers * rates.rate("decode_reduce")
        if self.is_eager:
            return spec.layers * rates.rate("eager_layer"), gpu
        host_seconds = rates.rate("sequence_host", sequences)
        if self.logprobs != "none":
            host_seconds += rates.rate(_LOGPROBS[self.logprobs], sequences)
        if self.is_server:
            host_seconds += rates.rate("server_host")
        return rates.rate("decode_host") + sequences * host_seconds, gpu


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of sampling, by what limits them."""

    prefill: float
    memory: float
    """Seconds of decoding steps that GPU memory limits."""
    host: float
    """Seconds of decoding steps that the host limits."""
    tokens: float
    """Tokens sampled by one replica."""

    @property
    def total(self) -> float:
        return self.prefill + self.memory + self.host


def rollout_time(sampler: Sampler, requests: Requests, replicas: int, rates: Efficiencies) -> RolloutTime:
    """Return the time to sample all requests, divided equally over replicas; the step waits for the longest response."""
    count, lengths = requests.count / replicas, requests.lengths()
    mean = sum(lengths) / len(lengths)
    prompts = count / requests.group
    prefill = sampler.arithmetic(prompts * requests.prompt, rates)
    at_once = float(min(count, sampler.room(requests.prompt + mean / 2)))
    spent = {"memory": 0.0, "host": 0.0}

    def steps(count: float, sequences: float, length: float) -> None:
        host, gpu = sampler.step_seconds(sequences, length, rates)
        spent["host" if host > gpu else "memory"] += count * max(host, gpu)

    # While requests are queued, the engine is full; then the last requests finish one after another.
    steps((count - at_once) * mean / at_once, at_once, requests.prompt + mean / 2)
    before = 0.0
    for place, length in enumerate(lengths):
        alive = at_once * (1 - place / len(lengths))
        pieces = max(1, min(8, int((length - before) / 64)))
        for piece in range(pieces):
            at = before + (length - before) * (piece + 0.5) / pieces
            steps((length - before) / pieces, max(1.0, alive), requests.prompt + at)
        before = length
    return RolloutTime(prefill, spent["memory"], spent["host"], count * mean)


def sync_time(
    spec: ModelSpec, policy_ranks: int, number_bytes: int, rates: Efficiencies, sleeps: bool, onload: float
) -> float:
    """Return the seconds of a weight sync.

    It starts with the parameters on the host, `onload` bytes per rank, and ends with an engine that can sample.
    """
    size = spec.parameters * number_bytes
    stream = size / rates.rate("node_link", size) if policy_ranks > 1 else size / rates.rate("decode_memory")
    return stream + onload / rates.rate("host_copy") + (rates.rate("wake") if sleeps else 0.0)
