"""Measure SGLang's servers next to the trainer: log-probs, weights, memory, failures, keys of requests, rates; one and two
GPUs.

`python benchmarks/sglang_servers.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N
seconds at most; a server takes about 100 s to start the first time. What a part measures is printed as it comes. The
variable SGLANG_ARGUMENTS has further arguments of SGLang as JSON, such as '{"attention_backend": "triton"}' where its own
choice of kernels is not installed; VLLM_PYTHONPATH is the PYTHONPATH of vLLM's server, where the two cannot share their
dependencies. `--dry-run`: tiny models on CPUs; SGLang then runs with the stand-ins of its tests:

    PYTHONPATH=tests/support/sglang_cpu .venv-sglang/bin/python benchmarks/sglang_servers.py --dry-run --seconds 600

Where SGLang is not installed, what needs it is left out and named.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from benchmarks.engine_speed import arguments, logprob_gap, request_sets, synced, tell, tokens_of, write_data
from benchmarks.harness import Part, run
from fivefold.config.learners import OffloadConfig
from fivefold.interfaces import EngineState
from fivefold.types import Completion, Request
from tests.support.gpu_models import build, is_large, step_batch, timed
from tests.support.shards import shard_of_replica
from tests.support.two_steps import OBJECTIVE

if TYPE_CHECKING:
    from fivefold.engines.servers.server_engine import ServerEngine
    from fivefold.megatron.mesh import Mesh
    from fivefold.megatron.model import MegatronModel

OWN = json.loads(os.environ.get("SGLANG_ARGUMENTS", "{}"))
ON_CPU = {
    "attention_backend": "torch_native", "sampling_backend": "pytorch", "disable_cuda_graph": True,
    "disable_overlap_schedule": True, "sleep_on_idle": True,
}  # fmt: skip
FRACTION = 0.4
"""Share of a GPU's memory for the server's weights and cache."""


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def servers_of(
    mesh: Mesh, directory: Path, kind: str, tp: int, dtype: str, overrides: dict[str, Any], apart: bool = False
) -> ServerEngine:
    """Return an engine of servers, each on the devices of `tp` ranks, or one on the devices after those of the ranks.

    `overrides`: SGLang's arguments. Every sync compares the held weights with the sent ones, bit by bit.
    """
    from fivefold.engines.servers.server_engine import ServerEngine

    large, rank = is_large(mesh), mesh.ranks.rank
    log = directory.parent / f"{kind}-{tp}-{rank}-{dtype}.log"
    device = torch.device("cuda", mesh.ranks.layout.world_size) if apart and large else mesh.device
    connect: Any
    if kind == "vllm":
        from fivefold.engines.vllm.client import VLLMServer
        from fivefold.engines.vllm.probe import answers
        from fivefold.engines.vllm.serve import server_process

        connect = VLLMServer
        given = {"model": str(directory), "tensor_parallel_size": tp, "enable_sleep_mode": large}
        given |= arguments(directory, large) | ({"gpu_memory_utilization": FRACTION} if large else {})
        if "VLLM_PYTHONPATH" in os.environ:
            os.environ["PYTHONPATH"] = os.environ["VLLM_PYTHONPATH"]
    else:
        from fivefold.engines.sglang.client import SGLangServer
        from fivefold.engines.sglang.probe import answers
        from fivefold.engines.sglang.serve import server_process

        connect = SGLangServer
        given = {"model_path": str(directory), "tp_size": tp, "dtype": dtype, "random_seed": 0}
        given |= {"context_length": 4352 if large else 64, "max_running_requests": 256 if large else 64}
        given |= {"mem_fraction_static": FRACTION, "enable_memory_saver": not apart} if large else {"max_total_tokens": 8192}
        given |= (ON_CPU if not large else {}) | OWN | overrides
    processes = {}
    if rank % tp == 0 and not (apart and rank):
        processes = {rank // tp: server_process(given, device, tp, log, answers)}
    begin = time.perf_counter()
    engine = ServerEngine(
        directory, mesh.ranks, mesh.device, partial(connect, ends=set(), run="benchmark"), print,
        processes=processes, ranks_per_server=None if apart else tp,
        window=320, bucket_bytes=256 << 20, verify_every=1, can_sleep=large and not apart,
    )  # fmt: skip
    tell(mesh, "start", round(time.perf_counter() - begin, 1))
    return engine


def trainer_of(mesh: Mesh, directory: Path, dtype: str) -> MegatronModel:
    away = OffloadConfig(parameters=True, gradients=True, optimizer=True)
    model = build(mesh, directory, dtype, 16384 if is_large(mesh) else 64, offload=away)
    model.offload()
    return model


def asked_of(mesh: Mesh, model: MegatronModel, count: int = 64) -> list[Request]:
    """Return the requests of the first set, which are the same on all ranks."""
    return next(iter(request_sets(is_large(mesh), model.spec.vocab).values()))[:count]


def first_of(mesh: Mesh, completions: Iterable[Completion]) -> list[Completion]:
    """Return the first rank's completions on all ranks: every rank samples, and all compute log-probs of the same tokens."""
    rows = [asdict(one) for one in completions]
    return [Completion(**one) for one in mesh.ranks.broadcast_from_main(rows)]


