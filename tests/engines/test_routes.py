"""What engines say of the experts that they chose: those that a forward of transformers chooses, token by token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivefold.columns import Column
from fivefold.config import RunConfig
from fivefold.engines.servers.begun import Begun
from fivefold.engines.transformers import TransformersEngine
from fivefold.engines.transformers_routes import RouterOutputs
from fivefold.interfaces import EngineState
from fivefold.models.spec import RouteShape
from fivefold.rollout.group_files import read_groups, write_groups
from fivefold.rollout.packing import pack
from fivefold.rollout.stats import BatchPlan, gather_stats
from fivefold.routes import NO_ROUTE, decode_routes, encode_routes, no_routes, route_columns, routes_of_engine
from fivefold.types import Completion, Request, Sampling
from tests.rollout.test_packing import make_groups
from tests.support.engines import complete, requests
from tests.support.tiny_models import MOE_VARIANTS

FAMILIES = [name for name in MOE_VARIANTS if name not in ("deepseek_v3_collapsed", "deepseek_v3_yarn")]
TOKENIZER = SimpleNamespace(eos_token_id=1)


def own_routes(directory: Path, tokens: list[int]) -> torch.Tensor:
    """[T, L, K] sorted, of one forward of transformers over all of them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).float()
    chosen = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(chosen, 1).sort(-1).values


def assert_own_routes(directory: Path, asked: list[Request], completions: list[Completion]) -> None:
    for request, completion in zip(asked, completions, strict=True):
        tokens = request.prompt_ids + completion.token_ids
        assert completion.routes_TLK is not None and completion.routes_TLK.dtype == torch.int8
        # The last token was sampled and not read.
        assert torch.equal(completion.routes_TLK.long().sort(-1).values, own_routes(directory, tokens)[:-1])


def transformers_engine(directory: Path, max_num_seqs: int = 64, check_every: int = 1) -> TransformersEngine:
    import transformers

    arguments = (directory, TOKENIZER, torch.device("cpu"), torch.float32, max_num_seqs)
    engine = TransformersEngine(*arguments, gives_routes=True)
    engine._check_every = check_every
    source = transformers.AutoModelForCausalLM.from_pretrained(directory).float()
    state, memory = source.state_dict(), engine._model.state_dict()
    assert set(state) == set(memory)
    for name, tensor in memory.items():
        tensor.copy_(state[name])
    engine.state, engine.version = EngineState.READY, 3
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_the_routes_of_completions_are_those_of_a_forward_of_transformers(models, name):
    asked = requests(2)
    assert_own_routes(models(name), asked, complete(transformers_engine(models(name)), asked))


@pytest.mark.parametrize("check_every", [1, 4, 7])
def test_routes_do_not_depend_on_how_requests_are_batched_or_looked_after(models, check_every):
    asked = requests(3, Sampling(max_tokens=15, stop_token_ids=tuple(range(40))))
    engine = transformers_engine(models("qwen3_moe"), max_num_seqs=5, check_every=check_every)
    assert_own_routes(models("qwen3_moe"), asked, complete(engine, asked))


def test_what_was_aborted_has_routes_too(models):
    engine, asked, completions = transformers_engine(models("qwen3_moe")), requests(1), {}
    for completion in engine.generate(asked):
        completions[completion.request_id] = completion
        engine.abort()
    assert "abort" in {completion.finish_reason for completion in completions.values()} or len(completions) == len(asked)
    assert_own_routes(models("qwen3_moe"), asked, [completions[request.id] for request in asked])


def test_a_model_without_such_routers_is_refused():
    with pytest.raises(RuntimeError, match="must be 2: this release of transformers has 0"):
        RouterOutputs(torch.nn.Linear(2, 2), RouteShape(4, (1, 3), 2, 8))


# --- on their way ----------------------------------------------------------------------------------------------------

SHAPES = [RouteShape(2, (0, 1), 2, 8), RouteShape(3, (1, 2), 3, 8), RouteShape(2, (0, 1), 1, 300)]


