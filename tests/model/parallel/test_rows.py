"""Moved rows against plain indexing: values, gradients, and which operators compute them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mm.model.parallel.rows import Permutation, replace_rows

SLOW = {"aten.index_put", "aten.index_put_", "aten.index_fill", "aten.index_fill_", "aten.index", "aten.nonzero",
        "aten._index_put_impl_", "aten.masked_fill", "aten.masked_fill_"}  # fmt: skip
"""What sorts, waits for the host on some devices, or has a size that only the device knows."""


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def assert_same(make, expected, *leaves: torch.Tensor) -> None:
    """Values and gradients of both; ``make`` takes none of the slow operators."""
    with Operators() as used:
        out = make(*leaves)
        upstream = torch.randn(out.shape)
        gradients = torch.autograd.grad(out, leaves, upstream)
    assert not used.names & SLOW, used.names
    with Operators() as plain:
        other = expected(*leaves)
        others = torch.autograd.grad(other, leaves, upstream)
    assert plain.names & SLOW, "the plain way takes them, or the check above sees nothing"
    assert torch.equal(out, other)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, others, strict=True))


@given(index=st.permutations(range(9)))
def test_an_order_and_its_way_back(index) -> None:
    index = torch.tensor(index)
    x = torch.randn(9, 3, requires_grad=True)
    order = Permutation.of(index)
    assert_same(order, lambda x: x[index], x)
    assert torch.equal(order.reversed()(order(x)), x)


@given(index=st.permutations(range(9)), count=st.integers(0, 9))
def test_replaced_rows(index, count) -> None:
    index = torch.tensor(index[:count], dtype=torch.int64)
    x, rows = torch.randn(9, 3, requires_grad=True), torch.randn(count, 3, requires_grad=True)

    def plain(x, rows):
        out = x.clone()
        out[index] = rows
        return out

    assert_same(lambda x, rows: replace_rows(x, index, rows), plain, x, rows)


@pytest.mark.parametrize("trained", [0, 1])
def test_replaced_rows_where_one_side_is_frozen(trained: int) -> None:
    index = torch.tensor([4, 1])
    x, rows = leaves = torch.randn(5, 3), torch.randn(2, 3)
    leaves[trained].requires_grad_()
    replace_rows(x, index, rows).sum().backward()
    expected = torch.ones(2, 3) if trained else torch.tensor([1.0, 0, 1, 1, 0])[:, None].expand(5, 3)
    assert torch.equal(leaves[trained].grad, expected)
