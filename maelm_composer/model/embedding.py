"""Looking tokens up in the table that the head is tied to, without a gradient of the table's size for each use."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def look_up(table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """(V, D) table and ids of any shape -> their rows (..., D), the last row (D,), the table to use from here on.

    When training on a CPU the gradients of the rows are added to that of the returned table, where they lie. As torch
    does it, each use fills a table with zeros, adds to it, and then adds it to the others; compiled, number by number
    in whichever order the threads come, so that no two runs are the same. Elsewhere this is torch's own, and the last
    row is None: an index takes it from the table as well.
    """
    if table.device.type == 'cpu' and torch.is_grad_enabled():
        rows, last_row, table = _LookUp.apply(table, ids)
        return rows, last_row, table
    return functional.embedding(ids, table), None, table


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(ids)
        return functional.embedding(ids, table), table[-1].clone(), table.view_as(table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows, last_row, table = gradients  # zeros for what was not used
        (ids,) = ctx.saved_tensors
        table[-1] += last_row
        add_rows(table, ids.flatten(), rows.flatten(0, -2))
        return table, None


@torch.library.custom_op('maelm_composer::add_rows', mutates_args=('table',))
def add_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add ``rows`` (N, D) to the rows of ``table`` (V, D) at ``index`` (N,), in order."""
    table.index_add_(0, index, rows)


@add_rows.register_fake
def _(table: Tensor, index: Tensor, rows: Tensor) -> None:
    pass
