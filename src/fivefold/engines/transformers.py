"""An engine without further dependencies: a transformers model on every rank, which decodes in batches with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from fivefold.backend.file_names import tensors_in_files
from fivefold.engines.sampling import LogitsProcessor, sample_token, uniform
from fivefold.engines.transformers_routes import BatchRoutes, RouterOutputs
from fivefold.engines.turns import Turns
from fivefold.interfaces import EngineReplica, EngineState
from fivefold.models.end_tokens import EndTokens
from fivefold.models.families import load_spec, parameters_of, runs_own_code
from fivefold.models.parameters import OUTPUT
from fivefold.models.spec import ModelSpec
from fivefold.types import Completion, Request, Sampling


class TransformersEngine:
    """Samples with transformers; requests share the prefill of their prompt, and finished sequences leave the batch."""

    restarts = 0

    def __init__(
        self,
        directory: Path,
        tokenizer: Any,
        device: torch.device,
        dtype: torch.dtype,
        max_num_seqs: int,
        replica: EngineReplica | None = None,
        can_sleep: bool = True,
        gives_routes: bool = False,
        is_ending: Callable[[], bool] = lambda: False,
        trust_remote_code: bool = False,
    ) -> None:
        """Creates the model in `directory` without its weights: they are set by the first `update_weights`.

        `gives_routes`: completions contain the experts to which their tokens were sent; `is_ending`: returns whether
        running requests must be aborted, because the run ends.
        """
        trusted = runs_own_code(directory, trust_remote_code)
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
        # SDPA has no soft cap of scores, and transformers 5.19 lets Gemma 2 take it all the same.
        attention = "eager" if getattr(config, "attn_logit_softcapping", None) else None
        with no_init_weights(), torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trusted, attn_implementation=attention
            )
        model.tie_weights()
        self._spec = load_spec(directory)
        self._model = model.eval().requires_grad_(False)
        self._parameters = parameter_map(self._model, self._spec)
        self._routers = RouterOutputs(model, self._spec.routes) if gives_routes and self._spec.routes is not None else None
        self._tokenizer, self._device, self._max_num_seqs = tokenizer, device, max_num_seqs
        # On a CPU, sleeping has no benefit.
        self._can_sleep = can_sleep and device.type != "cpu"
        self._ends = stop_token_ids(directory, tokenizer)
        # Checking whether a sequence has ended stalls a GPU: check only now and then, and discard what follows the end.
        self._check_every = 1 if device.type == "cpu" else 16
        self.replica = replica or EngineReplica(0, 1)
        self.state, self.version = EngineState.ABSENT, 0
        self._is_aborted, self._is_ending = False, is_ending

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in, by their names in Hugging Face files; raises RuntimeError if they are not the whole model."""
        self.state, missing = EngineState.ABSENT, set(self._parameters)
        with torch.no_grad():
            for name, tensor in weights:
                self._parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise RuntimeError(
                f"the engine got no new weights for {len(missing)} parameters, the first: {sorted(missing)[:3]}"
            )
        self.state, self.version = EngineState.READY, version

    def sleep(self) -> None:
        """Free the GPU's memory."""
        if not self._can_sleep:
            return
        for tensor in self._model.parameters():
            tensor.untyped_storage().resize_(0)
        self.state = EngineState.ASLEEP
        torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.state is not EngineState.ASLEEP:
            return
        for tensor in self._model.parameters():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        self.state = EngineState.ABSENT

    def restart(self) -> None:
        """Does nothing: no part of the engine can fail without its rank."""

    def stream(self) -> Turns:
        """Returns a stream, whose requests are sampled when completions are requested."""
        return Turns(self)

    def abort(self) -> None:
        self._is_aborted = True

    def look_after(self) -> None:
        """Does nothing: no part of the engine can fail without its rank."""

    def close(self) -> None: ...

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> Iterator[Completion]:
        """Yields a completion of each request, as they finish."""
        assert self.state is EngineState.READY, f"the engine must be ready to sample: it is {self.state.value}"
        self._is_aborted = False
        for sampling in dict.fromkeys(request.sampling for request in requests):
            rows = [request for request in requests if request.sampling == sampling]
            rows.sort(key=lambda request: len(request.prompt_ids))
            while rows:
                count = self._fitting(rows)
                yield from _Batch(self, rows[:count], sampling).decode()
                rows = rows[count:]

    def _fitting(self, rows: Sequence[Request]) -> int:
        """Returns how many of the requests are decoded together: `max_num_seqs`, or as many as fit into the GPU's free
        memory."""
        if self._device.type == "cpu":
            return self._max_num_seqs
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        size = next(self._model.parameters()).element_size()
        longest = len(rows[-1].prompt_ids) + rows[-1].sampling.max_tokens
        # The cache grows by copying: for one layer, old and new exist at the same time. Logits are processed in float32.
        row_bytes = 1.2 * self._spec.kv_numbers_per_token * size * longest + 24 * self._spec.vocab
        return max(1, min(self._max_num_seqs, int(0.8 * free / row_bytes)))


