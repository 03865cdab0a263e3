"""How fast engines sample and weights reach them, on the GPUs that are there; tiny on a CPU, for a look at the script.

`python benchmarks/engine_speed.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N seconds
at most. What a part measures is printed as it comes. vLLM must be installed for all but the first.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from benchmarks.harness import Part, run
from fivefold.config.learners import OffloadConfig
from fivefold.engines.sampling import request_seed
from fivefold.engines.servers.http import blocking_client, streaming_client
from fivefold.engines.vllm.arguments import of_model
from fivefold.engines.vllm.probe import answers
from fivefold.engines.weight_sync import weight_sync
from fivefold.interfaces import EngineState
from fivefold.layout import ParallelLayout
from fivefold.models.config_json import read_config
from fivefold.types import Completion, Request, Sampling, TokenBatch
from tests.support.gpu_models import build, is_large, timed
from tests.support.layout_cases import with_backend

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh
    from fivefold.megatron.model import MegatronModel

TOKENIZER = SimpleNamespace(eos_token_id=None)
PASSES = 5


def request_sets(large: bool, vocab: int) -> dict[str, list[Request]]:
    """32 prompts of 8 responses each; the last set has lengths with a long tail, as reasoning has."""
    shapes = {"128+256": (128, 256), "512+1024": (512, 1024)} if large else {"8+8": (8, 8), "16+16": (16, 16)}
    prompts, group = (32, 8) if large else (4, 2)
    draw = random.Random(3)

    def requests(prompt: int, lengths: list[int]) -> list[Request]:
        texts = [[draw.randrange(10, vocab - 10) for _ in range(prompt)] for _ in range(prompts)]
        return [
            Request(i, texts[i // group], Sampling(max_tokens=length, ignore_eos=True), request_seed((i,)))
            for i, length in enumerate(lengths)
        ]

    sets = {name: requests(prompt, [length] * (prompts * group)) for name, (prompt, length) in shapes.items()}
    median, most = (400, 4096) if large else (6, 24)
    tail = [min(most, 1 + int(median * math.exp(draw.gauss(0, 0.9)))) for _ in range(prompts * group)]
    return sets | {"long tail": requests(128 if large else 8, tail)}


def tokens_of(completions: list[Completion]) -> int:
    return sum(len(one.token_ids) for one in completions)


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def transformers_engine(mesh: Mesh, directory: Path, names: list[str]) -> dict[str, Any]:
    """Tokens a second by set."""
    from fivefold.engines.transformers import TransformersEngine

    engine = TransformersEngine(directory, TOKENIZER, mesh.device, torch.bfloat16, 256)
    engine.state = EngineState.READY
    sets, speeds = request_sets(is_large(mesh), engine._spec.vocab), {}
    list(engine.generate([Request(0, [11, 12], Sampling(max_tokens=8), 1)]))
    for name in names:
        seconds, completions = timed(mesh, lambda name=name: list(engine.generate(sets[name])))
        speeds[name] = {"seconds": round(seconds, 2), "tokens_per_second": round(tokens_of(completions) / seconds)}
    return speeds


@contextmanager
def as_vllm_is(engine: Any) -> Iterator[None]:
    """Puts back what our engine has replaced in vLLM's scheduler and sampler."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    replaced: list[tuple[Any, str, Any]] = [(KVCacheManager, "allocate_slots", KVCacheManager.allocate_slots.vllms_own)]
    sampler = getattr(engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner, "sampler", None)
    if (inner := getattr(sampler, "topk_topp_sampler", None)) is not None:
        replaced.append((inner, "forward", getattr(inner.forward, "vllms_own", inner.forward)))
        replaced += [(one, "logprobs_mode", "raw_logprobs") for one in (inner, sampler)]
    with ExitStack() as stack:
        for one, name, vllms_own in replaced:
            stack.enter_context(patch.object(one, name, vllms_own))
        yield


