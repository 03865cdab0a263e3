"""The embedded engine: a transformers model on every rank, decoding in batches with a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fivefold.engines.sampling import request_seed, sample_token, uniform
from fivefold.models.families import load_spec, parameters_of
from fivefold.models.parameters import OUTPUT
from fivefold.models.spec import ModelSpec
from fivefold.types import Group, Prompt, Sample, Sampling

Progress = Callable[[int, int], None]
"""Called with (sequences that have ended, all sequences)."""


class TransformersEngine:
    """Samples with transformers; the prompt's prefill is shared by its group, finished sequences leave the batch."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Any,
        device: torch.device,
        dtype: torch.dtype,
        max_num_seqs: int,
        progress: Progress | None = None,
    ) -> None:
        """The model in `directory`; the weights that sample come with the first `update_weights`."""
        with _quiet_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=False)
        self._model = model.to(device).eval().requires_grad_(False)
        self._parameters = parameter_map(self._model, load_spec(directory))
        self._tokenizer, self._device, self._max_num_seqs, self._progress = tokenizer, device, max_num_seqs, progress
        self._ends = stop_token_ids(directory, model.config, tokenizer)
        # Asking a GPU whether a sequence has ended makes it wait: ask now and then, throw away what came after the end.
        self._check_every = 1 if device.type == "cpu" else 16
        self.version = -1

    def update_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in, by their names in Hugging Face files; raises RuntimeError if they are not the whole model."""
        missing = set(self._parameters)
        with torch.no_grad():
            for name, tensor in weights:
                self._parameters[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise RuntimeError(
                f"the engine got no new weights for {len(missing)} parameters, the first: {sorted(missing)[:3]}"
            )
        self.version = version

    @torch.inference_mode()
    def generate(self, prompts: list[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        """`group_size` responses to each prompt, in the order of the prompts."""
        assert self.version >= 0, "the engine has no weights yet"
        groups = [Group(prompt, []) for prompt in prompts]
        rows = [
            (group, index) for group in sorted(groups, key=lambda g: len(g.prompt.token_ids)) for index in range(group_size)
        ]
        done = 0
        for begin in range(0, len(rows), self._max_num_seqs):
            chunk = rows[begin : begin + self._max_num_seqs]
            for (group, _), sample in zip(chunk, self._decode(chunk, sampling, done, len(rows)), strict=True):
                group.samples.append(sample)
            done += len(chunk)
        return groups

    def _decode(self, rows: list[tuple[Group, int]], sampling: Sampling, done: int, total: int) -> list[Sample]:
        prompts = list({id(group): group.prompt for group, _ in rows}.values())
        counts = torch.tensor([sum(group.prompt is prompt for group, _ in rows) for prompt in prompts])
        longest = max(len(prompt.token_ids) for prompt in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            tokens[i, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[i, longest - len(prompt.token_ids) :] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        owner = torch.repeat_interleave(torch.arange(len(prompts)), counts).to(self._device)
        cache = output.past_key_values
        cache.batch_select_indices(owner)
        logits_NV, mask = output.logits[owner, -1], mask[owner]
        keys = [request_seed((sampling.seed, sampling.step, group.prompt.id, index)) for group, index in rows]
        keys_N = torch.tensor(keys, device=self._device)
        alive = torch.arange(len(rows), device=self._device)
        token_columns: list[Tensor] = []
        logprob_columns: list[Tensor] = []
        ids: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        finished = [False] * len(rows)
        for position in range(sampling.max_tokens):
            token_N, logprob_N = sample_token(
                logits_NV, uniform(keys_N, position), sampling.temperature, sampling.top_p, sampling.top_k
            )
            token_columns.append(token_N)
            logprob_columns.append(logprob_N)
            last = position + 1 == sampling.max_tokens
            if last or (position + 1) % self._check_every == 0:
                keep = self._collect(alive, token_columns, logprob_columns, ids, logprobs, finished, sampling.stop)
                token_columns, logprob_columns = [], []
                if self._progress is not None:
                    self._progress(done + sum(finished), total)
                if last or not keep:
                    break
                if len(keep) < len(alive):
                    kept = torch.tensor(keep, device=self._device)
                    cache.batch_select_indices(kept)
                    alive, token_N, keys_N, mask = (x[kept] for x in (alive, token_N, keys_N, mask))
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            output = self._model(
                input_ids=token_N[:, None],
                attention_mask=mask,
                position_ids=mask.sum(1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            cache, logits_NV = output.past_key_values, output.logits[:, -1]
        return [
            Sample(
                token_ids=ids[i],
                logprobs=logprobs[i],
                text=self._tokenizer.decode(ids[i], skip_special_tokens=True),
                finished=finished[i],
                policy_version=self.version,
            )
            for i in range(len(rows))
        ]

    def _collect(
        self,
        alive: Tensor,
        token_columns: list[Tensor],
        logprob_columns: list[Tensor],
        ids: list[list[int]],
        logprobs: list[list[float]],
        finished: list[bool],
        stop: tuple[str, ...],
    ) -> list[int]:
        """Move new tokens to the host, end sequences where they end; positions in `alive` of those that go on."""
        tokens = torch.stack(token_columns, 1).tolist()
        values = torch.stack(logprob_columns, 1).tolist()
        keep = []
        for place, row in enumerate(alive.tolist()):
            for token, logprob in zip(tokens[place], values[place], strict=True):
                ids[row].append(token)
                logprobs[row].append(logprob)
                if token in self._ends or (stop and self._stops(ids[row], stop)):
                    finished[row] = True
                    break
            else:
                keep.append(place)
        return keep

    def _stops(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the newest token completes a stop string; a token gives at least one character in the end."""
        tail = self._tokenizer.decode(ids[-2 * max(map(len, stop)) - 4 :])
        return any(text in tail for text in stop)


def parameter_map(model: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """Each tensor of the model's files by its name there -> the memory in which transformers keeps it."""
    state, parameters = model.state_dict(), parameters_of(spec)
    # A tied output layer has an entry of its own, and the embedding's memory.
    held = set(state) - (set(OUTPUT.hf) if spec.tied else set())
    if different := held ^ {name for parameter in parameters for name in parameter.in_transformers}:
        raise RuntimeError(
            f"the table of {spec.family} must name every tensor that transformers has in memory, and no other: "
            f"{len(different)} differ, the first: {sorted(different)[:3]}; correct models/families/{spec.family}.py"
        )
    found: dict[str, Tensor] = {}
    for parameter in parameters:
        if parameter.transformers is None:
            found |= {name: state[name] for name in parameter.hf}
        else:
            joined = state[parameter.transformers]
            own = joined if parameter.expert is None else joined[parameter.expert]
            found |= zip(parameter.hf, own.chunk(len(parameter.hf)), strict=True)
    return found


def stop_token_ids(directory: Path, config: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a response: those of the generation configuration, the model's and the tokenizer's."""
    found: set[int] = set()
    generation = directory / "generation_config.json"
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if generation.is_file():
        sources.append(transformers.GenerationConfig.from_pretrained(directory).eos_token_id)
    for source in sources:
        found |= set(source) if isinstance(source, (list, tuple)) else {source}
    return {int(token) for token in found if token is not None}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the progress bar of every rank."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