class _Batch:
    """Requests that are decoded together."""

    def __init__(self, engine: TransformersEngine, rows: Sequence[Request], sampling: Sampling) -> None:
        self._engine, self._rows, self._sampling = engine, rows, sampling
        self._ends = {*sampling.stop_token_ids} if sampling.ignore_eos else engine._ends | {*sampling.stop_token_ids}
        self._ids: list[list[int]] = [[] for _ in rows]
        self._logprobs: list[list[float]] = [[] for _ in rows]
        shape = engine._spec.routes
        self._routes = None if engine._routers is None or shape is None else BatchRoutes(engine._routers, shape)

    def decode(self) -> Iterator[Completion]:
        """Prefill each prompt once, then decode one token of every row at a time."""
        engine, sampling, device = self._engine, self._sampling, self._engine._device
        logits_NV, cache, mask = self._prefill()
        keys_N = torch.tensor([request.seed for request in self._rows], device=device)
        process = LogitsProcessor(
            sampling, self._ends, [request.prompt_ids for request in self._rows], logits_NV.shape[1], device
        )
        alive = torch.arange(len(self._rows), device=device)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for position in range(sampling.max_tokens):
            token_N, logprob_N = sample_token(process(logits_NV, position), uniform(keys_N, position), sampling)
            process.add(token_N)
            tokens.append(token_N)
            logprobs.append(logprob_N)
            is_last = position + 1 == sampling.max_tokens
            if is_last or (position + 1) % engine._check_every == 0:
                keep, ended = self._collect(alive, tokens, logprobs)
                tokens, logprobs = [], []
                yield from (self._completion(row, "stop") for row in ended)
                if is_last or engine._is_aborted or engine._is_ending():
                    rest = alive[keep].tolist()
                    yield from (self._completion(row, "length" if is_last else "abort") for row in rest)
                    return
                if not keep:
                    return
                if len(keep) < len(alive):
                    kept_N = torch.tensor(keep, device=device)
                    cache.batch_select_indices(kept_N)
                    process.select(kept_N)
                    alive, token_N, keys_N, mask = (x[kept_N] for x in (alive, token_N, keys_N, mask))
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            output = engine._model(
                input_ids=token_N[:, None],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            cache, logits_NV = output.past_key_values, output.logits[:, -1]
            if self._routes is not None:
                self._routes.add_column(len(alive))

    def _prefill(self) -> tuple[Tensor, Any, Tensor]:
        """Returns (logits after each row's prompt, cache, mask); a prompt that several rows share is computed once."""
        device = self._engine._device
        number = {prompt: i for i, prompt in enumerate(dict.fromkeys(tuple(row.prompt_ids) for row in self._rows))}
        longest = max(map(len, number))
        tokens = torch.zeros(len(number), longest, dtype=torch.long)
        mask = torch.zeros(len(number), longest, dtype=torch.long)
        for prompt, i in number.items():
            tokens[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        output = self._engine._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        owner = torch.tensor([number[tuple(row.prompt_ids)] for row in self._rows], device=device)
        if self._routes is not None:
            self._routes.add_prompts(mask, owner)
        output.past_key_values.batch_select_indices(owner)
        return output.logits[owner, -1], output.past_key_values, mask[owner]

    def _collect(
        self, alive: Tensor, token_columns: list[Tensor], logprob_columns: list[Tensor]
    ) -> tuple[list[int], list[int]]:
        """Move new tokens to the host; returns (positions in `alive` of rows that continue, rows that have ended)."""
        tokens = torch.stack(token_columns, 1).tolist()
        values = torch.stack(logprob_columns, 1).tolist()
        if self._routes is not None:
            self._routes.collect(alive.tolist())
        keep, ended = [], []
        for place, row in enumerate(alive.tolist()):
            for token, logprob in zip(tokens[place], values[place], strict=True):
                self._ids[row].append(token)
                self._logprobs[row].append(logprob)
                if token in self._ends or self._is_stopped(self._ids[row]):
                    ended.append(row)
                    break
            else:
                keep.append(place)
        return keep, ended

    def _is_stopped(self, ids: list[int]) -> bool:
        """Returns whether the latest token completes a stop string. Only recent tokens are decoded, since each adds at least
        one character in the end."""
        stop = self._sampling.stop
        if not stop or len(ids) < self._sampling.min_tokens:
            return False
        tail = self._engine._tokenizer.decode(ids[-2 * max(map(len, stop)) - 4 :])
        return any(text in tail for text in stop)

    def _completion(self, row: int, reason: Literal["stop", "length", "abort"]) -> Completion:
        request, tokens = self._rows[row], self._ids[row]
        routes = None if self._routes is None else self._routes.of(row, len(request.prompt_ids) + len(tokens))
        return Completion(request.id, tokens, self._logprobs[row], reason, self._engine.version, routes_TLK=routes)


def parameter_map(model: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """Returns each tensor of the model's files by its name there -> the memory in which transformers keeps it."""
    state = model.state_dict()
    names = {name for parameter in parameters_of(spec) for name in parameter.hf}
    # A tied output layer has a separate entry, but shares the embedding's memory.
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if not (spec.tied and name in OUTPUT.hf)}
    places = {
        file.name: file.of(state[held]) for held, files in tensors_in_files(model, shapes, names).items() for file in files
    }
    if different := names ^ set(places):
        raise RuntimeError(
            f"the table of {spec.family} must name every tensor that transformers has in memory, and no other: "
            f"{len(different)} differ, the first: {sorted(different)[:3]}; correct models/families/{spec.family}.py"
        )
    return places


def stop_token_ids(directory: Path, tokenizer: Any) -> set[int]:
    """Returns the tokens that end a response."""
    return set(EndTokens.of(directory, tokenizer.eos_token_id).used)
