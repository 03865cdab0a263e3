"""The batch of an optimizer step in a user's own training loop: samples, rewards -> advantages, loss weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.algo.objective import Objective
from fivefold.columns import Column
from fivefold.errors import UserError, shown
from fivefold.trainer.minibatches import MiniBatches
from fivefold.types import RolloutStats, TokenBatch

Numbers = Sequence[float] | Tensor


class OneProcess:
    """The only data-parallel replica: sums and maxima over replicas are its own."""

    def all_reduce_sum(self, sums: Tensor) -> Tensor:
        return sums

    def all_reduce_max(self, number: float) -> float:
        return number


def prepare_update(
    objective: Objective,
    batch: TokenBatch,
    rewards: Numbers,
    groups: Numbers,
    *,
    max_response_tokens: int,
    finished: Numbers | None = None,
) -> TokenBatch:
    """Return the batch with advantages and loss weights for one optimizer step on all of it, in a program with one process.

    `Objective.loss` of the result and the log-probs is the loss to minimize. `rewards` has a number per sample, `groups` the
    number of its prompt, `finished` whether the response ended by itself (true if left out). Columns that the method needs
    besides, for example `Column.REF_LOGPROBS` for a KL, must be set before. The batch may be on any device and stays there.
    Raises UserError for what does not fit.

    Example: `prepare_update(objective, batch, rewards=[1, 0, 0, 1], groups=[0, 0, 1, 1], max_response_tokens=512)`.
    """
    # Advantages are sums over a few numbers per sample: a GPU would not compute them sooner.
    device, batch = batch.token_ids_T.device, batch.to("cpu")
    samples = len(batch.lengths_N)
    rewards_N, group_N = _numbers("rewards", rewards, samples).double(), _numbers("groups", groups, samples)
    finished_N = _numbers("finished", [True] * samples if finished is None else finished, samples).bool()
    if not rewards_N.isfinite().all():
        raise UserError(f"every reward must be a finite number: got {rewards_N.tolist()}")
    _refuse_what_needs_a_run(objective, batch)
    responses_N = torch.stack([mask_T.sum() for mask_T in batch.loss_mask_T.split(batch.lengths_N)])
    lengths_N, zeros_N = torch.tensor(batch.lengths_N), torch.zeros(samples, dtype=torch.long)
    longest = int(responses_N.max())
    if longest > max_response_tokens:
        raise UserError(f"max_response_tokens must be at least {longest}, the longest response: got {max_response_tokens}")
    stats = RolloutStats(
        group_N=group_N.unique(return_inverse=True)[1],
        rewards_N=rewards_N,
        response_lengths_N=responses_N,
        prompt_lengths_N=lengths_N - responses_N,
        lengths_N=lengths_N,
        finished_N=finished_N,
        correct_N=torch.zeros(samples, dtype=torch.bool),
        repetition_N=zeros_N.double(),
        version_N=zeros_N,
        versions_differ=False,
        rank_N=zeros_N,
        minibatch_N=zeros_N,
        owner_N=zeros_N,
        max_response_tokens=max_response_tokens,
        has_logprobs=Column.ROLLOUT_LOGPROBS in batch,
    )
    objective.assign_advantages(batch, stats, OneProcess())
    (update,) = MiniBatches(objective)(batch, stats)
    return update.batch.to(device)


def _numbers(name: str, values: Numbers, samples: int) -> Tensor:
    """Return one number per sample on the CPU; raise UserError for anything else."""
    try:
        numbers_N = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} must be numbers: got {shown(values)}") from error
    if numbers_N.shape != (samples,):
        size = " x ".join(map(str, numbers_N.shape)) or "one for all"
        raise UserError(f"{name} must have a number for each of the {samples} samples: got {size}")
    return numbers_N


def _refuse_what_needs_a_run(objective: Objective, batch: TokenBatch) -> None:
    """Raise UserError for columns that the batch lacks and for methods that need more than one update's samples."""
    if missing := [column for column in Column if column in objective.needs(1) and column not in batch]:
        raise UserError(f"the method needs {', '.join(f'batch[Column.{column.name}]' for column in missing)}: set it before")
    if objective.gradient.selects:
        raise UserError("the method selects tokens over all samples of an update: only a run supports that")
    if objective.needs_greedy:
        raise UserError("the method compares with the most likely response: only a run supports that")
