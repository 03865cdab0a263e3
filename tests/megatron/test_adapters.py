"""Low-rank adapters: the same step on every layout, and the step that transformers takes with W + alpha / rank · B A written out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.config.schema import LoraConfig, MegatronConfig
from fivefold.models.adapters import CONFIG, TENSORS, adapter_tensors, peft_config
from fivefold.models.families import load_spec
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2, Case
from tests.support.two_steps import BOUNDS, LENGTHS, OBJECTIVE, POLICY, ROUTER, reference_step, whole_batch

PREFIX = "base_model.model."
ALL = LoraConfig(rank=4, alpha=6.0)
LATENT = replace(
    ALL,
    target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp.up_proj", "mlp.down_proj",
                    "shared_experts.gate_proj", "shared_experts.down_proj"],
    exclude_modules=["layers.1.self_attn.q_b_proj"],
)  # fmt: skip
EXPERTS = replace(
    ALL, target_modules=["k_proj", "o_proj", "up_proj", "down_proj"], exclude_modules=["layers.2.self_attn.k_proj"]
)
LORA = {"qwen3": ALL, "qwen2_tied": ALL, "qwen3_moe": EXPERTS, "qwen2_moe": ALL, "deepseek_v3": LATENT}
BALANCE = {name: value for name, value in ROUTER.items() if name != "moe_router_bias_update_rate"}
"""The losses of routers reach adapters through what routers read; their biases stay as they are."""
BALANCED = ("qwen3_moe", "deepseek_v3")
FULL = {"recompute": "full"}
CASES: list[tuple[str, Case, dict[str, Any]]] = [
    ("qwen3", Case("d1"), {}),
    ("qwen3", Case("d1"), FULL),
    ("qwen3", Case("d2"), {}),
    ("qwen3", Case("t2"), {}),
    ("qwen3", Case("t2"), FULL),
    ("qwen3", Case("t2", sequence_parallel=False), {}),
    ("qwen3", Case("p2"), {}),
    ("qwen3", Case("p2", VPP2), {}),
    ("qwen3", Case("c2"), {}),
    ("qwen2_tied", Case("p2"), {}),
    ("qwen2_tied", Case("t2"), {}),
    ("qwen3_moe", Case("d2e2"), {}),
    ("qwen3_moe", Case("(attn:t2|ffn:t2)"), {}),
    ("deepseek_v3", Case("t2e2"), {}),
    ("qwen2_moe", Case("(attn:d2t2|ffn:t2e2)"), {}),
]
MORE: list[tuple[str, Case, dict[str, Any]]] = [
    *((name, Case(layout), {}) for name in ("qwen3", "deepseek_v3") for layout in ("t2p2", "t2c2", "d2t2p2", "p4", "t4")),
    ("qwen3", Case("t2p2c2", VPP2), FULL),
    ("qwen3", Case("p4", {"pipeline_model_parallel_layout": "E|tt|tt|L"}), {}),
    ("qwen3_moe", Case("(attn:d2t2|ffn:t2e2)"), {}),
    ("deepseek_v3", Case("(attn:c2t2|ffn:t2e2)"), {}),
    ("deepseek_v3", Case("t2", sequence_parallel=False), {}),
]


def policy_of(name: str, case: Case, own: dict[str, Any], path: Path | None = None):
    megatron = MegatronConfig(pipeline=case.pipeline, transformer=BALANCE if name in BALANCED else {})
    lora = replace(LORA[name], path=None if path is None else str(path))
    return replace(
        POLICY, tokens_per_micro_batch=48, sequence_parallel=case.sequence_parallel, megatron=megatron, lora=lora, **own
    )


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory) -> Callable[[str], Path]:
    """Adapters of a model as PEFT saves them, with numbers in A and B."""

    @cache
    def make(name: str) -> Path:
        directory, spec, lora = tmp_path_factory.mktemp("adapters"), load_spec(models(name)), LORA[name].spec
        assert lora is not None
        generator = torch.Generator().manual_seed(5)
        tensors = {
            item.hf[0]: torch.randn(shape, generator=generator) * 0.1 for item, shape in adapter_tensors(spec, lora).items()
        }
        save_file(tensors, directory / TENSORS)
        (directory / CONFIG).write_text(json.dumps(peft_config(spec, lora, str(models(name)))))
        return directory

    return make


def two_steps(mesh, directory: Path, policy, base_T: torch.Tensor):
    """Two optimizer steps of one rank: (reports, adapters by PEFT's names, merged weights, is the base as it was)."""
    from fivefold.megatron.model import MegatronModel

    path = None if policy.lora.path is None else Path(policy.lora.path)
    model = MegatronModel(directory, policy, mesh, total_updates=2, adapters=path)
    base = {name: p.clone() for c in model._chunks for name, p in c.named_parameters() if not p.requires_grad}
    batch = whole_batch()
    batch = replace(batch, old_logprobs_T=base_T + batch.old_logprobs_T, ref_logprobs_T=base_T + batch.ref_logprobs_T)
    mine = batch.select(mesh.ranks.shard_of_replica(range(len(LENGTHS))))
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(2)]
    model.verify()
    parameters = {name: p for c in model._chunks for name, p in c.named_parameters() if not p.requires_grad}
    kept = all(p.grad is None and not hasattr(p, "main_grad") and torch.equal(p, base[n]) for n, p in parameters.items())
    found = ({name: tensor.clone() for name, tensor in each} for each in (model.adapters(), model.weights()))
    return reports, *found, kept