def vllm_engine(mesh: Mesh, /, directory: Path, layout: str, sets: int, **overrides: Any) -> None:
    """Start, weight syncs by their parts, tokens a second by set next to vLLM alone, log-probs next to the trainer's.

    `own` are arguments of vLLM."""
    from vllm import SamplingParams

    from fivefold.engines.vllm.engine import VLLMEngine

    large = is_large(mesh)
    settings = arguments(directory, large) | overrides
    away = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model = build(mesh, directory, "bfloat16" if large else "float32", 16384 if large else 64, offload=away)
    model.offload()
    begin = time.perf_counter()
    engine = VLLMEngine(
        directory, TOKENIZER, ParallelLayout.parse(f"vllm:{layout}"), mesh.ranks.rank, mesh.device, settings,
        verify_every=2, can_sleep=large,
    )  # fmt: skip
    tell(mesh, "start", round(time.perf_counter() - begin, 1))
    for version in range(4):
        tell(mesh, "sync", synced(mesh, model, engine, version))
    if not sets:
        return
    for number, (name, requests) in enumerate([*request_sets(large, model.spec.vocab).items()][:sets]):
        mine = requests[engine.replica.index :: engine.replica.count]
        # Kernels are compiled for the sizes of these batches.
        list(engine.generate([Request(i, one.prompt_ids, Sampling(max_tokens=2), i) for i, one in enumerate(mine)]))
        prompts = [{"prompt_token_ids": one.prompt_ids} for one in mine]
        completions: list[Completion] = []
        rates: dict[str, list[int]] = {}
        # Alternately, since speed changes by a tenth and more from one pass to the next.
        for _ in range(PASSES):
            engine._llm.reset_prefix_cache()
            seconds, completions = timed(mesh, lambda mine=mine: list(engine.generate(mine)))
            rates.setdefault("ours", []).append(round(tokens_of(completions) / seconds))
            for what, options in (("vllm_with_logprobs", {"logprobs": 0}), ("vllm_alone", {})):
                engine._llm.reset_prefix_cache()
                params = [
                    SamplingParams(max_tokens=one.sampling.max_tokens, ignore_eos=True, detokenize=False, **options)
                    for one in mine
                ]
                with as_vllm_is(engine):
                    seconds, _ = timed(
                        mesh, lambda prompts=prompts, params=params: engine._llm.generate(prompts, params, use_tqdm=False)
                    )
                rates.setdefault(what, []).append(round(tokens_of(completions) / seconds))
        median = {what: statistics.median(measured) for what, measured in rates.items()}
        ratios = {f"ours_over_{what}": round(median["ours"] / median[what], 3) for what in rates if what != "ours"}
        tell(mesh, name, {"tokens_per_second": rates, **ratios})
        if number == 0:
            tell(mesh, "log-probs", logprob_gap(model, mine[:64], completions))
            model.offload()
    if large:
        free, _ = torch.cuda.mem_get_info()
        seconds, _ = timed(mesh, engine.sleep)
        freed = (torch.cuda.mem_get_info()[0] - free) / 2**30
        tell(mesh, "sleep", {"seconds": round(seconds, 3), "freed_gib": round(freed, 1)})