def drawn(shape: RouteShape, tokens: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.rand(tokens, len(shape.layers), shape.num_experts, generator=draw).argsort(-1)
    return rows[..., : shape.top_k].to(no_routes(0, shape).dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routes_keep_their_bits_on_their_way(shape):
    routes_TLK = drawn(shape, 9, 1)
    columns_TF = encode_routes(routes_TLK[:8], 9, shape)
    assert columns_TF.shape == (9, route_columns(shape)) and columns_TF.dtype == torch.int32
    decoded_TLK = decode_routes(torch.cat([columns_TF, columns_TF])[9:], shape)
    assert torch.equal(decoded_TLK[:8], routes_TLK[:8]) and (decoded_TLK[8] == NO_ROUTE).all()
    assert (decode_routes(encode_routes(None, 2, shape), shape) == NO_ROUTE).all()


def with_routes(shape: RouteShape, sizes: list[int]):
    """Groups whose every second sample has routes."""
    groups = make_groups(sizes)
    for number, (group, sample) in enumerate(
        (whole_group, sample) for whole_group in groups for sample in whole_group.samples
    ):
        if number % 2:
            length = len(group.prompt.token_ids) + len(sample.token_ids) - 1
            sample.routes_TLK = drawn(shape, length, number)
    return groups


def packed(mesh, shape: RouteShape, sizes: list[int]):
    plan = BatchPlan(updates_per_step=2, temperature=0.9, max_response_tokens=9, routes=shape)
    groups = [group for group in with_routes(shape, sizes) if group.index % mesh.layout.world_size == mesh.ranks.rank]
    stats = gather_stats(groups, mesh.ranks, plan)
    return pack(groups, stats, mesh.ranks, plan)


@pytest.mark.parametrize("layout", ["d1", "d2", "d2t2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_bring_their_routes_to_the_replica_that_trains_on_them(cluster, layout, shape):
    sizes = [3, 2, 4, 1]
    samples = [(group, sample) for group in with_routes(shape, sizes) for sample in group.samples]
    for batch in cluster.run(packed, f"megatron:{layout}", shape, sizes):
        pieces = batch[Column.ROUTES].split(batch.lengths_N)
        for row, routes_TLK in zip(batch.sample_index_N, pieces, strict=True):
            group, sample = samples[row]
            wanted = no_routes(len(group.prompt.token_ids) + len(sample.token_ids), shape)
            if sample.routes_TLK is not None:
                wanted[:-1] = sample.routes_TLK
            assert torch.equal(routes_TLK, wanted)


def test_groups_that_wait_keep_the_routes_of_their_samples(tmp_path):
    shape = SHAPES[1]
    groups = {place: group.samples for place, group in enumerate(with_routes(shape, [3, 2]))}
    write_groups(tmp_path / "groups", groups, [0])
    stored, *_ = read_groups(tmp_path / "groups")
    for place, samples in groups.items():
        for sample, read in zip(samples, stored[place], strict=True):
            same = sample.routes_TLK is read.routes_TLK is None
            assert same or torch.equal(sample.routes_TLK, read.routes_TLK)


def test_a_response_that_new_weights_continue_with_keeps_the_routes_that_it_has():
    shape, request = SHAPES[0], Request(1, [5, 6, 7], Sampling(max_tokens=5), 9)
    first, second = drawn(shape, 4, 1), drawn(shape, 7, 2)
    begun = Begun(request, Completion(1, [8, 9], [-1.0] * 2, "abort", 1, routes_TLK=first))
    assert len(begun.rest().prompt_ids) == 5
    continued = begun.with_more(Completion(1, [3, 4, 2], [-1.0] * 3, "stop", 2, routes_TLK=second)).completion
    # Prompt and first token were read by the first weights; the second token, which they sampled, by the new ones.
    assert torch.equal(continued.routes_TLK, torch.cat([first, second[4:]]))
    nothing = Begun(request, Completion(1, [], [], "abort", 1))
    assert nothing.with_more(Completion(1, [3], [-1.0], "stop", 2, routes_TLK=first[:3])).completion.routes_TLK is not None


def test_layers_without_experts_are_left_out_of_what_an_engine_says():
    shape = RouteShape(4, (1, 3), 2, 300)
    reported = torch.arange(5 * 4 * 2).view(5, 4, 2)
    routes = routes_of_engine(reported, 6, shape, is_aborted=False)
    assert torch.equal(routes.long(), reported[:, [1, 3]]) and routes.dtype == torch.int16
    assert torch.equal(routes_of_engine(reported[:, :2], 6, shape, is_aborted=False).long(), reported[:, :2])
    assert routes_of_engine(None, 6, shape, is_aborted=True) is None
    for wrong in (None, reported[:4], reported[:, :3], reported[..., :1]):
        with pytest.raises(RuntimeError, match=r"enable-return-routed-experts"):
            routes_of_engine(wrong, 6, shape, is_aborted=False)


# --- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"algorithm": {"name": "sft"}}, "where no engine samples"),
        ({"engine": {"backend": "sglang:d1"}}, "with SGLang"),
        ({"engine": {"backend": "vllm:d1", "vllm": {"enable_prefix_caching": False}}}, "prefix cache"),
        ({"engine": {"backend": "vllm:d1t2"}, "policy": {"backend": "megatron:d2"}}, "engine.mode must be server"),
    ],
)
def test_what_gives_no_routes_is_refused(sections, reason):
    RunConfig.of(model={"path": "here"}, **sections)
    sections = {"policy": {}} | sections
    with pytest.raises(ValueError, match=reason):
        RunConfig.of(model={"path": "here"}, **sections | {"policy": sections["policy"] | {"router_replay": "R3"}})
