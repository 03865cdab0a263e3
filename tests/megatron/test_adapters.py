"""Low-rank adapters: the same step on every layout, and the step that transformers takes with W + alpha / rank · B A written out."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.columns import Column
from fivefold.config.learners import LoraConfig, MegatronConfig
from fivefold.megatron.layers.adapters import stochastically_rounded
from fivefold.models.adapters import CONFIG, TENSORS, adapter_tensors, peft_config
from fivefold.models.families import load_spec
from tests.support.cluster import Together
from tests.support.layout_cases import VPP2, Case
from tests.support.shards import shard_of_replica
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
OVERLAP = {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
CASES: list[tuple[str, Case, dict[str, Any]]] = [
    ("qwen3", Case("d1"), {}),
    ("qwen3", Case("d1"), FULL),
    ("qwen3", Case("d2"), {}),
    ("qwen3", Case("d2"), OVERLAP),
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


def policy_of(name: str, case: Case, settings: dict[str, Any], path: Path | None = None):
    settings, ddp = {key: value for key, value in settings.items() if key != "ddp"}, settings.get("ddp", {})
    megatron = MegatronConfig(pipeline=case.pipeline, transformer=BALANCE if name in BALANCED else {}, ddp=ddp)
    lora = replace(LORA[name], path=None if path is None else str(path))
    return replace(
        POLICY, tokens_per_micro_batch=48, sequence_parallel=case.sequence_parallel, megatron=megatron, lora=lora, **settings
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
    batch = batch.with_columns(
        {Column.OLD_LOGPROBS: base_T + batch[Column.OLD_LOGPROBS], Column.REF_LOGPROBS: base_T + batch[Column.REF_LOGPROBS]}
    )
    mine = batch.select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    reports = [model.train_step(mine, OBJECTIVE.loss) for _ in range(2)]
    model.verify()
    parameters = {name: p for c in model._chunks for name, p in c.named_parameters() if not p.requires_grad}
    kept = all(p.grad is None and not hasattr(p, "main_grad") and torch.equal(p, base[n]) for n, p in parameters.items())
    copies = ({name: tensor.clone() for name, tensor in tensors} for tensors in (model.adapters(), model.weights()))
    return reports, *copies, kept


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
            torch.stack([pair(shard) for pair, shard in zip(pairs, part, strict=True)]) if len(pairs) else part
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
            before, is_expert, rest = module.partition(".experts.")
            if is_expert:
                expert, kind = rest.split(".")
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
    for reports, adapter, weights, kept in results:
        assert kept, "a frozen weight has a gradient, or moved"
        assert set(adapter) == set(after) and set(weights) == set(merged) - {"lm_head.weight"} | set(weights) & {
            "lm_head.weight"
        }
        for report, (loss, norm) in zip(reports, numbers, strict=True):
            losses.append(abs(report.loss - loss) / scale)
            norms.append(abs(report.grad_norm - norm) / norm)
        parameters += [float((adapter[key] - after[key]).abs().max()) for key in after]
        parameters += [float((weights[key] - merged[key]).abs().max()) for key in weights]
    return tuple(max(math.inf if math.isnan(value) else value for value in sizes) for sizes in (losses, norms, parameters))


@pytest.fixture(scope="module")
def steps(cluster, models, adapters):
    def call(name: str, case: Case, settings: dict[str, Any]):
        policy = policy_of(name, case, settings, adapters(name))
        return f"megatron:{case.layout}", two_steps, models(name), policy, expected(models, adapters, name)[3]

    # What is slow does not run with the rest.
    return {
        str(row): runs
        for cases in (CASES, MORE)
        for runs in [Together(cluster, {str(row): call(*row) for row in cases})]
        for row in cases
    }


@pytest.mark.parametrize(
    ("name", "case", "settings"), [*CASES, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)], ids=str
)
def test_a_step_of_adapters_is_that_of_transformers_on_every_layout(steps, models, adapters, name, case, settings):
    """Loss, gradient norm, every A and B, every merged weight; what is frozen has no gradient and does not move."""
    key = str((name, case, settings))
    differences = difference(steps[key][key], expected(models, adapters, name))
    assert all(value <= bound for value, bound in zip(differences, BOUNDS, strict=True)), differences


def begun(mesh, directory: Path, policy, path: Path | None):
    """(adapters, is the merged model the directory's, log-probs with and without adapters) before the first step."""
    from fivefold.megatron.model import MegatronModel, WithoutAdapters

    model = MegatronModel(directory, policy, mesh, total_updates=1, adapters=path, seed=3)
    mine = whole_batch().select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
    plain = MegatronModel(directory, replace(policy, lora=LoraConfig()), mesh)
    merged, without = dict(model.weights()), dict(plain.weights())
    is_same = all(torch.equal(merged[name], tensor) for name, tensor in without.items())
    logprobs = [policy.forward(mine) for policy in (model, WithoutAdapters(model), plain)]
    return {name: tensor.clone() for name, tensor in model.adapters()}, is_same, logprobs


@pytest.fixture(scope="module")
def beginnings(cluster, models, adapters):
    def call(name: str, layout: str, is_new: bool):
        path = None if is_new else adapters(name)
        return f"megatron:{layout}", begun, models(name), policy_of(name, Case(layout), {}), path

    wanted = [
        (name, layout, is_new) for name in ("qwen3", "qwen3_moe") for layout in ("d1", "t2") for is_new in (True, False)
    ]
    return Together(cluster, {row: call(*row) for row in wanted})


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_new_adapters_change_nothing_and_are_the_same_on_every_layout(beginnings, models, name):
    """A is uniform in ±1/sqrt(in), as PEFT draws it; B is 0, so that the model and its log-probs are the directory's."""
    (first,) = beginnings[name, "d1", True]
    for layout in ("d1", "t2"):
        for tensors, is_same, (own_T, base_T, plain_T) in beginnings[name, layout, True]:
            assert is_same and torch.equal(own_T, base_T) and torch.equal(own_T, plain_T)
            assert all(torch.equal(tensors[key], tensor) for key, tensor in first[0].items())
    drawn = [tensor * tensor.shape[1] ** 0.5 for key, tensor in first[0].items() if "lora_A" in key]
    assert not any(tensor.any() for key, tensor in first[0].items() if "lora_B" in key)
    numbers = torch.cat([tensor.flatten() for tensor in drawn])
    assert numbers.abs().max() <= 1 and len({float(tensor[0, 0]) for tensor in drawn}) == len(drawn)
    # Of n uniform numbers in ±1 the mean has the deviation (3 n)^-1/2, and the mean of squares, 1/3, (45 n / 4)^-1/2.
    assert abs(float(numbers.mean())) < 4 * (3 * len(numbers)) ** -0.5
    assert abs(float(numbers.square().mean()) - 1 / 3) < 4 * (11.25 * len(numbers)) ** -0.5


# --- rounding to the engine's dtype ----------------------------------------------------------------------------------


def streamed(mesh, directory: Path, policy, path: Path, dtype: str, times: int):
    """(share that is lost, the merged weights, the base's) after so many streams."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, adapters=path, stored_in=dtype)
    for _ in range(times):
        weights = {name: tensor.clone() for name, tensor in model.weights()}
    plain = MegatronModel(directory, replace(policy, lora=LoraConfig()), mesh)
    return model.lost_to_rounding(), weights, {name: tensor.clone() for name, tensor in plain.weights()}


def rounded(exact: float, drawn: int, lacking: int) -> float:
    """Up in its magnitude if `drawn` of 2^16 is not below what the next number of the dtype lacks to `exact`."""
    (bits,) = struct.unpack("<I", struct.pack("<f", exact))
    sign, magnitude = bits & 1 << 31, bits & (1 << 31) - 1
    lower, rest = magnitude >> lacking, magnitude & (1 << lacking) - 1
    up = (drawn >> 16 - lacking) >= (1 << lacking) - rest
    (value,) = struct.unpack("<f", struct.pack("<I", sign | (lower + up) << lacking))
    return float(value)


def merged_by_definition(name: str, base: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The merged weight by the definition, one number at a time."""
    lacking = {torch.bfloat16: 16, torch.float16: 13}[base.dtype]
    # No rank divides the rows of o_proj and down_proj, and the columns of all others.
    axis = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
    near, next_to, far = (base.roll(distance, axis).view(torch.int16).int().tolist() for distance in (0, 1, 41))
    exact = (base.double() + share).float().tolist()
    rows = [
        [
            rounded(exact[i][j], (near[i][j] * -25033 + next_to[i][j] * 30903 + far[i][j] * -14057) % 2**16, lacking)
            for j in range(base.shape[1])
        ]
        for i in range(base.shape[0])
    ]
    return torch.tensor(rows).to(base.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("added", [0.002, 0.1, 0.5, 0.9, 0.998])
def test_a_part_of_a_step_arrives_in_that_part_of_weights_of_sixteen_levels(dtype, axis, added):
    """Weights of blocks of 32 with 16 levels each, as many published models have: hashes of such weights repeat."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.rand(1024, 2048 // 32, 1, generator=generator) * 0.01 + 0.005
    levels = torch.randint(-8, 8, (1024, 2048 // 32, 32), generator=generator) + 0.5
    weight = (scales * levels).flatten(1).to(dtype)
    weight = weight.t().contiguous().t() if axis else weight
    step = torch.nextafter(weight.abs(), torch.full_like(weight, math.inf)).float() - weight.abs().float()
    exact = weight.float() + weight.float().sign() * step * added
    arrived = (stochastically_rounded(exact, weight, axis).float() - weight.float()).abs() / step
    assert set(arrived.unique().tolist()) == {0.0, 1.0}
    assert abs(arrived.mean() - added) < 4 * (added * (1 - added) / arrived.numel()) ** 0.5
    assert torch.equal(stochastically_rounded(weight.float(), weight, axis), weight)


ROUNDED = [
    ("qwen3", "d1", "bfloat16", "bfloat16"),
    ("qwen3", "d2", "bfloat16", "bfloat16"),
    ("qwen3", "t2", "bfloat16", "bfloat16"),
    ("qwen3", "p2", "float32", "bfloat16"),
    ("qwen3", "c2", "float16", "float16"),
    ("qwen3_moe", "d2", "bfloat16", "bfloat16"),
    ("qwen3_moe", "d2e2", "bfloat16", "bfloat16"),
    ("qwen3_moe", "(attn:t2|ffn:t2)", "bfloat16", "bfloat16"),
    ("deepseek_v3", "t2e2", "bfloat16", "bfloat16"),
    ("qwen2_moe", "(attn:d2t2|ffn:t2e2)", "bfloat16", "bfloat16"),
]


@pytest.mark.parametrize(("name", "layout", "dtype", "engine"), ROUNDED, ids=str)
def test_merged_weights_are_rounded_alike_on_every_layout_and_losses_count_once(
    cluster, models, adapters, tmp_path, name, layout, dtype, engine
):
    """Every merged weight bit by bit, and the share that does not arrive, summed over the whole model in float64.

    Products of these adapters are exact in float32. A base in float32 has numbers of the engine's dtype first.
    """
    small = tmp_path / "small"
    small.mkdir()
    tensors = {key: (tensor * 40).round() / 2**10 for key, tensor in load_file(adapters(name) / TENSORS).items()}
    save_file(tensors, small / TENSORS)
    (small / CONFIG).write_text((adapters(name) / CONFIG).read_text())
    policy = replace(policy_of(name, Case(layout), {}), dtype=dtype)
    results = cluster.run(streamed, f"megatron:{layout}", models(name), policy, small, engine, 2)
    (_, weights, base), sums = results[0], torch.zeros(4, dtype=torch.float64)
    scale = LORA[name].spec.scale
    for key, a in tensors.items():
        if key.endswith("lora_A.weight"):
            module = key.removeprefix(PREFIX).removesuffix("lora_A.weight") + "weight"
            share = scale * (tensors[key.replace("lora_A", "lora_B")].double() @ a.double())
            stored = base[module].to(getattr(torch, engine))
            wanted = merged_by_definition(module, stored, share)
            assert torch.equal(weights[module], wanted.to(base[module].dtype)), module
            before, after = stored.double(), wanted.double()
            nearest = (base[module].double() + share).to(getattr(torch, engine)).double() - before
            parts = [(part * share) for part in (share - (after - before), share - nearest, share)]
            sums += torch.stack([*(part.sum() for part in parts), parts[0].square().sum()])
    lost, lost_by_nearest, error = sums[0] / sums[2], sums[1] / sums[2], sums[3].sqrt() / sums[2]
    # Roundings of different weights are independent: their sum is 0 but for its standard error.
    assert abs(lost) < 4 * error < 0.1, (lost, error)
    assert lost_by_nearest > 0.6 or dtype != "bfloat16"
    for measured_share, _, _ in results:
        assert measured_share == pytest.approx(float(lost), abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("layout", ["d1", "t2"])
def test_the_reference_is_the_policy_with_its_adapters_switched_off(beginnings, adapters, name, layout):
    """Bit by bit the model of the directory, and not the policy; adapters of PEFT are read as they are."""
    wanted = load_file(adapters(name) / TENSORS)
    for tensors, is_same, (own_T, base_T, plain_T) in beginnings[name, layout, False]:
        assert torch.equal(base_T, plain_T) and not torch.allclose(own_T, base_T) and not is_same
        assert set(tensors) == set(wanted) and all(torch.equal(tensors[key], tensor) for key, tensor in wanted.items())


def train_and_save(mesh, directory: Path, policy, before: Path | None, path: Path, fault: bool = False):
    """Take a step, or read what others wrote, and write a checkpoint; (version, adapters)."""
    from fivefold.megatron import dist_checkpoint
    from fivefold.megatron.model import MegatronModel

    if fault:
        dist_checkpoint._load_optimizer = lambda *_: None
    model = MegatronModel(directory, policy, mesh, total_updates=4, read_weights=before is None)
    if before is None:
        batch = whole_batch()
        mine = batch.select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))
        base_T = model.forward(mine)
        mine = mine.with_columns({Column.OLD_LOGPROBS: base_T, Column.REF_LOGPROBS: base_T + mine[Column.REF_LOGPROBS]})
        for _ in range(2):
            model.train_step(mine, OBJECTIVE.loss)
    else:
        model.load(before)
    if mesh.ranks.is_main:
        path.mkdir()
    mesh.ranks.barrier()
    model.save(path)
    return model.version, {name: tensor.clone() for name, tensor in model.adapters()}


def numbers_in(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the ranks wrote, made whole."""
    from fivefold.backend.sharded_files import Box, PieceReader

    reader = PieceReader(path)
    numbers = {}
    for name, stored in reader._stored.items():
        boxes = [piece.box for piece in stored]
        size = tuple(
            max(ends) for ends in zip(*(map(sum, zip(box.offset, box.size, strict=True)) for box in boxes), strict=True)
        )
        numbers[name] = torch.full(size, math.nan)
        reader.fill(name, Box((0,) * len(size), size), numbers[name])
    return numbers


WRITTEN = [
    pytest.param("qwen3", "t2", "d2", marks=pytest.mark.slow),
    pytest.param("qwen3", "p2", "t2", marks=pytest.mark.slow),
    ("qwen3_moe", "t2e2", "(attn:d2|ffn:t2)"),
]


@pytest.mark.parametrize(("name", "first", "second"), WRITTEN)
def test_a_checkpoint_of_adapters_loads_on_other_layouts_and_holds_nothing_else(
    cluster, models, tmp_path, name, first, second
):
    before, after = tmp_path / "before", tmp_path / "after"
    policies = [policy_of(name, Case(layout), {}) for layout in (first, second)]
    written = cluster.run(train_and_save, f"megatron:{first}", models(name), policies[0], None, before)
    read = cluster.run(train_and_save, f"megatron:{second}", models(name), policies[1], before, after)
    for version, tensors in read:
        assert version == written[0][0] == 2
        assert all(torch.equal(tensors[key], tensor) for key, tensor in written[0][1].items())
    one, other = numbers_in(before), numbers_in(after)
    assert set(one) == set(other) and all(torch.equal(torch.nan_to_num(one[n]), torch.nan_to_num(other[n])) for n in one)
    assert all(".adapters." in key for key in one) and {key.rsplit(".", 1)[-1] for key in one} >= {"exp_avg", "exp_avg_sq"}
    assert any(one[key].nan_to_num().any() for key in one if key.endswith("exp_avg_sq"))


@pytest.mark.slow
def test_moments_of_adapters_that_are_not_loaded_are_seen(cluster, models, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    policy = policy_of("qwen3", Case("d1"), {})
    cluster.run(train_and_save, "megatron:d1", models("qwen3"), policy, None, before)
    cluster.run(train_and_save, "megatron:d1", models("qwen3"), policy, before, after, True)
    one, other = numbers_in(before), numbers_in(after)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_trained_is_what_the_memory_of_a_run_counts(cluster, models):
    """Gradients and moments of adapters alone; frozen weights once."""
    from fivefold.layout import ParallelLayout
    from fivefold.plan.memory import Sharded, rank_parameters

    spec, lora, layout = load_spec(models("qwen3_moe")), LORA["qwen3_moe"].spec, ParallelLayout.parse("megatron:t2")
    held = Sharded(spec, layout, lora=lora).held(4)[0]
    for trained, optimizer in cluster.run(counted, str(layout), models("qwen3_moe"), policy_of("qwen3_moe", Case("t2"), {})):
        # Experts are replicated on the two ranks, so that each has half of their moments.
        assert held.gradients == 4 * trained and held.optimizer == 8 * optimizer
        assert held.parameters == 4 * (trained + rank_parameters(spec, layout)[0].total)


def counted(mesh, directory: Path, policy):
    """Numbers of this rank that have gradients, and that the optimizer has state of."""
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy, mesh, total_updates=2)
    updater = model._updater
    trained = sum(p.numel() for ddp in updater.ddps for p in ddp.params_with_grad)
    groups = [group for part in updater.optimizer.chained_optimizers if part.optimizer for group in part.param_groups]
    return trained, sum(p.numel() for group in groups for p in group["params"])


# --- injected faults: each must be seen by the comparison above -------------------------------------------------------


def partial_gradients(mesh, *arguments):
    """A, which all tensor-parallel ranks hold, with the gradient of each rank's own part of the sequence."""
    from fivefold.megatron.layers import adapters

    original = adapters._mark
    adapters._mark = lambda parameter, **marks: None if "sequence_parallel" in marks else original(parameter, **marks)
    return two_steps(mesh, *arguments)


def no_gradient_into_the_first_layer(mesh, *arguments):
    """As where the input of a layer that is recomputed wants no gradient."""
    from fivefold.megatron.layers.layer_spec import PolicyModel

    original = PolicyModel._preprocess

    def preprocess(self, *args, **kwargs):
        first, *rest = original(self, *args, **kwargs)
        return (first.detach(), *rest)

    PolicyModel._preprocess = preprocess
    return two_steps(mesh, *arguments)


def merged_without_alpha(mesh, *arguments):
    from fivefold.megatron.layers.adapters import Merge

    original = Merge.__call__
    Merge.__call__ = lambda self, weight, lost: original(replace(self, scale=1.0), weight, lost)
    return two_steps(mesh, *arguments)


def joined_map_by_map(mesh, *arguments):
    """Queries, keys and values one above another, where Megatron-Core has them group by group."""
    from fivefold.megatron.layers.adapters import Adapters

    original = Adapters.__init__

    def init(self, linear, maps, lora, groups, tp):
        original(self, linear, maps, lora, 1, tp)

    Adapters.__init__ = init
    return two_steps(mesh, *arguments)


def experts_counted_twice(mesh, *arguments):
    """What the ranks of an expert hold alike counted in the gradient norm by each."""
    from fivefold.megatron.layers import adapters

    original = adapters._mark
    adapters._mark = lambda parameter, **marks: None if "shared" in marks else original(parameter, **marks)
    return two_steps(mesh, *arguments)


def experts_not_summed(mesh, *arguments):
    """What the ranks of an expert hold alike, with the gradient of each rank's own part of it."""
    from fivefold.megatron.layers.adapters import ExpertAdapters

    ExpertAdapters._summed = lambda self, parameter: parameter
    return two_steps(mesh, *arguments)


FAULTS = [
    (partial_gradients, "qwen3", "t2", {}),
    (no_gradient_into_the_first_layer, "qwen3", "d1", FULL),
    (merged_without_alpha, "qwen3", "d1", {}),
    (joined_map_by_map, "qwen3", "d1", {}),
    (experts_counted_twice, "qwen3_moe", "(attn:t2|ffn:t2)", {}),
    (experts_not_summed, "qwen3_moe", "(attn:t2|ffn:t2)", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "name", "layout", "settings"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_an_injected_fault_is_seen(cluster, models, adapters, fault, name, layout, settings):
    policy, wanted = policy_of(name, Case(layout), settings, adapters(name)), expected(models, adapters, name)
    try:
        results = cluster.run(fault, f"megatron:{layout}", models(name), policy, wanted[3])
    except RuntimeError as error:
        # Copies that differ end the run by themselves.
        assert "copies of parameters that must be equal differ" in str(error)
        return
    differences = difference(results, wanted)
    assert any(value > 10 * bound for value, bound in zip(differences, BOUNDS, strict=True)), differences


# --- a critic --------------------------------------------------------------------------------------------------------


def critic_step(mesh, directory: Path, policy, path: Path):
    """Two steps of a critic towards 1: (losses, norms, weights, what is written, what is frozen is as it was)."""
    from fivefold.megatron.model import MegatronModel
    from fivefold.types import LossOutput

    model = MegatronModel(directory, policy, mesh, total_updates=2, value_head=True)
    before = {n: p.clone() for c in model._chunks for n, p in c.named_parameters() if not p.requires_grad}
    batch = whole_batch()
    mine = batch.select(shard_of_replica(mesh.ranks, range(len(LENGTHS))))

    def loss(values_T, entropy_T, micro):
        return LossOutput(loss=(micro[Column.LOSS_WEIGHTS] * (values_T - 1).square()).sum(), sums={})

    reports = [model.train_step(mine, loss) for _ in range(2)]
    model.verify()
    if mesh.ranks.is_main:
        path.mkdir()
    mesh.ranks.barrier()
    model.save(path)
    kept = all(torch.equal(p, before[n]) for c in model._chunks for n, p in c.named_parameters() if n in before)
    return [(r.loss, r.grad_norm) for r in reports], {n: t.clone() for n, t in model.weights()}, kept


def test_a_critic_with_adapters_trains_them_and_its_value_head(cluster, models, tmp_path):
    results = {}
    for layout in ("d1", "t2"):
        policy = policy_of("qwen3", Case(layout), {})
        results[layout] = cluster.run(critic_step, f"megatron:{layout}", models("qwen3"), policy, tmp_path / layout)
        assert all(kept for *_, kept in results[layout])
    (numbers, weights, _), *_ = results["d1"]
    assert weights["score.weight"].abs().max() > 1e-4 and numbers[1][0] < numbers[0][0]
    for others, tensors, _ in results["t2"]:
        torch.testing.assert_close(torch.tensor(others), torch.tensor(numbers), rtol=1e-5, atol=0)
        assert all((tensors[name] - tensor).abs().max() <= BOUNDS[2] for name, tensor in weights.items())
    written = {name for name in numbers_in(tmp_path / "t2") if not name.endswith(("exp_avg", "exp_avg_sq"))}
    assert "model.output_layer.weight" in written
    assert all(".adapters." in name or name == "model.output_layer.weight" for name in written)
