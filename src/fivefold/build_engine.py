"""Builds the engine of this rank from the configuration."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.distributed.ranks import Ranks
from fivefold.distributed.scratch import scratch_directory
from fivefold.engines.absent import AbsentEngine
from fivefold.engines.servers.http import own_address
from fivefold.engines.servers.placement import Machine, after_servers, machines_of, place_servers
from fivefold.engines.servers.server import Server
from fivefold.engines.servers.server_process import ServerProcess
from fivefold.engines.transformers import TransformersEngine, stop_token_ids
from fivefold.engines.vllm.arguments import of_model
from fivefold.interfaces import Engine, EngineReplica
from fivefold.layout import ParallelLayout
from fivefold.megatron.transformer_config import DTYPES
from fivefold.models.config_json import read_config
from fivefold.models.families import known_as, load_spec
from fivefold.plan.engine_checks import cache_next_to, engine_cache, token_bytes
from fivefold.plan.memory import CPU_CACHE

_LEAST_CALL = 60.0
"""Seconds that a server has at least to answer a call about weights or memory, if `engine.stall_seconds` is lower."""


def build_engine(
    config: RunConfig, directory: Path, tokenizer: Any, ranks: Ranks, device: torch.device, log: Callable[[str], None]
) -> Engine:
    """Build the engine of this rank."""
    settings, layout = config.engine, config.engine.layout
    can_sleep = settings.sleep and device.type != "cpu"
    if settings.is_server:
        return _build_servers(config, directory, tokenizer, ranks, device, log)
    if not ranks.holds:
        return AbsentEngine(ranks.layout.world_size, can_sleep)
    if layout is not None:
        from fivefold.engines.vllm.engine import VLLMEngine

        first = ranks.rank // layout.tp * layout.tp
        return VLLMEngine(
            directory,
            tokenizer,
            layout,
            ranks.rank,
            device,
            _vllm_arguments(config, directory, device),
            verify_every=settings.verify_weights_every,
            can_sleep=can_sleep,
            goes_on=ranks.heartbeat.goes_on(range(first, first + layout.tp)),
        )
    return TransformersEngine(
        directory,
        tokenizer,
        device,
        DTYPES[settings.dtype or config.policy.dtype],
        settings.max_num_seqs,
        EngineReplica(ranks.turn, ranks.layout.world_size),
        settings.sleep,
        config.policy.router_replay == "R3",
        ranks.heartbeat.is_ending,
        config.model.trust_remote_code,
    )


def as_engines_know(directory: Path) -> Path:
    """Return `directory`, or a substitute for a family that engines support only under another name.

    The substitute has links to the model's files and a config.json with that name.
    """
    config = read_config(directory)
    name = known_as(load_spec(directory))
    if name is None:
        return directory
    substitute = scratch_directory()
    for file in directory.iterdir():
        if file.name != "config.json":
            (substitute / file.name).symlink_to(file.resolve())
    config |= {"model_type": name[0], "architectures": [name[1]], "num_nextn_predict_layers": 0}
    # These name code in the repository, which never runs for a family that has a file here.
    config.pop("auto_map", None)
    (substitute / "config.json").write_text(json.dumps(config))
    return substitute


def _vllm_arguments(config: RunConfig, directory: Path, device: torch.device) -> dict[str, Any]:
    """Return the vLLM arguments that the configuration determines."""
    settings = config.engine
    arguments: dict[str, Any] = {
        "dtype": settings.dtype or config.policy.dtype,
        "max_model_len": settings.max_model_len or config.max_sequence_tokens,
        "max_num_seqs": -(-settings.max_num_seqs // settings.process_count),
        "seed": config.trainer.seed,
        # vLLM needs a tokenizer only to detect stop strings.
        "skip_tokenizer_init": not settings.sampling.stop,
        "tokenizer": config.model.tokenizer or str(directory),
        "trust_remote_code": config.model.trust_remote_code,
    }
    if config.policy.router_replay == "R3":
        # vLLM finds the routes of cached prompts by their cache blocks.
        arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    arguments |= _cache_arguments(config, directory, device)
    of_family = of_model(read_config(directory), device.type == "cpu")
    both = {name: of_family[name] | settings.vllm[name] for name in of_family if isinstance(settings.vllm.get(name), dict)}
    not_as_given = {"kv_cache_memory_bytes", *(("enable_chunked_prefill",) if device.type == "cpu" else ())}
    chosen = {name: value for name, value in settings.vllm.items() if name not in not_as_given}
    return arguments | of_family | chosen | both


def _cache_arguments(config: RunConfig, directory: Path, device: torch.device) -> dict[str, Any]:
    """Return the arguments for the size of the KV cache in each process of a replica."""
    settings, count = config.engine, config.engine.process_count
    if (cache := settings.vllm.get("kv_cache_memory_bytes")) is None and device.type == "cpu":
        cache = CPU_CACHE
    if cache is None and count == 1:
        return {"gpu_memory_utilization": settings.memory_fraction}
    if cache is None:
        # vLLM would count the memory of the other processes as its own.
        spec, dtype = load_spec(directory), DTYPES[settings.dtype or config.policy.dtype]
        assert settings.layout is not None
        weights = spec.parameters * dtype.itemsize // settings.layout.tp
        cache = cache_next_to(settings, torch.cuda.get_device_properties(device).total_memory, weights)
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": cache // count}
    if device.type == "cuda":
        # Before it starts, vLLM requires this part of the device to be free: 92 % if it is left out.
        arguments["gpu_memory_utilization"] = settings.memory_fraction / count
    return arguments


def _build_servers(
    config: RunConfig, directory: Path, tokenizer: Any, ranks: Ranks, device: torch.device, log: Callable[[str], None]
) -> Engine:
    """Build an engine of servers: one per tensor-parallel group of its layout, or servers that already run."""
    from fivefold.engines.servers.server_engine import ServerEngine

    settings, layout = config.engine, config.engine.layout
    ends, processes, ranks_per_server = stop_token_ids(directory, tokenizer), {}, None
    run, connect = ranks.broadcast_from_main(uuid.uuid4().hex), _client(settings.kind)
    if config.policy.router_replay == "R3":
        connect = partial(connect, routes=load_spec(directory).routes)
    if settings.kind == "vllm" and not settings.url and not settings.is_apart:
        # Servers elsewhere wait in such a call until the ranks send.
        connect = partial(connect, longest_call=max(_LEAST_CALL, settings.stall_seconds))
    if not settings.url:
        assert layout is not None
        start = _start_sglang if settings.kind == "sglang" else _start_vllm
        local: dict[int, tuple[torch.device, str | None]] = {}
        if settings.is_apart:
            local = _own_servers(layout, ranks, device)
        elif ranks.holds and ranks.rank % layout.tp == 0:
            local = {ranks.rank // layout.tp: (device, None)}
        ranks_per_server, count = None if settings.is_apart else layout.tp, settings.process_count
        logs = config.run_dir / "logs"
        processes = {
            number: start(config, directory, where, logs / f"server-{number}.log", host)
            for replica, (where, host) in local.items()
            for number in range(replica * count, (replica + 1) * count)
        }
    return ServerEngine(
        directory,
        ranks,
        device,
        partial(connect, ends=ends, run=run),
        log,
        processes=processes,
        ranks_per_server=ranks_per_server,
        servers_per_device=settings.process_count,
        addresses=settings.url,
        window=-(-settings.max_num_seqs * 5 // (4 * ranks.layout.world_size * settings.process_count)),
        bucket_bytes=settings.sync_bucket_mb << 20,
        verify_every=0 if settings.own_arguments.get("quantization") else settings.verify_weights_every,
        can_sleep=settings.sleep and device.type == "cuda" and not settings.url and not settings.is_apart,
        is_staged=settings.staged_sync,
        stall_seconds=settings.stall_seconds,
        interrupt=config.rollout.interrupt,
    )


def _own_servers(layout: ParallelLayout, ranks: Ranks, device: torch.device) -> dict[int, tuple[torch.device, str | None]]:
    """Return the replicas on separate devices that this rank starts: number -> (first device, host to listen on, or None for
    a Unix socket)."""
    machines = _machines(ranks, device)
    # Ranks on other machines cannot reach a Unix socket of this one.
    host = own_address(f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}") if len(machines) > 1 else None
    return {
        place.number: (device if place.first_gpu is None else torch.device("cuda", place.first_gpu), host)
        for place in place_servers(layout, machines)
        if place.rank == ranks.rank
    }


def _machines(ranks: Ranks, device: torch.device) -> list[Machine]:
    """Return the machines of the run. Collective."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    seen = ranks.gather_objects((socket.gethostname(), gpus))
    return machines_of([host for host, _ in seen], [count for _, count in seen], range(ranks.layout.world_size))


