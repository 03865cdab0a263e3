"""A checkpoint of any layout loads on any other: parameters and optimizer moments by name."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.columns import Column
from fivefold.config.learners import MegatronConfig
from tests.support.layout_cases import VPP2, Case
from tests.support.shards import shard_of_replica
from tests.support.two_steps import LENGTHS, OBJECTIVE, POLICY, ROUTER, whole_batch

CASES = [
    Case("d1"),
    Case("d2"),
    Case("t2"),
    Case("p2", VPP2),
    Case("p2", {"num_layers_in_first_pipeline_stage": 1}),
    Case("c2"),
    Case("d2e2"),
    Case("t2e2"),
    Case("(attn:d2t2|ffn:t2e2)"),
    Case("t2p2e2"),
]
FIELDS = ("param", "exp_avg", "exp_avg_sq")


def policy_of(case: Case):
    return replace(POLICY, tokens_per_micro_batch=64, megatron=MegatronConfig(pipeline=case.pipeline, transformer=ROUTER))


def optimizer_by_name(model, mesh) -> dict[str, torch.Tensor]:
    """Float32 parameter, moments and step of every parameter by name, gathered over the optimizer's replicas."""
    from fivefold.megatron.chunks import _whole_name

    states: dict[str, torch.Tensor] = {}
    for outer in model._updater.optimizer.chained_optimizers:
        for buffers in outer.per_model_buffers.values():
            for buffer in buffers:
                for bucket in buffer.buckets:
                    for parameter in bucket.params_list:
                        states[id(parameter)] = _gather_state(outer, parameter, buffer.data_parallel_group)
    named = {}
    for chunk in model._chunks:
        for name, parameter in chunk.named_parameters():
            named[_whole_name(name, chunk)] = states[id(parameter)]
    return named


@torch.no_grad()
def _gather_state(outer, parameter, group):
    total = torch.zeros(3, parameter.numel(), dtype=torch.float64)
    step = torch.zeros(1, dtype=torch.float64)
    if parameter in outer.model_param_gbuf_map:
        place = outer._get_model_param_range_map(parameter)["param"]
        state = outer._get_main_param_and_optimizer_states(parameter)
        for row, name in enumerate(FIELDS):
            total[row, place.start : place.end] = state[name].double().flatten()
        step[0] = float(state["step"])
    torch.distributed.all_reduce(total, group=group)
    torch.distributed.all_reduce(step, torch.distributed.ReduceOp.MAX, group=group)
    return torch.cat([total.view(3, *parameter.shape).flatten(), step])


def whole_state(model, mesh) -> dict[str, torch.Tensor]:
    """The optimizer's state under Hugging Face names, made whole as weights are: it is streamed through the same cuts."""
    states = optimizer_by_name(model, mesh)
    gathered: dict[str, torch.Tensor] = {}
    for index, field in enumerate(FIELDS):
        for chunk in model._chunks:
            from fivefold.megatron.chunks import _whole_name

            for name, parameter in chunk.named_parameters():
                values = states[_whole_name(name, chunk)][:-1].view(3, *parameter.shape)[index]
                parameter.data.copy_(values)
        gathered |= {f"{key}.{field}": tensor.clone() for key, tensor in model.weights()}
    steps = {float(state[-1]) for state in states.values()}
    assert len(steps) == 1
    return gathered | {"step": torch.tensor(steps.pop())}


def train_and_save(mesh, directory: Path, case: Case, path: Path):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, policy_of(case), mesh, total_updates=4)
    samples = shard_of_replica(mesh.ranks, range(len(LENGTHS)))
    mine = whole_batch().select(samples)
    base = model.forward(mine)
    mine = mine.with_columns({Column.OLD_LOGPROBS: base + mine[Column.OLD_LOGPROBS]})
    for _ in range(2):
        model.train_step(mine, OBJECTIVE.loss)
    model.save(path)
    weights = {name: tensor.clone() for name, tensor in model.weights()}
    return weights, whole_state(model, mesh)


def load_and_step(mesh, directory: Path, case: Case, path: Path, fault: bool = False):
    from fivefold.megatron import dist_checkpoint
    from fivefold.megatron.model import MegatronModel

    if fault:
        dist_checkpoint._load_optimizer = lambda *_: None
    model = MegatronModel(directory, policy_of(case), mesh, total_updates=4, read_weights=False)
    model.load(path)
    weights = {name: tensor.clone() for name, tensor in model.weights()}
    return weights, whole_state(model, mesh), model.version


OTHERS = range(1, len(CASES))