def vllm_servers(mesh: Mesh, directory: Path, layout: str, sets: int) -> None:
    """The same with servers in processes of their own, on the same devices."""
    from fivefold.engines.servers.server_engine import ServerEngine
    from fivefold.engines.vllm.client import VLLMServer
    from fivefold.engines.vllm.serve import server_process

    large, tp, rank = is_large(mesh), ParallelLayout.parse(f"vllm:{layout}").tp, mesh.ranks.rank
    away = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model = build(mesh, directory, "bfloat16" if large else "float32", 16384 if large else 64, offload=away)
    model.offload()
    processes = {}
    if rank % tp == 0:
        given = {"model": str(directory), "tensor_parallel_size": tp, "enable_sleep_mode": large}
        given |= arguments(directory, large) | opened_routes()
        log = directory.parent / f"server-{layout}-{rank}.log"
        processes = {rank // tp: server_process(given, mesh.device, tp, log, answers)}
    begin = time.perf_counter()
    engine = ServerEngine(
        directory, mesh.ranks, mesh.device, partial(VLLMServer, ends=set(), run="benchmark"), print,
        processes=processes, ranks_per_server=tp,
        window=320, bucket_bytes=512 << 20, verify_every=2, can_sleep=large,
    )  # fmt: skip
    tell(mesh, "start", round(time.perf_counter() - begin, 1))
    for version in range(4):
        tell(mesh, "sync", synced(mesh, model, engine, version))
    if not sets:
        return engine.close()
    list(engine.generate([Request(i, [11, 12, 13 + i], Sampling(max_tokens=4), i) for i in range(256)]))
    for name, requests in [*request_sets(large, model.spec.vocab).items()][:sets]:
        mine = requests[engine.replica.index :: engine.replica.count]
        seconds, completions = timed(mesh, lambda mine=mine: list(engine.generate(mine)))
        row = {"ours": round(tokens_of(completions) * mesh.ranks.layout.world_size / seconds)}
        for what, logprobs in (("vllms_route", 0), ("vllms_route_without_logprobs", None)):
            for process in processes.values():
                blocking_client(process.address).post("/reset_prefix_cache")
            asked = [
                route_of_vllm(process.address, requests[number :: engine.replica.count], logprobs)
                for number, process in processes.items()
            ]
            seconds, _ = timed(mesh, lambda asked=asked: [asyncio.run(coroutine) for coroutine in asked])
            row[what] = round(tokens_of(completions) * mesh.ranks.layout.world_size / seconds)
        tell(mesh, name, {"tokens_per_second": row, "ours_over_theirs": round(row["ours"] / row["vllms_route"], 3)})
        engine.update_weights(model.weights(), engine.version)
        model.offload()
    seconds, _ = timed(mesh, engine.sleep)
    tell(mesh, "sleep", {"seconds": round(seconds, 3)})
    return engine.close()


def opened_routes() -> dict[str, Any]:
    """What opens the server's own route for tokens, which newer releases keep closed."""
    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
    except ImportError:
        from vllm.entrypoints.openai.cli_args import FrontendArgs
    return {"enable_scale_out": True} if hasattr(FrontendArgs, "enable_scale_out") else {}


async def route_of_vllm(address: str, requests: list[Request], logprobs: int | None) -> None:
    """The same requests of the server's own route."""

    async def ask(one: Request) -> None:
        sampling = {"max_tokens": one.sampling.max_tokens, "ignore_eos": True, "logprobs": logprobs, "detokenize": False}
        asked = {"token_ids": one.prompt_ids, "sampling_params": sampling}
        answer = await client.post("/inference/v1/generate", json=asked)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == one.sampling.max_tokens

    async with streaming_client(address) as client:
        await asyncio.gather(*map(ask, requests))


def arguments(directory: Path, large: bool) -> dict[str, Any]:
    """vLLM's own, the same for every way to run it."""
    options = {"dtype": "bfloat16" if large else "float32", "max_model_len": 4352 if large else 64, "seed": 0}
    options |= {"max_num_seqs": 256, "skip_tokenizer_init": True} | of_model(read_config(directory), not large)
    return options | ({"gpu_memory_utilization": 0.6} if large else {"kv_cache_memory_bytes": 64 << 20})


def tell(mesh: Mesh, what: str, numbers: Any) -> None:
    """Print a result as it comes."""
    if mesh.ranks.is_main:
        print(f"    {what}: {json.dumps(numbers)}", flush=True)


def synced(mesh: Mesh, model: MegatronModel, engine: Any, version: int, verified: bool | None = None) -> dict[str, Any]:
    """Seconds of a sync by its parts, from a sleeping engine to one that can sample; from the third on as after an
    update, with the parameters on the device. `verified`: whether weights are compared (default: in every other sync)."""
    there = version >= 2
    seconds: dict[str, float] = {}
    parts = {"wake_weights": "wake", "update": "update_weights"}
    for what, method in parts.items():

        def watched(*given: Any, what: str = what, method: str = method) -> None:
            begin = time.perf_counter()
            getattr(type(engine), method)(engine, *given)
            seconds[what] = time.perf_counter() - begin

        setattr(engine, method, watched)
    engine.sleep()
    model.onload()
    model.offload(parameters=not there)
    engine.version = -1
    sync, _ = timed(mesh, lambda: weight_sync(model, engine))
    for method in parts.values():
        delattr(engine, method)
    model.offload()
    seconds["wake_cache"], _ = timed(mesh, engine._wake_cache)
    seconds["all"] = sync + seconds["wake_cache"]
    where = {"verified": version % 2 == 0 if verified is None else verified, "parameters_on_device": there}
    return {name: round(value, 3) for name, value in seconds.items()} | where


def logprob_gap(model: MegatronModel, requests: list[Request], completions: list[Completion]) -> dict[str, float]:
    """Of the engine's log-probs to the trainer's, by token."""
    completion_of = {one.request_id: one for one in completions}
    tokens, mask, theirs, lengths = [], [], [], []
    for request in requests:
        completion = completion_of[request.id]
        tokens += request.prompt_ids + completion.token_ids
        mask += [False] * len(request.prompt_ids) + [True] * len(completion.token_ids)
        theirs += completion.logprobs
        lengths.append(len(request.prompt_ids) + len(completion.token_ids))
    batch = TokenBatch(torch.tensor(tokens), torch.tensor(mask), lengths)
    gap = model.forward(batch)[batch.loss_mask_T] - torch.tensor(theirs)
    size = gap.abs()
    beyond = {f"beyond_{bound}": round(float((size > bound).float().mean()), 6) for bound in (0.1, 0.5, 1.0)}
    kl = float((gap.exp() - 1 - gap).mean())
    return {"mean": round(float(size.mean()), 5), "max": round(float(size.max()), 4), "kl": float(f"{kl:.2e}"), **beyond}


# --- parts -----------------------------------------------------------------------------------------------------------


def embedded(part: Part) -> None:
    """The transformers engine, Qwen3-1.7B's shape."""
    names = ["128+256"] if part.large else ["8+8"]
    speeds = part.measure("transformers", "d1", transformers_engine, part.model("qwen3_1.7b"), names)
    if speeds is not None:
        part.say("transformers", speeds)


def beside(name: str, layouts: dict[str, str], sets: int = 3) -> Callable[[Part], None]:
    def measure(part: Part) -> None:
        for layout, engine in layouts.items():
            for what, function in (("in process", vllm_engine), ("as servers", vllm_servers)):
                part.say(f"vllm:{engine} {what}, {layout}", "")
                part.measure(f"vllm:{engine} {what}, {layout}", layout, function, part.model(name), engine, sets)

    measure.__doc__ = f"vLLM in the trainer's ranks, and as servers on their devices, {name}."
    return measure


def families(*rows: tuple[str, str, str, dict[str, Any]]) -> Callable[[Part], None]:
    def measure(part: Part) -> None:
        for name, layout, engine, overrides in rows:
            what = f"{name} in process, {layout}, vllm:{engine}{f', {overrides}' if overrides else ''}"
            if overrides and not part.large:
                part.say(what, "needs a GPU")
                continue
            part.say(what, "")
            part.measure(what, layout, vllm_engine, part.model(name), engine, 1, **overrides)

    measure.__doc__ = "Mixtures of experts, latent attention, quantization: their weights compared, their log-probs."
    return measure


FIVEFOLD = [sys.executable, "-m", "fivefold.cli"]


def write_data(root: Path) -> None:
    """Prompts and a tokenizer for runs of the command line, unless they are there."""
    if not (root / "data").exists():
        for command in (
            ["data", "arithmetic", "--out", f"{root}/data", "--limit", "512"],
            ["train-tokenizer", "char", "--data", f"{root}/data/train.parquet", "--out", f"{root}/tokenizer"],
        ):
            subprocess.run([*FIVEFOLD, *command], check=True, capture_output=True)


def grpo_run(part: Part, name: str, layout: str, run_dir: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """Configuration of three steps of GRPO on `write_data`'s prompts; `engine`: settings of that section."""
    model = part.model(name)
    root = model.parent
    data = {"train": [f"{root}/data/train.parquet"], "prompts_per_step": 32, "max_prompt_tokens": 64}
    trainer = {"run_dir": str(run_dir), "steps": 3, "save_every": 0, "loggers": ["console"]}
    return {
        "model": {"path": str(model), "tokenizer": f"{root}/tokenizer"},
        "policy": {
            "backend": with_backend(layout), "tokens_per_micro_batch": 16384, "skip_zero_advantage": False,
            "recompute": "full" if name == "qwen3_8b" else "none", "optimizer": {"lr": 1.0e-6},
            "offload": {"parameters": True, "gradients": True, "optimizer": True},
        },
        "engine": {**engine, "max_logprob_diff": 0.1, "sampling": {"ignore_eos": True}},
        "algorithm": {"name": "grpo", "group_size": 8, "kl": {"coef": 0}},
        "data": {**data, "max_response_tokens": 1024 if part.large else 16},
        "reward": {"functions": {"format": 1.0}},
        "trainer": {**trainer, "device": "cuda" if part.large else "cpu"},
    }  # fmt: skip


def whole_run(part: Part, name: str, layout: str, what: str, engine: dict[str, Any]) -> None:
    """Steps of GRPO from the command line; `engine`: settings of that section."""
    root = part.model(name).parent
    write_data(root)
    run = grpo_run(part, name, layout, root / what, engine)
    part.train(f"{name}, {layout}, {what}", run, ("time/", "throughput/", "memory/", "rollout/logprob", "rollout/kl"))


def runs(*rows: tuple[str, str, str, str, float]) -> Callable[[Part], None]:
    def measure(part: Part) -> None:
        for name, layout, engine, mode, fraction in rows:
            world = ParallelLayout.parse(f"megatron:{layout}").world_size
            if (part.large and world > part.gpus) or part.left < 60:
                part.say(f"{name}, {layout}, {engine} {mode}", "not measured")
            else:
                settings = {"backend": engine, "mode": mode, "memory_fraction": fraction}
                whole_run(part, name, layout, f"{engine}-{mode}", settings)

    measure.__doc__ = "Whole GRPO steps, 32 prompts of 8 responses of 1024 tokens."
    return measure


def run_url(part: Part) -> None:
    """Whole GRPO steps with a server that another user has started, on the last GPU."""
    model, port = part.model("qwen3_1.7b"), 18470
    options = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.6"] if part.large else ["--dtype", "float32"]
    command = [sys.executable, "-m", "fivefold.engines.vllm.serve", "--model", str(model), "--port", str(port), *options]
    command += ["--max-model-len", "2048", "--load-format", "dummy", "--skip-tokenizer-init", "--seed", "0"]
    where = {"CUDA_VISIBLE_DEVICES": str(part.gpus - 1)} if part.large else {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (model.parent / "url.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | where)
        try:
            while server.poll() is None and part.left > 0 and not answers(f"http://127.0.0.1:{port}"):
                time.sleep(1)
            whole_run(part, "qwen3_1.7b", "d1", "url", {"backend": "vllm", "url": [f"http://127.0.0.1:{port}"]})
        finally:
            server.terminate()


PARTS: dict[str, Callable[[Part], None]] = {
    "transformers": embedded,
    "1.7b": beside("qwen3_1.7b", {"d1": "d1"}),
    "families": families(
        ("qwen3_moe", "d1", "d1", {}),
        ("deepseek_v3", "d1", "d1", {}),
        ("qwen3_0.6b", "d1", "d1", {"quantization": "fp8"}),
    ),
    "families-two": families(("qwen3_moe", "d2e2", "d1t2e2", {}), ("deepseek_v3", "t2e2", "d1t2e2", {})),
    "8b": beside("qwen3_8b", {"t2": "d1t2"}),
    "syncs-two": beside("qwen3_8b", {"t2": "d1t2"}, sets=0),
    "syncs-four": beside("qwen3_8b", {"d2t2": "d2t2", "t4": "d1t4"}, sets=0),
    "runs-one": runs(
        ("qwen3_1.7b", "d1", "vllm:d1", "in_process", 0.5),
        ("qwen3_1.7b", "d1", "vllm:d1", "server", 0.5),
        ("qwen3_1.7b", "d1", "transformers", "in_process", 0.5),
    ),
    "runs-two": runs(("qwen3_8b", "t2", "vllm:d1t2", "in_process", 0.6)),
    "runs-two-servers": runs(("qwen3_8b", "t2", "vllm:d1t2", "server", 0.6)),
    "run-url": run_url,
    "runs-four": runs(
        ("qwen3_8b", "d2t2", "vllm:d2t2", "in_process", 0.6), ("qwen3_1.7b", "d4", "vllm:d4", "in_process", 0.5)
    ),
}

if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import engine_speed

    sys.exit(run(engine_speed.__doc__, engine_speed.PARTS))