def start_judges(
    config: RunConfig, directory: Path, ranks: Ranks, device: torch.device
) -> tuple[list[ServerProcess], list[str]]:
    """Start the judge's servers on unused GPUs; return those that this rank started and the addresses of all. Collective.

    Raises ValueError if there are no free GPUs, RuntimeError if a server does not start.
    """
    judge, layout, machines = config.reward.judge, config.reward.judge_layout, _machines(ranks, device)
    assert layout is not None
    if config.engine.is_apart and config.engine.layout is not None:
        machines = after_servers(machines, config.engine.layout)
    meeting = f"http://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if len(machines) > 1 else "unix:"
    arguments: dict[str, Any]
    if layout.backend == "sglang":
        from fivefold.engines.sglang.probe import answers
        from fivefold.engines.sglang.serve import server_process

        longest = judge.max_model_len or read_config(directory)["max_position_embeddings"]
        arguments = {
            "model_path": str(directory),
            "tp_size": layout.tp,
            "random_seed": config.trainer.seed,
            "context_length": longest,
            "mem_fraction_static": judge.memory_fraction,
        }
    else:
        from fivefold.engines.vllm.probe import answers
        from fivefold.engines.vllm.serve import server_process

        arguments = {
            "model": str(directory),
            "served_model_name": judge.model,
            "tensor_parallel_size": layout.tp,
            "seed": config.trainer.seed,
            **({"max_model_len": judge.max_model_len} if judge.max_model_len else {}),
        }
        is_cpu = device.type == "cpu"
        arguments |= {"kv_cache_memory_bytes": CPU_CACHE} if is_cpu else {"gpu_memory_utilization": judge.memory_fraction}
    started = []
    for place in place_servers(layout, machines):
        if place.rank == ranks.rank:
            where = device if place.first_gpu is None else torch.device("cuda", place.first_gpu)
            log = config.run_dir / "logs" / f"judge-{place.number}.log"
            started.append(server_process(arguments, where, layout.tp, log, answers, own_address(meeting)))
    for server in started:
        server.start()
    for server in started:
        server.wait()
    addresses = ranks.gather_objects([server.address for server in started])
    return started, [f"{address}/v1" for of_rank in addresses for address in of_rank]


