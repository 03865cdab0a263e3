"""The table of a batch's columns: what each accepts, and which model fills it in."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from fivefold.columns import Column
from fivefold.config.roles import ROLES
from fivefold.trainer.models import Models
from fivefold.types import TokenBatch

COMPUTED = [column for column in Column if column.temperature is not None]


def make_batch() -> TokenBatch:
    return TokenBatch(torch.arange(3), torch.tensor([False, True, True]), [3], temperature=0.5)


@pytest.mark.parametrize("column", Column)
def test_a_column_accepts_only_its_dtypes_and_its_shape(column):
    batch, shape = make_batch(), (3, 2, 2)[: len(column.shape)]
    for dtype in ("bool", "int8", "int16", "int64", "float32", "float64"):
        value = torch.ones(shape, dtype=getattr(torch, dtype))
        if dtype in column.dtypes:
            batch[column] = value
            assert batch[column] is value
            for other in (value[:2], value[..., None]):
                with pytest.raises(ValueError, match=column.value):
                    batch[column] = other
        else:
            with pytest.raises(ValueError, match=f"{column.value} must be .*: got {dtype}"):
                replace(batch, columns={column: value})


def test_a_missing_column_is_named_with_who_fills_it_in():
    with pytest.raises(KeyError, match="no values_T; filled in by: critic"):
        make_batch()[Column.VALUES]


def test_a_column_set_on_a_replaced_batch_is_not_set_on_the_first():
    batch = make_batch()
    copy = replace(batch)
    copy[Column.OLD_LOGPROBS] = torch.zeros(3)
    assert Column.OLD_LOGPROBS not in batch
    assert not copy.with_columns({Column.OLD_LOGPROBS: None}).columns and Column.OLD_LOGPROBS in copy


class Scorer:
    """A model that keeps the temperature of its passes."""

    def __init__(self) -> None:
        self.temperatures: list[float] = []

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        self.temperatures.append(batch.temperature)
        return torch.ones(len(batch.token_ids_T))


@pytest.mark.parametrize("column", COMPUTED)
def test_the_model_of_its_role_fills_in_a_column_at_its_temperature(column, monkeypatch):
    monkeypatch.setattr(Models, "on_device", lambda self, *names: nullcontext())
    by_role, batch = {name: Scorer() for name in ROLES}, make_batch()
    Models(by_role, ranks=None, guard=None).annotate(batch, frozenset({column}))
    expected = {Column.HALF_TEMPERATURE_LOGPROBS: 0.25, Column.PRM_LOGPROBS: 1.0, Column.PRM_REF_LOGPROBS: 1.0}
    passes = {name: model.temperatures for name, model in by_role.items() if model.temperatures}
    assert passes == {column.filled_by: [expected.get(column, 0.5)]} and batch.columns.keys() == {column}


def test_no_model_fills_in_a_column_of_another_part():
    with pytest.raises(AssertionError, match=r"no model fills in .*advantages_T"):
        Models({}, ranks=None, guard=None).annotate(make_batch(), frozenset({Column.ADVANTAGES}))
