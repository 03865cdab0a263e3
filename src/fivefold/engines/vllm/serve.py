"""Runs vLLM's own server with our additional routes, ended with its parent: `python -m fivefold.engines.vllm.serve`.

The arguments are vLLM's. One route returns a group's tokens and log-probs as lists, each response as it ends: vLLM's own
routes describe every token by an object, which takes longer than a small model takes to sample it. Another route receives
weights, so that no request is sampled before they are complete. A third one counts tokens, in place of vLLM's statistics.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.distributed.compiler_caches import use_compiler_caches
from fivefold.engines.arguments import flags
from fivefold.engines.garbage import collect_seldom, freeze_heap
from fivefold.engines.servers.server_process import ServerProcess, devices_from, own_environment, run_as_program
from fivefold.engines.vllm.arguments import EXTENSION, ON_CPU, PROGRESS, ROUTE, TAKE, WEIGHTS, on_cpu
from fivefold.engines.vllm.held_weights import HeldWeights
from fivefold.engines.vllm.logprobs import LogprobTaker, logprobs_of
from fivefold.engines.vllm.numbers import as_text
from fivefold.engines.vllm.parameters import copied, without_vllms_logprobs
from fivefold.engines.vllm.routes import V2, packed
from fivefold.engines.vllm.slots import take_slots_at_hand

if TYPE_CHECKING:
    import torch

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Only a spawned process runs `end_with_parent`: a forked one would not.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_TAKEN = "another run has taken this server"


def main(arguments: list[str]) -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if fault := use_compiler_caches():
        print(f"warning  {fault}", file=sys.stderr)
    import uvloop
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers import cli_args
        from vllm.entrypoints.launchers.api_server.entry import run_server
    except ImportError:
        # Before 0.32.
        from vllm.entrypoints.openai import cli_args
        from vllm.entrypoints.openai.api_server import run_server
    parsed = cli_args.make_arg_parser(FlexibleArgumentParser(prog="fivefold.engines.vllm.serve")).parse_args(arguments)
    parsed.worker_extension_cls, parsed.logprobs_mode = EXTENSION, "processed_logprobs"
    parsed.disable_uvicorn_access_log = parsed.disable_log_requests = True
    cli_args.validate_parsed_serve_args(parsed)
    # Releases differ in which module holds the two, but it is always the same one for both.
    run_server.__globals__["build_app"] = _with_route(run_server.__globals__["build_app"])
    uvloop.run(run_server(parsed))


def _with_route(build_app: Callable[..., Any]) -> Callable[..., Any]:
    def build(*arguments: Any, **named: Any) -> Any:
        app = build_app(*arguments, **named)
        app.state.run, app.state.weights, app.state.logprobs = None, HeldWeights(), LogprobTaker()
        app.state.sampled, app.state.hands_over_logprobs = 0, False
        app.router.add_route(TAKE, _take, methods=["POST"])
        app.router.add_route(WEIGHTS, _weights, methods=["POST"])
        app.router.add_route(ROUTE, _generate, methods=["POST"])
        app.router.add_route(PROGRESS, _progress, methods=["GET"])
        return app

    return build


async def _take(raw: Any) -> Any:
    """{run} -> {names_versions, scanned}: from now on only requests of this run are answered.

    `scanned`: number of objects that the collector of garbage still looks at.
    """
    from starlette.responses import JSONResponse
    from vllm.outputs import CompletionOutput

    state = raw.app.state
    state.run = (await raw.json())["run"]
    state.weights.cut()
    state.hands_over_logprobs = all(await state.engine_client.collective_rpc(method="prepare"))
    collect_seldom()
    names_versions = "weight_versions" in CompletionOutput.__dataclass_fields__
    return JSONResponse({"names_versions": names_versions, "scanned": freeze_heap()})


async def _progress(raw: Any) -> Any:
    """{} -> {tokens}: sampled since the start, those of running requests included."""
    from starlette.responses import JSONResponse

    state = raw.app.state
    running = list(state.engine_client.output_processor.request_states.values())
    counts = (one.detokenizer.num_output_tokens() for one in running if one.detokenizer is not None)
    return JSONResponse({"tokens": state.sampled + sum(counts)})


async def _weights(raw: Any) -> Any:
    """{run, method, args} -> {results}: a call of `WeightReceiver` in every worker."""
    from starlette.responses import JSONResponse, PlainTextResponse

    call, held = await raw.json(), raw.app.state.weights
    method, arguments = call["method"], call["args"]
    if call["run"] != raw.app.state.run:
        return PlainTextResponse(_TAKEN, status_code=409)
    held.before()
    try:
        results = await raw.app.state.engine_client.collective_rpc(method="answer", args=(method, *arguments))
    except Exception as error:
        held.cut()
        return PlainTextResponse(f"{type(error).__name__}: {error}", status_code=500)
    if any("error" in result for result in results):
        held.cut()
    else:
        held.after(method, arguments, [result["result"] for result in results])
    return JSONResponse({"results": results})


async def _generate(raw: Any) -> Any:
    """{run, prompt_ids, sampling, draws: [[id, seed], ...]} -> a line of JSON for each draw, as they end.

    Each line is an Answer with its numbers as text, and packed routes.
    """
    from starlette.responses import PlainTextResponse, StreamingResponse

    request = await raw.json()
    if request["run"] != raw.app.state.run:
        return PlainTextResponse(_TAKEN, status_code=409)
    if not await raw.app.state.weights.are_whole():
        return PlainTextResponse(
            "this server has incomplete weights: none came, or their transfer was cut off", status_code=409
        )
    return StreamingResponse(_lines(raw.app.state, request), media_type="application/x-ndjson")


async def _lines(state: Any, request: dict[str, Any]) -> AsyncIterator[str]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, sampling = state.engine_client, request["sampling"]
    sampling["logit_bias"] = sampling["logit_bias"] and {int(one): bias for one, bias in sampling["logit_bias"].items()}
    has_logprobs = sampling["logprobs"] is not None
    if state.hands_over_logprobs:
        sampling = without_vllms_logprobs(sampling)
    params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)

    async def draw(number: int, name: str, seed: int) -> str:
        parameters = copied(params, name if has_logprobs else None, seed)
        async for output in engine.generate({"prompt_token_ids": request["prompt_ids"]}, parameters, name):
            (sampled,) = output.outputs
        spans = getattr(sampled, "weight_versions", None)
        versions = spans and [(int(span.version), span.end - span.start) for span in spans]
        state.sampled += len(sampled.token_ids)
        logprobs = array("f")
        if has_logprobs:
            logprobs = logprobs_of(name, sampled.token_ids, await state.logprobs.take(engine, name))
        answer = as_text(array("i", sampled.token_ids)), as_text(logprobs), sampled.finish_reason, versions
        return json.dumps([number, *answer, packed(getattr(sampled, "routed_experts", None))]) + "\n"

    waiting = {asyncio.ensure_future(draw(number, f"{request['name']}-{number}", seed)) for number, seed in request["draws"]}
    try:
        while waiting:
            # Responses that end at the same time travel together.
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            yield "".join(one.result() for one in ended)
    except Exception as error:
        yield json.dumps({"error": f"{type(error).__name__}: {error}", "is_dead": engine.errored}) + "\n"
    finally:
        # The client may have gone: the engine then ends these requests.
        for one in waiting:
            one.cancel()


def server_process(
    arguments: Mapping[str, Any],
    device: torch.device,
    devices: int,
    log: Path,
    is_ready: Callable[[str], bool],
    host: str | None = None,
) -> ServerProcess:
    """Returns a server on this device and the following ones, `devices` in all, with vLLM's own arguments by name."""
    # Statistics cost every step time for every sequence, and only runs of several turns read them.
    options, environment = {"disable_log_stats": True, **arguments}, {}
    if not options["disable_log_stats"]:
        # vLLM has no option that turns it off.
        del options["disable_log_stats"]
    if device.type == "cpu":
        options = on_cpu(options)
        environment = ON_CPU | ({"TORCH_COMPILE_DISABLE": "1"} if options["enforce_eager"] else {})
    if options.get("enable_return_routed_experts"):
        environment |= V2
    environment |= devices_from(device, devices)
    return ServerProcess(
        ["fivefold.engines.vllm.serve", *flags(options, says_no=True)], own_environment(environment), log, is_ready, host
    )


# vLLM spawns its other processes, which run this module again under its second name.
run_as_program(__name__, main, take_slots_at_hand)