def steps(mesh: Mesh, directory: Path, tp: int, dtype: str, apart: bool = False) -> list[dict[str, float]]:
    """Return the difference of the server's log-probs from the trainer's after each of four syncs, with an update between
    two."""
    model = trainer_of(mesh, directory, dtype)
    engine = servers_of(mesh, directory, "sglang", tp, dtype, {}, apart)
    asked, batch, gaps = asked_of(mesh, model), step_batch(mesh, model.spec.vocab), []
    for version in range(4):
        tell(mesh, "sync", synced(mesh, model, engine, version, verified=True))
        gaps.append(logprob_gap(model, asked, first_of(mesh, engine.generate(asked))))
        tell(mesh, "log-probs", gaps[-1])
        engine.sleep()
        model.onload()
        model.train_step(batch.select(shard_of_replica(mesh.ranks, range(len(batch.lengths_N)))), OBJECTIVE.loss)
        model.offload()
    engine.close()
    return gaps


def slept(mesh: Mesh, directory: Path) -> dict[str, float]:
    """Return the GiB that a sleeping server gives back, and the seconds that this takes."""
    model = trainer_of(mesh, directory, "bfloat16")
    engine = servers_of(mesh, directory, "sglang", 1, "bfloat16", {})
    numbers: dict[str, float] = {}
    for version in range(2):
        synced(mesh, model, engine, version, verified=True)
        list(engine.generate(asked_of(mesh, model)))
        before = torch.cuda.mem_get_info()[0]
        seconds, _ = timed(mesh, engine.sleep)
        after, total = torch.cuda.mem_get_info()
        numbers = {"sleep_seconds": round(seconds, 3), "freed_gib": round((after - before) / 2**30, 1)}
        numbers |= {"of_its_share": round((after - before) / (FRACTION * total), 3)}
        tell(mesh, "sleep", numbers)
    tell(mesh, "wake", synced(mesh, model, engine, 2, verified=True))
    gap = logprob_gap(model, asked_of(mesh, model), list(engine.generate(asked_of(mesh, model))))
    engine.close()
    return numbers | {"logprobs_mean": gap["mean"]}


def killed(mesh: Mesh, directory: Path) -> dict[str, Any]:
    """Kill a server of the last rank while it samples, start it again, and claim that it samples with the weights."""
    from tests.support.servers import kill_api

    dtype = dtype_of(is_large(mesh))
    model, engine = trainer_of(mesh, directory, dtype), servers_of(mesh, directory, "sglang", 1, dtype, {})
    synced(mesh, model, engine, 0, verified=True)
    asked = [replace(one, sampling=replace(one.sampling, max_tokens=1 + one.id % 48)) for one in asked_of(mesh, model)]
    arrived: list[str] = []
    for completion in engine.generate(asked):
        if not arrived and mesh.ranks.rank == mesh.ranks.layout.world_size - 1:
            kill_api(engine)
        arrived.append(completion.finish_reason)
    kept = sum(reason != "lost" for reason in arrived)
    begin = time.perf_counter()
    model.onload()
    is_lost = engine.state is EngineState.LOST
    engine.sleep()
    synced(mesh, model, engine, 1, verified=True)
    seconds = time.perf_counter() - begin
    again = list(engine.generate(asked))
    gap = logprob_gap(model, asked, first_of(mesh, again))
    engine.close()
    return {
        "requests": len(asked), "answered": kept, "answers": len(arrived), "was_lost": is_lost,
        "restarts": engine.restarts, "restart_seconds": round(seconds, 1), "answered_again": len(again),
        "logprobs_mean": gap["mean"],
    }  # fmt: skip


