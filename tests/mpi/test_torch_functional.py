"""The all-reduce that gradients flow through."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from hpcdl.errors import MismatchError, UnsupportedArrayError

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.functional import all_reduce  # noqa: E402


def factor(op: str, comm: MPI.Intracomm) -> float:
    return 1 / comm.size if op == "mean" else 1.0


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_is_the_all_reduce_of_the_gradients(comm: MPI.Intracomm, op: str) -> None:
    ranks = range(comm.size)
    x = torch.full((3, 2), 12.0 * comm.rank, requires_grad=True)
    result = all_reduce(x, comm, op=op)
    assert (result == sum(12.0 * rank for rank in ranks) * factor(op, comm)).all()
    assert (x == 12.0 * comm.rank).all()  # it is a new tensor
    (result * (12 * (comm.rank + 1))).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == torch.full((3, 2), sum(12.0 * (rank + 1) for rank in ranks) * factor(op, comm)).tolist()


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_an_expanded_gradient_of_one_element_in_memory(comm: MPI.Intracomm, op: str) -> None:
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    strides: list[Any] = []
    result = all_reduce(x, comm, op=op)
    result.register_hook(lambda gradient: strides.append(gradient.stride()))
    result.sum().backward()
    assert strides == [(0, 0)]
    assert x.grad is not None and (x.grad == comm.size * factor(op, comm)).all()


@pytest.mark.ranks(2)
def test_layouts_do_not_matter(comm: MPI.Intracomm) -> None:
    values = torch.arange(24.0).reshape(4, 3, 2)
    for x in (values.transpose(1, 2), values[:, ::2], values[:1].expand(5, 3, 2), values[0, 0, 0], values[:0]):
        assert torch.equal(all_reduce(x, comm), 2 * x)
    x = values.contiguous() if comm.rank == 0 else values.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(all_reduce(x, comm), 2 * values)
    z = torch.tensor([1 + 2j, 3j]).conj()
    assert torch.equal(all_reduce(z, comm), 2 * z)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_it_can_be_differentiated_twice(comm: MPI.Intracomm, op: str) -> None:
    # With y the all-reduced x, the ranks' losses (r + 1) y**3 have the gradient f 3 S y**2 and the second f f 6 S p y,
    # where S is the sum of the r + 1, f the op's factor and p the number of ranks that ask for the second.
    x = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    y = all_reduce(x, comm, op=op)
    total, f = sum(range(1, comm.size + 1)), factor(op, comm)
    (first,) = torch.autograd.grad(((comm.rank + 1) * y**3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * f * total * y**2, rtol=1e-10, atol=0)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, f * f * 6 * total * comm.size * y, rtol=1e-10, atol=0)


@pytest.mark.ranks(2, 3)
def test_what_one_rank_must_refuse_all_refuse(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="op is one of sum, mean"):
        all_reduce(x, comm, op="max" if last else "sum")
    with pytest.raises(UnsupportedArrayError, match="x is a torch tensor, not ndarray"):
        all_reduce(np.ones(3) if last else x, comm)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedArrayError, match="to_dense"):
        all_reduce(x.detach().to_sparse() if last else x, comm)
    with pytest.raises(ValueError, match="op is one of sum, mean"):
        all_reduce(x, comm, op="prod")
    with pytest.raises(MismatchError):
        all_reduce(x, comm, op="mean" if last else "sum")
    assert (all_reduce(x, comm) == comm.size).all()
