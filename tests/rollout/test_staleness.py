"""Which groups a step takes: none too old, each once, and no wait that never ends."""

from __future__ import annotations

import math
import random

import pytest

from fivefold.rollout.staleness import Admission, oldest_version, staleness
from fivefold.types import Sample

PER_STEP, STEPS = 4, 30


def simulate(rule: Admission, cuts: bool, seed: int, slowness: float) -> tuple[list[list[tuple[int, int]]], int]:
    """(place, step before which it was given out) of what each step took, and groups that were cut; each group takes a random
    time, and what is given out later may be complete earlier."""
    draw = random.Random(seed)
    unused: dict[int, int] = {}
    done_at: dict[int, float] = {}
    taken, now, position, cut = [], 0.0, 0, 0
    for step in range(STEPS):
        for place in [place for place, given_out in unused.items() if given_out == step]:
            done_at[place] = now + draw.expovariate(1 / slowness)
        for _ in range(rule.room(len(unused), step)):
            unused[position], done_at[position] = step, now + draw.expovariate(1 / slowness)
            position += 1
        assert len(unused) <= (rule.max_staleness + 1) * PER_STEP + round(rule.oversample * PER_STEP)
        assert step == 0 or len(unused) > (rule.max_staleness + 1) * PER_STEP - 1 or STEPS - step <= rule.max_staleness + 1
        for moment in sorted([now, *done_at.values()]):
            ready = [place for place in unused if done_at[place] <= max(moment, now)]
            if (chosen := rule.choose(unused, ready, step, cuts)) is not None:
                now = max(moment, now)
                break
        else:
            raise AssertionError(f"step {step} waits for ever: {unused}")
        taken.append([(place, unused.pop(place)) for place in chosen])
        for place in chosen:
            del done_at[place]
        if cuts:
            for place in rule.overdue(unused, step):
                unused[place] = step + 1
                cut += 1
        now += 1.0
    assert len(unused) <= round(rule.oversample * PER_STEP)
    return taken, cut


@pytest.mark.parametrize("max_staleness", [0, 0.3, 0.5, 1, 1.75, 2, 5])
@pytest.mark.parametrize("slowness", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("oversample", [None, 0.0, 0.5])
def test_no_step_takes_what_is_too_old_and_every_group_is_taken_once(max_staleness, slowness, oversample):
    """Without cuts, and where what is overdue is given out again."""
    for seed in range(20):
        rule = Admission(max_staleness, PER_STEP, STEPS, oversample or 0.0)
        taken, cut = simulate(rule, oversample is not None, seed, slowness)
        for step, groups in enumerate(taken):
            assert len(groups) == PER_STEP
            assert all(0 <= step - given_out <= math.ceil(max_staleness) for _, given_out in groups)
        places = [place for groups in taken for place, _ in groups]
        assert len(set(places)) == len(places) == PER_STEP * STEPS
        if not oversample:
            assert sorted(places) == list(range(PER_STEP * STEPS))
        assert oversample is not None or cut == 0


def test_nothing_ahead_takes_the_groups_of_the_synchronous_run():
    taken, _ = simulate(Admission(0, PER_STEP, STEPS), False, 0, 1.0)
    assert [[place for place, _ in groups] for groups in taken] == [
        list(range(PER_STEP * step, PER_STEP * (step + 1))) for step in range(STEPS)
    ]


def test_a_step_waits_for_what_is_due_or_takes_what_is_there():
    rule, unused = Admission(2, 2, 10), {0: 0, 3: 2, 4: 2, 5: 2}
    assert rule.choose(unused, [3, 4, 5], 2, cuts=False) is None, "group 0 is due at step 2"
    assert rule.choose(unused, [0, 3, 5], 2, cuts=False) == [0, 3]
    assert rule.choose(unused, [3, 4, 5], 2, cuts=True) == [3, 4]
    assert rule.overdue({0: 0, 5: 2}, 2) == [0]


def test_staleness_counts_steps_and_not_the_updates_within_them():
    versions = [(3, 12), (4, 16), (5, 16), (6, 20)]
    assert [staleness(versions, version, 6) for version in (12, 13, 16, 20)] == [3, 3, 1, 0]


def test_a_part_of_a_step_ahead_is_verls_bound_and_no_sample_is_older_than_a_step():
    """verl's fully_async_rollouter.py: int((1 + staleness_threshold) x required) are given out and not used at a sync."""
    for threshold in (0.1, 0.15, 0.5, 0.75):
        rule = Admission(threshold, 100, 10)
        assert rule.room(0, 3) == 100 + round(100 * threshold)
        assert rule.room(30, 3) == 70 + round(100 * threshold)
        assert (rule.overdue({0: 3}, 3), rule.overdue({0: 3}, 4)) == ([], [0])
    assert Admission(0.5, 100, 10).room(0, 9) == 100, "nothing is sampled for a step behind the end"


@pytest.mark.parametrize(
    ("versions", "mask", "oldest"),
    [
        ([3, 3, 4, 5], [True, True, True, True], 3),
        ([3, 3, 4, 5], [False, False, True, True], 4),
        ([3, 3, 4, 5], [False, True, False, True], 3),
        ([5, 4, 3, 3], [True, True, False, False], 4),
        ([3, 3, 4, 5], [False] * 4, 3),
    ],
)
def test_staleness_is_that_of_the_oldest_token_with_loss(versions, mask, oldest):
    sample = Sample([1] * 4, [-1.0] * 4, "", "done", versions[0], token_versions=versions, loss_mask=mask)
    assert oldest_version(sample) == oldest


def test_staleness_of_one_version_is_that_of_the_sample():
    assert oldest_version(Sample([1], [-1.0], "", "done", 4)) == 4