def keyed(mesh: Mesh, directory: Path, overrides: dict[str, Any]) -> dict[str, float]:
    """Return the share of requests that draw the same tokens again in the same batch, and alone."""
    dtype = dtype_of(is_large(mesh))
    model, engine = trainer_of(mesh, directory, dtype), servers_of(mesh, directory, "sglang", 1, dtype, overrides)
    synced(mesh, model, engine, 0, verified=True)
    asked = asked_of(mesh, model)

    def tokens(requests: list[Request]) -> dict[int, list[int]]:
        return {one.request_id: one.token_ids for one in engine.generate(requests)}

    first, again = tokens(asked), tokens(asked)
    alone = {number: drawn for one in asked[:8] for number, drawn in tokens([one]).items()}
    engine.close()

    def share(drawn: dict[int, list[int]]) -> float:
        return round(sum(first[number] == one for number, one in drawn.items()) / len(drawn), 3)

    distinct = len({tuple(one) for one in first.values()}) / len(first)
    return {"the_batch_again": share(again), "alone": share(alone), "distinct": round(distinct, 3)}


def rates(mesh: Mesh, directory: Path, kind: str, tp: int) -> dict[str, int]:
    """Return tokens per second with log-probs, for each set of requests."""
    large = is_large(mesh)
    dtype = dtype_of(large)
    model, engine = trainer_of(mesh, directory, dtype), servers_of(mesh, directory, kind, tp, dtype, {})
    synced(mesh, model, engine, 0, verified=True)
    list(
        engine.generate([Request(i, [11, 12, 13 + i], one.sampling, i) for i, one in enumerate(asked_of(mesh, model, 256))])
    )
    speeds = {}
    for name, requests in request_sets(large, model.spec.vocab).items():
        mine = requests[engine.replica.index :: engine.replica.count]
        seconds, completions = timed(mesh, lambda mine=mine: list(engine.generate(mine)))
        speeds[name] = round(tokens_of(completions) * mesh.ranks.layout.world_size / seconds)
        tell(mesh, f"{kind}, {name}", speeds[name])
    engine.close()
    return speeds


# --- parts -----------------------------------------------------------------------------------------------------------


def is_there(part: Part, what: str, gpus: int = 1) -> bool:
    if find_spec("sglang") is None:
        part.say(what, "skipped: SGLang is not installed (pip install sglang)")
    elif part.large and part.gpus < gpus:
        part.say(what, f"needs {gpus} GPUs")
    else:
        return True
    return False


MEAN = {"float32": 1e-5, "bfloat16": 2**-6}
"""Largest mean difference of a log-prob; products in bfloat16 are rounded to 2^-9. On GPUs SGLang has no float32."""


def dtype_of(large: bool) -> str:
    return "bfloat16" if large else "float32"


def agreeing(part: Part, name: str, rows: list[tuple[str, int, bool]]) -> None:
    """Claim that log-probs agree over syncs and updates; `rows` are: layout of the trainer, ranks of a server, whether it
    is apart."""
    dtype = dtype_of(part.large)
    for layout, tp, apart in rows:
        what = f"{name}, trainer {layout}, sglang:{'d1' if apart else f'd{int(layout[1]) // tp}'}t{tp}, {dtype}"
        what += ", apart" if apart else ""
        if is_there(part, what, int(layout[1]) + apart):
            gaps = part.measure(what, layout, steps, part.model(name), tp, dtype, apart)
            if gaps is not None:
                worst = max(gap["mean"] for gap in gaps)
                part.claim(f"{what}: four syncs, weights equal bit by bit; log-probs", worst < MEAN[dtype], {"mean": worst})


def one(part: Part) -> None:
    """Compare one server on the trainer's GPU with the trainer, over CUDA IPC."""
    agreeing(part, "qwen3_0.6b", [("d1", 1, False)])


def two(part: Part) -> None:
    """Compare a server of two tensor-parallel ranks, and two servers, with trainers of t2 and d2 on the same GPUs."""
    agreeing(part, "qwen3_0.6b", [("t2", 2, False), ("d2", 1, False)])


def apart(part: Part) -> None:
    """Compare a server on the second GPU, which receives weights over NCCL, with the trainer."""
    agreeing(part, "qwen3_0.6b", [("d1", 1, True)])


def experts(part: Part) -> None:
    """Compare a server's log-probs of a small mixture of experts with the trainer's, on two GPUs and on one."""
    if not part.large:
        return part.say("experts", "skipped on a CPU: SGLang's kernels for experts are compiled")
    return agreeing(part, "qwen3_moe", [("t2", 2, False), ("d1", 1, False)])


def sleep(part: Part) -> None:
    """Measure the memory that a sleeping server gives back."""
    if is_there(part, "sleep") and not part.large:
        part.say("sleep", "skipped on a CPU: nothing is given back there")
    elif part.large and find_spec("sglang"):
        numbers = part.measure("sleep", "d1", slept, part.model("qwen3_0.6b"))
        if numbers is not None:
            part.claim("its share of the GPU is free while it sleeps", numbers["of_its_share"] > 0.8, numbers)
            part.claim("it wakes with the trainer's weights", numbers["logprobs_mean"] < MEAN["bfloat16"], numbers)


