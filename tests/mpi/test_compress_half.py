"""16 bits on the wire, added in float32, in float16's range."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import settings

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import Tensor, nn  # noqa: E402

from hpcdl.compress.half import Half  # noqa: E402
from hpcdl.compress.hook import Compression  # noqa: E402
from hpcdl.compress.method import Piece  # noqa: E402
from hpcdl.compress.wire import Wire  # noqa: E402
from hpcdl.torch import DistributedDataParallel  # noqa: E402

pytestmark = pytest.mark.ranks(1, 2, 3, 5)

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


def reduce(wire: Wire, dtype: torch.dtype, *gradients: Tensor) -> list[Tensor]:
    pieces = [Piece(str(number), each.clone(), each.ndim > 1) for number, each in enumerate(gradients)]
    Half(dtype).reduce(pieces, wire)
    return [piece.values for piece in pieces]


def assert_alike(comm: MPI.Comm, *tensors: Tensor) -> None:
    assert len(set(comm.allgather(b"".join(each.contiguous().numpy().tobytes() for each in tensors)))) == 1


@DTYPES
def test_what_16_bits_can_hold_is_added_exactly(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    wire = Wire(comm)
    for step in range(3):
        shapes = [(3, 7), (5,), (0, 4), (), (1, 1, 2)]
        gradients = [torch.full(shape, float(comm.rank - 1 + step)) for shape in shapes]
        for given, got in zip(gradients, reduce(wire, dtype, *gradients), strict=True):
            assert got.dtype == torch.float32 and got.shape == given.shape
            assert (got == sum(rank - 1 + step for rank in range(comm.size))).all()


@DTYPES
def test_each_number_is_rounded_once_on_its_rank_and_once_as_the_sum(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    every = torch.randn(comm.size, 40, 30, generator=torch.Generator().manual_seed(0))
    (got,) = reduce(Wire(comm), dtype, every[comm.rank])
    # A power of two changes no digit, as long as nothing is near the small end of the range: noise is not.
    expected = every.to(dtype).float().sum(0).to(dtype).float()
    exact_ties = comm.size < 3  # of more ranks the order of adding may decide the last bit
    assert torch.equal(got, expected) if exact_ties else torch.allclose(got, expected, rtol=torch.finfo(dtype).eps)
    assert torch.allclose(got, every.sum(0), rtol=0, atol=2 * comm.size * torch.finfo(dtype).eps)
    assert comm.size == 1 or not torch.equal(got, every.sum(0))
    assert_alike(comm, got)


@DTYPES
@pytest.mark.parametrize("largest", [1e-30, 1e-12, 1e6, 1e30])
def test_no_range_is_too_small_or_too_large(comm: MPI.Intracomm, dtype: torch.dtype, largest: float) -> None:
    gradient = torch.linspace(0.01, 1, 50) * largest
    ordinary = torch.linspace(1, 2, 50)
    got, beside = reduce(Wire(comm), dtype, gradient * (comm.rank + 1), ordinary)
    factor = comm.size * (comm.size + 1) / 2
    assert torch.allclose(got, gradient * factor, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.allclose(beside, ordinary * comm.size, rtol=2 * torch.finfo(dtype).eps)
    assert_alike(comm, got, beside)


@DTYPES
def test_zeros_give_zeros(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    matrix, vector = reduce(Wire(comm), dtype, torch.zeros(4, 5), torch.zeros(3))
    assert torch.equal(matrix, torch.zeros(4, 5)) and torch.equal(vector, torch.zeros(3))


def test_the_largest_of_each_rank_together_do_not_overflow(comm: MPI.Intracomm) -> None:
    (got,) = reduce(Wire(comm), torch.float16, torch.full((2, 2), 65504.0))
    assert torch.allclose(got, torch.full((2, 2), 65504.0 * comm.size), rtol=2**-10)


@DTYPES
def test_a_gradient_may_be_float64_and_lie_in_any_order(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    gradient = torch.arange(48.0, dtype=torch.float64).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    piece = Piece("a", gradient.clone(memory_format=torch.preserve_format), True)
    Half(dtype).reduce([piece], Wire(comm))
    assert torch.equal(piece.values, gradient * comm.size) or comm.size not in (1, 2, 4)
    assert torch.allclose(piece.values, gradient * comm.size, rtol=torch.finfo(dtype).eps)


@DTYPES
@pytest.mark.ranks(2)
def test_2_bytes_travel_where_4_did(comm: MPI.Intracomm, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "NODES", "1+1")
    comm, n = comm.Dup(), 4000
    wire, method, piece = Wire(comm), Half(dtype), Piece("a", torch.ones(n), False)
    for _ in range(2):
        before = hpcdl.sent_bytes()
        method.reduce([piece], wire)
        assert 2 * n <= hpcdl.sent_bytes() - before <= 2 * n + 4  # and one number to scale by
    assert wire.seconds > 0
    comm.Free()


@DTYPES
@pytest.mark.ranks(2)
def test_a_wrapped_module_is_trained_with_it(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(20, 5), comm)
    compression = Compression(ddp, Half(dtype))
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(comm.rank))
    ddp(x).square().mean().backward()
    sent = ddp.module.weight.grad.clone()
    assert sent.abs().sum() > 0
    alone = nn.Linear(20, 5)
    alone.load_state_dict(ddp.module.state_dict())
    every = torch.cat([torch.randn(8, 20, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)])
    alone(every).square().mean().backward()
    largest = float(alone.weight.grad.abs().max())
    assert torch.allclose(sent, alone.weight.grad, rtol=0, atol=4 * largest * torch.finfo(dtype).eps)
    assert compression.residual_norm() == 0 and compression.told().steps == 1
    assert_alike(comm, sent)


@pytest.mark.ranks(1)
def test_other_types_are_refused(comm: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match=r"dtype is one of torch.float16, torch.bfloat16, not torch.float32"):
        Half(torch.float32)
    assert [Half(dtype).name for dtype in (torch.float16, torch.bfloat16)] == ["fp16", "bf16"]
