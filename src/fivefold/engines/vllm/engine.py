"""vLLM in the trainer's processes: weights move inside a GPU, and every tensor-parallel group of ranks is one replica."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.distributed.objects import broadcast_json, take_records_of
from fivefold.distributed.processes import unname_shared_memory
from fivefold.distributed.scratch import name_shared_memory, scratch_directory
from fivefold.engines.garbage import collected_seldom, freeze_heap
from fivefold.engines.transformers import stop_token_ids
from fivefold.engines.turns import Turns
from fivefold.engines.vllm.arguments import EXTENSION, ON_CPU, on_cpu
from fivefold.engines.vllm.logprobs import logprobs_of
from fivefold.engines.vllm.parameters import copied, sampling_arguments, without_vllms_logprobs
from fivefold.engines.vllm.routes import V2, as_tensor
from fivefold.engines.weight_sync import crossed_off, give_back_memory, not_come
from fivefold.errors import RunError
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.layout import ParallelLayout
from fivefold.models.families import load_spec, parameters_of
from fivefold.observability.peak_memory import peak_memory
from fivefold.routes import routes_of_engine
from fivefold.types import Completion, Request, Sampling


class VLLMEngine:
    """vLLM's engine on this rank; the ranks of a tensor-parallel group compute every request together."""

    restarts = 0

    def __init__(
        self,
        directory: Path,
        tokenizer: Any,
        layout: ParallelLayout,
        rank: int,
        device: torch.device,
        arguments: dict[str, Any],
        *,
        verify_every: int,
        can_sleep: bool,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """`arguments` are vLLM's own. `verify_every`: number of updates from one comparison of held and sent weights to the
        next, beginning with the first update (0: never). `goes_on`: called before every step of the engine, on all ranks of
        the replica; if it returns False, running requests are aborted."""
        self._sockets, spec = scratch_directory(), load_spec(directory)
        self._routes = spec.routes if arguments.get("enable_return_routed_experts") else None
        environment = _ENVIRONMENT | (ON_CPU if device.type == "cpu" else {}) | (V2 if self._routes is not None else {})
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets)
        if device.type == "cpu":
            arguments = on_cpu(arguments)
            torch._dynamo.config.disable = bool(arguments["enforce_eager"])
        import vllm

        name_shared_memory(self._sockets)
        with _threads_kept(), _own_shared_memory(device), _start_explained():
            self._llm = vllm.LLM(
                str(directory),
                tensor_parallel_size=layout.tp,
                enable_expert_parallel=layout.ep > 1,
                distributed_executor_backend="external_launcher",
                worker_extension_cls=EXTENSION,
                load_format="dummy",
                logprobs_mode="processed_logprobs",
                enable_sleep_mode=can_sleep,
                **arguments,
            )
        self._hands_over_logprobs = all(self._llm.collective_rpc("prepare"))
        self._ends = stop_token_ids(directory, tokenizer)
        self._expected = [name for parameter in parameters_of(spec) for name in parameter.hf]
        # A quantized engine holds other bits than it received.
        self._verify_every = 0 if arguments.get("quantization") else verify_every
        self._updates, self._can_sleep = 0, can_sleep
        self._aborted: list[Completion] = []
        self._tagged: set[str] = set()
        """Requests whose log-probs the workers collect."""
        self.goes_on = goes_on
        self._is_cache_asleep = False
        self.replica = EngineReplica(rank // layout.tp, layout.dp, leads=rank % layout.tp == 0)
        self.state, self.version = EngineState.ABSENT, 0
        # vLLM collects garbage whenever it sleeps or wakes; frozen objects are not scanned each time.
        freeze_heap()

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load full tensors, of which each worker keeps its shard; raises RuntimeError if it then holds something else."""
        self.state = EngineState.ABSENT
        verify = self._verify_every > 0 and self._updates % self._verify_every == 0
        self._llm.collective_rpc("begin_weights", args=(verify,))
        missing, is_whole = set(self._expected), False
        try:
            self._llm.collective_rpc("receive_weights", args=(crossed_off(weights, missing),))
            is_whole = not missing
        finally:
            faults = [
                fault
                for faults_of_worker in self._llm.collective_rpc("finish_weights", args=(is_whole,))
                for fault in faults_of_worker
            ]
        if faults := not_come(missing, self._expected) or faults:
            raise RunError(f"vLLM's weights are not those of the policy after {version} updates: {'; '.join(faults)}")
        # Cached keys and values come from the old weights.
        if self._llm.reset_prefix_cache() is False:
            raise RunError("vLLM keeps keys of the old weights: requests are running")
        self._updates += 1
        self.state, self.version = EngineState.READY, version

    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields a completion of each request, as they finish."""
        assert self.state is EngineState.READY, f"the engine must be ready to sample: it is {self.state.value}"
        self._wake_cache()
        engine = self._llm.llm_engine
        params = {sampling: self._parameters(sampling) for sampling in dict.fromkeys(one.sampling for one in requests)}
        for request in requests:
            name = str(request.id)
            parameters = copied(params[request.sampling], name if request.sampling.logprobs else None, request.seed)
            engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, parameters)
        self._aborted, self._tagged = [], {str(request.id) for request in requests if request.sampling.logprobs}
        try:
            with collected_seldom():
                while engine.has_unfinished_requests():
                    if not self.goes_on():
                        self.abort()
                        break
                    if outputs := engine.step():
                        yield from self._completions(outputs)
                yield from self._aborted
        finally:
            # The caller may have stopped iterating.
            self.abort()

    def stream(self) -> Turns:
        """Returns a stream, whose requests are sampled when completions are requested."""
        return Turns(self)

    def abort(self) -> None:
        """End the requests in flight: `generate` yields what they have so far."""
        processor = self._llm.llm_engine.output_processor
        running = list(processor.request_states.values())
        drawn = {state.external_req_id: list(state.detokenizer.output_token_ids) for state in running}
        logprobs = self._take_logprobs(drawn)
        self._aborted += [self._completion(name, drawn[name], logprobs[name], "abort") for name in drawn]
        self._llm.llm_engine.abort_request([state.request_id for state in running], internal=True)

    def sleep(self) -> None:
        if self._can_sleep and self.state is not EngineState.ASLEEP:
            try:
                self._llm.sleep(level=2)
            except AssertionError as error:
                # vLLM compares the free memory of the whole device before and after.
                raise RunError(
                    f"vLLM did not sleep: {error} Another program took memory of its GPU meanwhile: give the run a GPU of "
                    "its own, or set engine.sleep: false"
                ) from error
            self.state, self._is_cache_asleep = EngineState.ASLEEP, True
            peak_memory.away(_bytes_of("weights", "kv_cache"))

    def wake(self) -> None:
        if self.state is EngineState.ASLEEP:
            self._llm.wake_up(["weights"])
            self.state = EngineState.ABSENT
            peak_memory.away(_bytes_of("kv_cache"))

    def _wake_cache(self) -> None:
        if self._is_cache_asleep:
            give_back_memory()
            self._llm.wake_up(["kv_cache"])
            self._is_cache_asleep = False
            peak_memory.away(0)

    def restart(self) -> None:
        """Does nothing: no part of the engine can fail without its rank."""

    def look_after(self) -> None:
        """Does nothing: no part of the engine can fail without its rank."""

    def close(self) -> None:
        """End the engine, but keep the trainer's process groups, which vLLM would destroy as its own."""
        original = dist.destroy_process_group
        dist.destroy_process_group = lambda group=None: None if group in (None, dist.group.WORLD) else original(group)
        try:
            del self._llm
            shutil.rmtree(self._sockets, ignore_errors=True)
        finally:
            gc.unfreeze()
            dist.destroy_process_group = original

    def _completions(self, outputs: Sequence[Any]) -> Iterator[Completion]:
        drawn = {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
        logprobs = self._take_logprobs(drawn)
        for output in outputs:
            (sampled,), name = output.outputs, output.request_id
            routes = self._read_routes(sampled, len(output.prompt_token_ids))
            yield self._completion(name, drawn[name], logprobs[name], sampled.finish_reason, routes)

    def _take_logprobs(self, drawn: Mapping[str, Sequence[int]]) -> dict[str, list[float]]:
        """Returns the log-probs of requests that have ended with these tokens; none of a request without a tag."""
        logprobs: dict[str, list[float]] = {name: [] for name in drawn}
        if names := [name for name in drawn if name in self._tagged]:
            collected = zip(*self._llm.collective_rpc("give_logprobs", args=(names,)), strict=True)
            for name, answers in zip(names, collected, strict=True):
                logprobs[name] = logprobs_of(name, drawn[name], answers).tolist()
        return logprobs

    def _completion(
        self,
        name: str,
        token_ids: list[int],
        logprobs: list[float],
        reason: Literal["stop", "length", "abort"],
        routes: Tensor | None = None,
    ) -> Completion:
        return Completion(int(name), token_ids, logprobs, reason, self.version, routes_TLK=routes)

    def _read_routes(self, sampled: Any, prompt: int) -> Tensor | None:
        if self._routes is None:
            return None
        array = as_tensor(getattr(sampled, "routed_experts", None))
        return routes_of_engine(array, prompt + len(sampled.token_ids), self._routes, is_aborted=False)

    def _parameters(self, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(sampling, self._ends)
        if self._hands_over_logprobs:
            arguments = without_vllms_logprobs(arguments)
        return SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)


_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment that keeps the engine in this rank's process."""


def _bytes_of(*tags: str) -> int:
    """Returns the bytes that vLLM's allocator holds on this device under these tags, asleep or not: torch counts all of
    them."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(int(allocation.handle[1]) for allocation in held if allocation.tag in tags)


@contextmanager
def _start_explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RunError(
            f"vLLM did not start: {error}\nLook at engine.memory_fraction (weights, cache and graphs must fit into it), "
            "engine.max_model_len, engine.max_num_seqs and the options in engine.vllm"
        ) from error


@contextmanager
def _own_shared_memory(device: torch.device) -> Iterator[None]:
    """Makes blocks of shared memory created in this context private to this run, and frees them with its processes.

    A block lives as long as a process maps it; with a name it would outlive processes that are killed. On a CPU vLLM uses
    the same names for every run on the machine.
    """
    from vllm.distributed import parallel_state

    # vLLM sends records about its shared memory to the ranks of a replica.
    take_records_of("vllm")
    # It differs from the names of `name_shared_memory`, whose blocks their creator unlinks below while other ranks map them.
    name = broadcast_json(f"fivefold-cpu-{os.getpid()}", 0, None)
    if device.type == "cpu":
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as Blocks

        original = Blocks.make_group_name
        Blocks.make_group_name = staticmethod(lambda communicator: f"{name}{original(communicator).rpartition('/')[2]}")
    try:
        yield
        dist.barrier()
    finally:
        groups = [group for reference in parallel_state._groups.values() if (group := reference()) is not None]
        # A group whose start failed has none yet.
        queues = [getattr(group, "mq_broadcaster", None) for group in groups]
        for block in [getattr(queue, part, None) for queue in queues for part in ("buffer", "tensor_arena")]:
            if block is not None and block.is_creator:
                block.shared_memory.unlink()
                # Otherwise it would unlink itself again at the end.
                block.is_creator = False
        unname_shared_memory(os.getpid(), name)
        if device.type == "cpu":
            Blocks.make_group_name = staticmethod(original)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restores `torch.set_num_threads`, which vLLM replaces in the process that it starts in."""
    original = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = original