def kill(part: Part) -> None:
    """Kill a server while it samples: one of two, and the only one on one GPU."""
    for layout, count in (("d2", 2), ("d1", 1)):
        what = f"a server of {count} is killed"
        if is_there(part, what, count):
            results = part.measure_all(what, layout, killed, part.model("qwen3_0.6b"))
            for result in results or []:
                bound = MEAN[dtype_of(part.large)]
                answered = result["answers"] == result["requests"] == result["answered_again"] and result["restarts"] == 1
                if count == 2:
                    answered = answered and result["answered"] == result["requests"]
                part.claim(f"{what}: every request once, and again", answered and result["logprobs_mean"] < bound, result)


def key(part: Part) -> None:
    """Measure whether the key of a request fixes its tokens with `enable_deterministic_inference`."""
    if is_there(part, "key"):
        for name, overrides in (("with", {"enable_deterministic_inference": True}), ("without", {})):
            if overrides and not part.large:
                part.say("key with it", "skipped on a CPU: it needs a compiled attention, fa3, flashinfer or triton")
                continue
            shares = part.measure(f"key {name} it", "d1", keyed, part.model("qwen3_0.6b"), overrides)
            if shares is not None and overrides:
                part.claim("the key decides what is drawn", shares["the_batch_again"] == shares["alone"] == 1, shares)
            elif shares is not None:
                part.say("without it", shares)


def rate(part: Part) -> None:
    """Compare tokens per second of SGLang's servers with vLLM's, for Qwen3-1.7B's shape on one GPU and on two."""
    for layout, tp in (("d1", 1), ("t2", 2), ("d2", 1)):
        speeds: dict[str, dict[str, int]] = {}
        for kind in ("sglang", "vllm"):
            what = f"{kind}, {layout}"
            if find_spec(kind) is None:
                part.say(what, f"skipped: {kind} is not installed")
            else:
                speeds[kind] = part.measure(what, layout, rates, part.model("qwen3_1.7b"), kind, tp) or {}
        if speeds.get("sglang") and speeds.get("vllm"):
            ratios = {name: round(speeds["sglang"][name] / speeds["vllm"][name], 3) for name in speeds["vllm"]}
            part.say(f"{layout}: SGLang's tokens a second over vLLM's", ratios)


def ahead(part: Part) -> None:
    """Train whole runs that sample two steps ahead on the second GPU: when weights arrive, samples in flight continue, end
    first, or are sampled again."""
    if not is_there(part, "ahead", 2):
        return
    model = part.model("qwen3_0.6b")
    root = model.parent
    write_data(root)
    for interrupt in ("continue", "abort", "finish"):
        engine = {
            "backend": "sglang:d1",
            "placement": "apart",
            "memory_fraction": 0.25,
            "sglang": OWN if part.large else ON_CPU,
        }
        rows = part.train(
            interrupt,
            {
                "model": {"path": str(model), "tokenizer": f"{root}/tokenizer"},
                "policy": {"backend": "megatron:d1", "tokens_per_micro_batch": 16384, "optimizer": {"lr": 1.0e-6},
                           "dtype": dtype_of(part.large), "skip_zero_advantage": False},
                "engine": {**engine, "verify_weights_every": 1, "sampling": {"ignore_eos": True}},
                "rollout": {"max_staleness": 2, "interrupt": interrupt},
                "algorithm": {"name": "grpo", "group_size": 8, "kl": {"coef": 0}, "rollout_correction": {"name": "tis"}},
                "data": {"train": [f"{root}/data/train.parquet"], "prompts_per_step": 32 if part.large else 4,
                         "max_prompt_tokens": 64, "max_response_tokens": 1024 if part.large else 24},
                "reward": {"functions": {"format": 1.0}},
                "trainer": {"run_dir": f"{root}/{interrupt}", "steps": 5, "save_every": 0, "loggers": ["console"],
                            "device": "cuda" if part.large else "cpu"},
            },
            ("time/step", "async/", "throughput/tokens_per_second", "rollout/logprob_diff", "rollout/kl"),
        )  # fmt: skip
        if rows:
            oldest = max(row.get("async/staleness_max", 0) for row in rows)
            part.claim(f"{interrupt}: samples are 1 to 2 steps old at most", 1 <= oldest <= 2, oldest)


PARTS: dict[str, Callable[[Part], None]] = {
    "one": one, "two": two, "apart": apart, "sleep": sleep, "kill": kill, "ahead": ahead, "key": key, "rate": rate,
    "experts": experts,
}  # fmt: skip

if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import sglang_servers

    sys.exit(run(sglang_servers.__doc__, sglang_servers.PARTS))
