"""Trajectories of several turns: samples -> their trajectories, the turns of the whole step, and metrics of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fivefold.distributed.ranks import Ranks
from fivefold.types import Group, RolloutStats, Sample, Turns, by_trajectory

_COLUMNS = ("number", "begin", "end", "reward", "state", "cut", "seconds")


def sampled_tokens(sequences: Iterable[Sample]) -> list[int]:
    """Return the tokens of a trajectory that carry loss: what was sampled, without observations."""
    return [
        token
        for sample in sequences
        for place, token in enumerate(sample.token_ids)
        if sample.loss_mask is None or sample.loss_mask[place]
    ]


def gather_turns(groups: list[Group], key_N: Tensor, places: int, ranks: Ranks) -> Turns:
    """Return the turns of all ranks' groups, in the order of the step's samples. Collective.

    `key_N` is group index · `places` + place in the group, of each sample of the step.
    """
    rows = [row for group in groups for row in _rows(group, places)]
    gathered = torch.cat(ranks.all_gather_world(torch.tensor(rows, dtype=torch.float64).view(-1, 1 + len(_COLUMNS))))
    row_U = torch.searchsorted(key_N, gathered[:, 0].long())
    order_U = row_U.argsort(stable=True)
    column = {name: gathered[order_U, place] for place, name in enumerate(_COLUMNS, start=1)}
    # A state is one among those of its group; groups have different ones.
    group_U, state_U = key_N[row_U[order_U]] // places, column["state"].long()
    largest = int(state_U.max()) + 1 if len(state_U) else 0
    return Turns(
        row_U=row_U[order_U],
        number_U=column["number"].long(),
        begin_U=column["begin"].long(),
        end_U=column["end"].long(),
        reward_U=column["reward"],
        state_U=torch.where(state_U < 0, -1, group_U * largest + state_U),
        cut_U=column["cut"].bool(),
        seconds_U=column["seconds"],
    )


def turn_metrics(stats: RolloutStats, turns: Turns) -> dict[str, float]:
    """Metrics of the turns of these trajectories."""
    count_M = torch.bincount(stats.trajectory_of_N[turns.row_U], minlength=len(stats.trajectories)).double()
    tokens_U = (turns.end_U - turns.begin_U).double()
    return {
        "turns/mean": float(count_M.mean()),
        "turns/max": float(count_M.max()),
        "turns/tokens_mean": float(tokens_U.mean()),
        "turns/tokens_max": float(tokens_U.max()),
        "turns/cut_fraction": float(turns.cut_U.double().mean()),
        "turns/reward_mean": float(turns.reward_U.mean()),
        "turns/seconds_mean": float(turns.seconds_U.mean()),
        "turns/seconds_max": float(turns.seconds_U.max()),
    }


def _rows(group: Group, places: int) -> Iterator[list[float]]:
    """Yield the key of its sample and the columns of each turn of a group, in the first sequence that contains it."""
    states: dict[str, int] = {}
    place = 0
    for sequences in by_trajectory(group.samples):
        seen: set[int] = set()
        for sample in sequences:
            for turn in sample.turns:
                if turn.number in seen:
                    continue
                seen.add(turn.number)
                state = -1 if turn.state is None else states.setdefault(turn.state, len(states))
                yield [
                    group.index * places + place, turn.number, turn.begin, turn.end, turn.reward, state,
                    turn.finish == "length", turn.seconds,
                ]  # fmt: skip
            place += 1