@pytest.mark.parametrize(
    ("name", "aheads"),
    [
        ("qwen3_moe", [1]),
        ("deepseek_v3", [3]),
        pytest.param("qwen3_moe", OTHERS, marks=pytest.mark.slow, id="qwen3_moe-all"),
        pytest.param("deepseek_v3", OTHERS, marks=pytest.mark.slow, id="deepseek_v3-all"),
    ],
)
def test_a_checkpoint_of_any_of_ten_layouts_loads_on_any_other(cluster, models, tmp_path, name, aheads):
    """Written on each of ten and read on others of them; `make test-layouts` reads each on all others."""
    written = {}
    for number, case in enumerate(CASES):
        path = tmp_path / str(number)
        path.mkdir()
        written[number] = cluster.run(train_and_save, f"megatron:{case.layout}", models(name), case, path)[0]
    for number, ahead in itertools.product(range(len(CASES)), aheads):
        reader = CASES[(number + ahead) % len(CASES)]
        results = cluster.run(load_and_step, f"megatron:{reader.layout}", models(name), reader, tmp_path / str(number))
        for weights, state, version in results:
            assert version == 2
            for before, after in ((written[number][0], weights), (written[number][1], state)):
                assert set(before) == set(after)
                for key, tensor in before.items():
                    assert torch.equal(tensor, after[key]), f"{key} of {CASES[number]} read on {reader}"


def save_in_turn(mesh, directory: Path, root: Path, dtypes: list[str]):
    """Train and save in the first dtype; load and save in each of the others what was saved in the one before."""
    from fivefold.megatron.model import MegatronModel

    for number, dtype in enumerate(dtypes):
        model = MegatronModel(directory, replace(POLICY, dtype=dtype), mesh, total_updates=4)
        if number:
            model.load(root / str(number - 1))
        else:
            model.train_step(whole_batch(), OBJECTIVE.loss)
        (root / str(number)).mkdir()
        model.save(root / str(number))


def exact_weights(directory: Path) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    (path,) = directory.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        names = enumerate(json.loads(file.metadata()["pieces"]))
        pieces = {(name, tuple(offset)): file.get_tensor(str(number)) for number, (name, offset, _) in names}
    weights = {(name, offset): tensor for (name, offset), tensor in pieces.items() if not name.endswith(FIELDS)}
    return {(name, offset): pieces.get((f"{name}.param", offset), tensor) for (name, offset), tensor in weights.items()}


def test_the_exact_weights_stay_where_a_resumed_run_has_another_dtype(cluster, models, tmp_path):
    dtypes = ["bfloat16", "float32", "bfloat16", "float16", "float32"]
    cluster.run(save_in_turn, "megatron:d1", models("qwen3"), tmp_path, dtypes)
    first, *others = (exact_weights(tmp_path / str(number)) for number in range(len(dtypes)))
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in first.values())
    for weights in others:
        assert weights.keys() == first.keys()
        assert all(tensor.dtype == torch.float32 and torch.equal(tensor, first[key]) for key, tensor in weights.items())


@pytest.mark.parametrize(("layout", "most"), [("d2", 0.52), ("t2", 0.6), ("d2e2", 0.52)])
def test_ranks_write_each_number_once_and_divide_them(cluster, models, tmp_path, layout, most):
    """Norms and the router are the same on tensor-parallel ranks: one of those writes them."""
    cluster.run(train_and_save, f"megatron:{layout}", models("qwen3_moe"), Case(layout), tmp_path)
    covered, files = defaultdict(list), sorted(tmp_path.glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as file:
            for name, offset, size in json.loads(file.metadata()["pieces"]):
                covered[name].append((offset, size))
    assert len(files) == 2 and {name.rsplit(".", 1)[-1] for name in covered} >= {"exp_avg", "exp_avg_sq"}
    for name, boxes in covered.items():
        ends = [max(offset[axis] + size[axis] for offset, size in boxes) for axis in range(len(boxes[0][0]))]
        assert sum(math.prod(size) for _, size in boxes) == math.prod(ends), f"{name} is written in part, or twice"
    sizes = [path.stat().st_size for path in files]
    assert max(sizes) < most * sum(sizes), sizes


def bytes_made_for_a_share(mesh, model_dir):
    """Bytes of the tensors that finding a trained model's share makes, and bytes of the share."""
    from fivefold.megatron import dist_checkpoint
    from fivefold.megatron.model import MegatronModel

    class Made(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            arguments_storages = {
                leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            }
            output = function(*args, **kwargs or {})
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in arguments_storages:
                    self.total += leaf.nbytes
            return output

    model = MegatronModel(model_dir, policy_of(Case("d1")), mesh, total_updates=10)
    model.train_step(whole_batch().select(range(len(LENGTHS))), OBJECTIVE.loss)
    with mesh.active(), Made() as watched:
        share = dist_checkpoint.share_of(model._chunks, model._updater, mesh)
    return watched.total, sum(piece.values.nbytes for piece in share.pieces)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_share_is_found_without_touching_its_numbers(cluster, models, name):
    """Training pauses meanwhile: numbers made for each of a model's would take minutes of a large one."""
    ((made_bytes, share),) = cluster.run(bytes_made_for_a_share, "megatron:d1", models(name))
    assert made_bytes < share / 1000, (made_bytes, share)


def test_moments_that_are_not_loaded_are_seen(cluster, models, tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    _, before = cluster.run(train_and_save, "megatron:t2", models("qwen3_moe"), Case("t2"), path)[0]
    _, after, _ = cluster.run(load_and_step, "megatron:d2", models("qwen3_moe"), Case("d2"), path, True)[0]
    assert not all(torch.equal(before[key], after[key]) for key in before)