class LowRank(torch.nn.Module):
    def __init__(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone()), scale

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.b @ self.a


class StackedLowRank(torch.nn.Module):
    """The same of all experts of a layer, which transformers keeps as one weight; gate and up are one above the other."""

    def __init__(self, pairs: list[dict[int, LowRank] | None]) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleList(
            torch.nn.ModuleList() if pair is None else torch.nn.ModuleList(pair[e] for e in sorted(pair)) for pair in pairs
        )

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        parts = weight.chunk(len(self.maps), 1)
        adapted = [
            torch.stack([pair(own) for pair, own in zip(pairs, part, strict=True)]) if len(pairs) else part
            for pairs, part in zip(self.maps, parts, strict=True)
        ]
        return torch.cat(adapted, 1)


STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@cache
def oracle(directory: Path, path: Path, scale: float, balanced: bool):
    """([(loss, norm)], adapters, merged weights, [T] log-probs before) of transformers."""
    from torch.nn.utils import parametrize

    tensors, pairs, after = load_file(path / TENSORS), {}, {}

    def adapt(model):
        model.requires_grad_(False)
        stacked: dict[str, dict[str, dict[int, LowRank]]] = {}
        for name in tensors:
            if not name.endswith("lora_A.weight"):
                continue
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            pairs[module] = LowRank(tensors[name], tensors[name.replace("lora_A", "lora_B")], scale)
            before, is_expert, own = module.partition(".experts.")
            if is_expert:
                expert, kind = own.split(".")
                stacked.setdefault(f"{before}.experts", {}).setdefault(kind, {})[int(expert)] = pairs[module]
            else:
                parametrize.register_parametrization(model.get_submodule(module), "weight", pairs[module])
        for place, kinds in stacked.items():
            for held, names in STACKED.items():
                if any(name in kinds for name in names):
                    together = StackedLowRank([kinds.get(name) for name in names])
                    parametrize.register_parametrization(model.get_submodule(place), held, together)

        def finish() -> None:
            for module, pair in pairs.items():
                after[f"{PREFIX}{module}.lora_A.weight"] = pair.a.detach()
                after[f"{PREFIX}{module}.lora_B.weight"] = pair.b.detach()
                if ".experts." not in module:
                    parametrize.remove_parametrizations(model.get_submodule(module), "weight")
            for place, kinds in stacked.items():
                for held, names in STACKED.items():
                    if any(name in kinds for name in names):
                        parametrize.remove_parametrizations(model.get_submodule(place), held)

        return finish

    numbers, merged, base_T = reference_step(directory, BALANCE if balanced else {}, adapt)
    return numbers, after, merged, base_T


def expected(models, adapters, name: str):
    spec = LORA[name].spec
    assert spec is not None
    return oracle(models(name), adapters(name), spec.scale, name in BALANCED)


def difference(results, wanted) -> tuple[float, ...]:
    """Largest (relative loss, relative norm, absolute parameter) difference over ranks and steps."""
    numbers, after, merged, _ = wanted
    scale = max(abs(loss) for loss, _ in numbers)
    losses, norms, parameters = [], [], []
    for reports, own, weights, kept in results:
        assert kept, "a frozen weight has a gradient, or moved"
        assert set(own) == set(after) and set(weights) == set(merged) - {"lm_head.weight"} | set(weights) & {
            "lm_head.weight"
        }
        for report, (loss, norm) in zip(reports, numbers, strict=True):
            losses.append(abs(report.loss - loss) / scale)
            norms.append(abs(report.grad_norm - norm) / norm)
        parameters += [float((own[key] - after[key]).abs().max()) for key in after]
        parameters += [float((weights[key] - merged[key]).abs().max()) for key in weights]
    return tuple(max(math.inf if math.isnan(value) else value for value in found) for found in (losses, norms, parameters))


@pytest.fixture(scope="module")
def steps(cluster, models, adapters):
    def call(name: str, case: Case, own: dict[str, Any]):
        policy = policy_of(name, case, own, adapters(name))
        return f"megatron:{case.layout}", two_steps, models(name), policy, expected(models, adapters, name)[3]

    # What is slow does not run with the rest.
    return {
        str(each): runs
        for cases in (CASES, MORE)
        for runs in [Together(cluster, {str(each): call(*each) for each in cases})]
        for each in cases
    }


@pytest.mark.parametrize(
    ("name", "case", "own"), [*CASES, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)], ids=str
)
def test_a_step_of_adapters_is_that_of_transformers_on_every_layout(steps, models, adapters, name, case, own):
    """Loss, gradient norm, every A and B, every merged weight; what is frozen has no gradient and does not move."""
    each = str((name, case, own))
    found = difference(steps[each][each], expected(models, adapters, name))
    assert all(value <= bound for value, bound in zip(found, BOUNDS, strict=True)), found
