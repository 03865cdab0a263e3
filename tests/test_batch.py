from __future__ import annotations

import torch
from fivefold.rollout.batch import micro_batches_needed, pack, plan_micro_batches
from hypothesis import given
from hypothesis import strategies as st

from fivefold.types import Group, Prompt, Sample

lengths = st.lists(st.integers(1, 50), min_size=0, max_size=40)


@given(lengths, st.integers(50, 200))
def test_micro_batches_hold_every_sample_once_and_stay_in_the_budget(lengths_N, budget):
    count = micro_batches_needed(lengths_N, budget)
    plan = plan_micro_batches(lengths_N, count)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths_N)))
    assert all(sum(lengths_N[i] for i in part) <= budget for part in plan)


@given(lengths, st.integers(1, 60))
def test_more_micro_batches_than_samples_leave_some_empty(lengths_N, count):
    assert len(plan_micro_batches(lengths_N, count)) == count


def test_packing_lays_prompt_before_response_and_marks_the_response():
    prompt, other = Prompt(0, [1, 2], "s", "", ""), Prompt(1, [3], "s", "", "")
    groups = [
        Group(prompt, [Sample([4, 5], [-0.1, -0.2], "", True, 0), Sample([6], [-0.3], "", True, 0)]),
        Group(other, [Sample([7, 8, 9], [-0.4, -0.5, -0.6], "", False, 0)]),
    ]
    batch = pack(groups, 0.9, sampled=True)
    assert batch.token_ids_T.tolist() == [1, 2, 4, 5, 1, 2, 6, 3, 7, 8, 9]
    assert batch.loss_mask_T.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1]
    assert batch.lengths_N == [4, 3, 4]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert torch.equal(batch.rollout_logprobs_T[batch.loss_mask_T], torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]))
    assert batch.expand_to_tokens(torch.tensor([1.0, 2.0, 3.0])).tolist() == [0, 0, 1, 1, 0, 0, 2, 0, 3, 3, 3]


def test_a_selection_takes_the_tokens_of_its_samples_in_its_order():
    groups = [Group(Prompt(i, [i], "s", "", ""), [Sample([10 + i] * (i + 1), [], "", True, 0)]) for i in range(3)]
    batch = pack(groups, 1.0, sampled=False)
    picked = batch.select([2, 0])
    assert picked.token_ids_T.tolist() == [2, 12, 12, 12, 0, 10]
    assert picked.lengths_N == [4, 2]
    assert batch.select([]).token_ids_T.tolist() == []


def test_no_groups_make_an_empty_batch_with_the_same_fields():
    assert pack([], 1.0, sampled=True).tensors().keys() == {"token_ids_T", "loss_mask_T", "rollout_logprobs_T"}
