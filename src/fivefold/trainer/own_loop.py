"""The batch of an optimizer step in a user's own training loop: samples, rewards -> advantages, loss weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.algo.importance_sampling import RATIOS
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
    besides, for example `Column.REF_LOGPROBS` for a KL, must be set before. For pairs (dpo), each better response is
    followed by the worse one. The batch may be on any device and stays there. Raises UserError for what does not fit.

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
    if objective.gradient.surrogate.pairs:
        _refuse_other_than_pairs(rewards_N, group_N)
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
    """Raise UserError for methods that need more than the rewards of one update, and for columns that the batch lacks."""
    advantage, kept, kl = objective.advantage, objective.filter, objective.kl
    has_bounds = kept.difficulty_low is not None or kept.difficulty_high is not None
    for what, is_so in (
        ("selects tokens over all samples of an update", objective.gradient.selects),
        ("compares with the most likely response", objective.needs_greedy),
        ("learns from an expert's responses", any(term.is_active and term.expert_only for term in objective.terms)),
        ("compares turns that answer the same state (turn_coef)", advantage.turn_coef > 0),
        ("whitens the responses of each domain (whiten_by: domain)", advantage.whiten and advantage.whiten_by == "domain"),
        ("leaves prompts out by correctness (difficulty_by: correct)", has_bounds and kept.difficulty_by == "correct"),
        ("adapts the coefficient of a KL in the reward (kl.target)", kl.target is not None and kl.place == "reward"),
        ("averages micro-batches (aggregate: micro-batch-token-mean)", objective.aggregation.per_micro_batch),
    ):
        if is_so:
            raise UserError(f"the method {what}: only a run supports that")
    needed = _columns(objective)
    if missing := [column for column in Column if column in needed and column not in batch]:
        raise UserError(f"the method needs {', '.join(f'batch[Column.{column.name}]' for column in missing)}: set it before")


def _columns(objective: Objective) -> frozenset[Column]:
    """Return the columns that the method reads, also those that a run fills in when it packs samples."""
    gradient, correction = objective.gradient, objective.gradient.correction
    by_turn = gradient.level is RATIOS["turn"] or correction.weight == "turn" or objective.advantage.credit == "turns"
    packed = {
        Column.ROLLOUT_LOGPROBS: correction.is_active or correction.old_logprobs_from != "trainer",
        Column.TURN: by_turn,
    }
    return objective.needs(1) | objective.process.columns | {column for column, is_read in packed.items() if is_read}


def _refuse_other_than_pairs(rewards_N: Tensor, group_N: Tensor) -> None:
    """Raise UserError unless rows follow one another as the better and the worse response to a prompt."""
    rows = list(zip(group_N.tolist(), rewards_N.tolist(), strict=True))
    for place in range(0, len(rows), 2):
        groups, rewards = zip(*rows[place : place + 2], strict=True)
        if len(groups) < 2 or groups[0] != groups[1] or rewards[0] <= rewards[1]:
            raise UserError(
                "the method compares pairs: rows 0 and 1, 2 and 3, ... must be the better and the worse response to a "
                f"prompt: got groups {list(groups)} and rewards {list(rewards)} from row {place} on"
            )