def _client(kind: str) -> Callable[..., Server]:
    """Return the client class for servers of vLLM or SGLang."""
    if kind == "sglang":
        from fivefold.engines.sglang.client import SGLangServer

        return SGLangServer
    from fivefold.engines.vllm.client import VLLMServer

    return VLLMServer


def _start_vllm(config: RunConfig, directory: Path, device: torch.device, log: Path, host: str | None) -> ServerProcess:
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process

    settings, layout = config.engine, config.engine.layout
    assert layout is not None
    # How full a server is decides how many turns are in flight.
    statistics = {"disable_log_stats": False} if config.environment.is_active else {}
    arguments = (
        statistics
        | _vllm_arguments(config, directory, device)
        | {
            "model": str(directory),
            "tensor_parallel_size": layout.tp,
            "enable_sleep_mode": settings.sleep and device.type == "cuda" and not settings.is_apart,
            "enable_expert_parallel": layout.ep > 1,
        }
    )
    return server_process(arguments, device, layout.tp, log, answers, host)


def _start_sglang(config: RunConfig, directory: Path, device: torch.device, log: Path, host: str | None) -> ServerProcess:
    from fivefold.engines.sglang.probe import answers
    from fivefold.engines.sglang.serve import server_process

    settings, layout = config.engine, config.engine.layout
    assert layout is not None
    cache = engine_cache(config, load_spec(directory)) if device.type == "cpu" else None
    arguments: dict[str, Any] = {
        "model_path": str(directory),
        "dtype": settings.dtype or config.policy.dtype,
        "context_length": settings.max_model_len or config.max_sequence_tokens,
        "max_running_requests": settings.max_num_seqs,
        "mem_fraction_static": settings.memory_fraction,
        "random_seed": config.trainer.seed,
        "tp_size": layout.tp,
        "ep_size": layout.ep,
        "enable_memory_saver": settings.sleep and device.type == "cuda" and not settings.is_apart,
        "trust_remote_code": config.model.trust_remote_code,
    }
    if cache is not None:
        arguments["max_total_tokens"] = cache // token_bytes(settings, config.policy, load_spec(directory))
    return server_process(arguments | settings.sglang, device, layout.tp, log, answers, host)
