"""What counts as an array, in what layout, of what type; and what is refused on every rank before any data moves."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import collectives

torch = pytest.importorskip("torch", reason="torch is not installed")

ALGORITHMS = [name for name in hpcdl.algorithms() if name != "halving"]


def total(rank_values: Callable[[int], Any], size: int) -> Any:
    return sum(rank_values(rank) for rank in range(size))


# ---- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_column_of_a_tensor_is_summed_and_its_neighbours_are_not(comm: MPI.Intracomm, algorithm: str) -> None:
    whole = torch.full((2, 2), comm.rank + 1.0).tril().contiguous()
    hpcdl.allreduce(whole[:, 0], comm, algorithm=algorithm)
    s = total(lambda rank: rank + 1.0, comm.size)
    assert whole.tolist() == [[s, 0], [s, comm.rank + 1.0]]


@pytest.mark.ranks(1, 2)
def test_a_transposed_tensor_is_itself_changed(comm: MPI.Intracomm) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert hpcdl.allreduce(x.t(), comm).shape == (3, 2)
    assert x.tolist() == (torch.arange(6.0).reshape(2, 3) * comm.size).tolist()


@pytest.mark.ranks(4)
def test_reduce_scatter_of_a_transposed_array_follows_its_own_order(comm: MPI.Intracomm) -> None:
    x = np.arange(24).reshape(4, 3, 2).transpose(1, 2, 0)
    right = x.flatten()[hpcdl.share(24, comm)] * comm.size
    piece = hpcdl.reduce_scatter(x, comm)
    assert piece.tolist() == right.tolist()
    t = torch.arange(24).reshape(4, 3, 2).transpose(1, 2)
    right = t.contiguous().view(-1)[hpcdl.share(24, comm)] * comm.size
    assert hpcdl.reduce_scatter(t, comm).tolist() == right.tolist()


@pytest.mark.ranks(1, 2, 3)
def test_elements_meet_by_index_whatever_their_order_in_memory(comm: MPI.Intracomm) -> None:
    values = np.arange(6).reshape(2, 3)
    x = np.asfortranarray(values) if comm.rank % 2 == 0 else values.copy()
    out = np.zeros((2, 3), int, order="F")
    hpcdl.allreduce(x, comm, out=out)
    assert (out == values * comm.size).all()
    hpcdl.allreduce(x, comm)
    assert (x == values * comm.size).all()


@pytest.mark.ranks(1, 2)
def test_channels_last_and_transposed_parameters_are_broadcast(comm: MPI.Intracomm) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.Linear(3, 2)).to(memory_format=torch.channels_last)
    model[1].weight = torch.nn.Parameter(torch.randn(3, 2).t())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(comm.rank + 5)
    for parameter in model.parameters():
        hpcdl.broadcast(parameter, comm, root=comm.size - 1)
        assert (parameter == comm.size + 4).all()


@pytest.mark.ranks(1, 2, 3)
def test_the_gradient_of_a_sum_is_an_expanded_array_and_may_be_sent(comm: MPI.Intracomm) -> None:
    ones = torch.ones(()).expand(4)
    out = torch.empty(4)
    hpcdl.allreduce(ones, comm, out=out)
    assert out.tolist() == [comm.size] * 4
    with pytest.raises(TypeError, match="share memory"):
        hpcdl.allreduce(ones, comm)


@pytest.mark.ranks(1, 2)
def test_strided_arrays_are_checked_on_one_rank_as_on_many(comm: MPI.Intracomm) -> None:
    base = np.arange(10.0)
    hpcdl.allreduce(base[::2], comm)
    assert base.tolist() == [k * comm.size if k % 2 == 0 else k for k in range(10)]
    for wrong in (np.broadcast_to(np.ones(1), 4), np.lib.stride_tricks.as_strided(base, (3, 3), (8, 8))):
        with pytest.raises(TypeError):
            hpcdl.allreduce(wrong, comm)


@pytest.mark.ranks(1, 2, 3)
def test_a_read_only_array_may_be_sent_but_not_written(comm: MPI.Intracomm) -> None:
    x = np.ones(3)
    x.flags.writeable = False
    out = np.empty(3)
    assert hpcdl.allreduce(x, comm, out=out) is out
    assert out.tolist() == [comm.size] * 3
    for options in ({}, {"out": x}):
        with pytest.raises(hpcdl.UnsupportedArrayError, match=r"read-only.*x\.copy\(\)"):
            hpcdl.allreduce(x if not options else np.ones(3), comm, **options)
    hpcdl.reduce(x if comm.rank else np.ones(3), comm)  # only the root's is written to


@pytest.mark.ranks(1, 2, 3)
def test_an_alias_is_in_place_and_an_overlap_is_refused(comm: MPI.Intracomm) -> None:
    x = np.ones(8)
    assert hpcdl.allreduce(x, comm, out=x) is x
    assert hpcdl.allreduce(x, comm, out=x[:])[0] == comm.size**2
    x[...] = 1
    for a, b in ((x[:-1], x[1:]), (x[:5], x[3:]), (x, x[::-1])):
        with pytest.raises(ValueError, match="overlaps x"):
            hpcdl.allreduce(a, comm, out=b)
    assert (x == 1).all()
    hpcdl.allreduce(x[::2], comm, out=x[1::2])  # bounds that overlap, but not a byte in common
    assert x.tolist() == [1, comm.size] * 4
    t = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="overlaps x"):
        hpcdl.allreduce(t[:3], comm, out=t[1:])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast", "reduce_scatter", "allgather"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_0_dim_and_empty_arrays_keep_their_shape(comm: MPI.Intracomm, collective: str, kind: str) -> None:
    for shape in ((), (0,), (1, 0, 2), (3, 0)):
        x = np.ones(shape) if kind == "numpy" else torch.ones(shape)
        result = getattr(hpcdl, collective)(x, comm)
        if collective in ("allreduce", "broadcast", "allgather"):
            assert result is x
        assert tuple(x.shape) == shape
        if collective == "allreduce" and shape == ():
            assert float(x) == comm.size


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_last_element_of_an_uneven_array_is_not_forgotten(comm: MPI.Intracomm, algorithm: str) -> None:
    for n in range(1, 4 * comm.size):
        x = np.zeros(n)
        x[-1] = 1000 + comm.rank
        hpcdl.allreduce(x, comm, algorithm=algorithm)
        assert x[-1] == total(lambda rank: 1000 + rank, comm.size)


@pytest.mark.ranks(2, 3)
def test_views_of_any_shape_and_stride(comm: MPI.Intracomm) -> None:
    """Packing and unpacking, over layouts that hypothesis thinks of; the same ones on all ranks."""
    from hypothesis import given, settings  # which takes a second to import
    from hypothesis import strategies as st

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from([-2, -1, 1, 2, 3])), max_size=4),
        st.randoms(),
        st.booleans(),
    )
    def law(axes: list[tuple[int, int]], dice: Any, as_torch: bool) -> None:
        base = np.full([length * abs(step) for length, step in axes], -5)
        x = base[(*(slice(None, None, step) for _, step in axes), ...)]
        order = list(range(x.ndim))
        dice.shuffle(order)
        x = x.transpose(order)
        values = np.arange(x.size).reshape(x.shape)
        x[...] = values + comm.rank
        given_array = torch.from_numpy(x) if as_torch and all(stride >= 0 for stride in x.strides) else x
        hpcdl.allreduce(given_array, comm)
        assert (x == total(lambda rank: values + rank, comm.size)).all()
        assert (base == -5).sum() >= base.size - x.size

    law()


@pytest.mark.ranks(1, 2)
def test_whatever_shows_its_memory_is_an_array(comm: MPI.Intracomm) -> None:
    p = comm.size
    assert list(hpcdl.allreduce(array.array("d", [1, 2]), comm)) == [p, 2 * p]
    assert bytes(hpcdl.allreduce(bytearray(b"\1\2"), comm)) == bytes([p, 2 * p])
    assert hpcdl.allreduce(memoryview(array.array("i", [3])), comm)[0] == 3 * p

    class Lender:
        """Something that knows DLPack and nothing else."""

        def __init__(self) -> None:
            self.own = np.ones(3)

        def __dlpack__(self, **options: Any) -> Any:
            return self.own.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.own.__dlpack_device__()

    lender = Lender()
    assert hpcdl.allreduce(lender, comm) is lender
    assert lender.own.tolist() == [p] * 3


@pytest.mark.ranks(2)
def test_a_numpy_array_meets_a_torch_tensor(comm: MPI.Intracomm) -> None:
    for dtype in ("float32", "float16"):
        x = np.arange(5).astype(dtype) if comm.rank else torch.arange(5).to(getattr(torch, dtype))
        hpcdl.allreduce(x, comm)
        assert x.tolist() == [0, 2, 4, 6, 8]
        out = torch.zeros(5, dtype=getattr(torch, dtype)) if comm.rank else np.zeros(5, dtype)
        hpcdl.allreduce(x, comm, out=out)
        assert out.tolist() == [0, 4, 8, 12, 16]


@pytest.mark.ranks(1, 2)
def test_autograd_notices_that_a_saved_tensor_has_changed(comm: MPI.Intracomm) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()  # saves its result for backward
    hpcdl.allreduce(y, comm)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert hpcdl.allreduce(x, comm) is x  # a leaf may be averaged, as in torch.distributed
    with torch.inference_mode():
        assert hpcdl.allreduce(torch.ones(2), comm).tolist() == [comm.size] * 2


@pytest.mark.ranks(1, 2)
def test_a_conjugate_view_counts_as_what_it_shows(comm: MPI.Intracomm) -> None:
    base = torch.tensor([1 + 2j, 3 - 1j])
    hpcdl.allreduce(base.conj(), comm)
    assert base.tolist() == [comm.size * (1 + 2j), comm.size * (3 - 1j)]


# ---- types ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "native"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_added_in_float32_and_rounded_once(comm: MPI.Intracomm, algorithm: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for value in (30000.0, 6e-8) if dtype == "float16" else (3e37, 2e-38):
        x = torch.full((7,), value, dtype=kind)
        hpcdl.allreduce(x, comm, op="mean", algorithm=algorithm)
        assert x.dtype == kind
        assert (x == torch.full((7,), value, dtype=kind)).all()
    # One rounding: 1 + 3 * 2**-11 is lost in float16 if each small addend is rounded away on its own.
    small = 2.0 ** (-11 if dtype == "float16" else -8)
    x = torch.full((5,), 1.0 if comm.rank == 0 else small, dtype=kind)
    hpcdl.allreduce(x, comm, algorithm=algorithm)
    right = torch.tensor(1 + small * (comm.size - 1), dtype=torch.float32).to(kind)
    assert (x == right).all()
    if dtype == "float16":
        a = np.full(4, 30000, np.float16)
        assert (hpcdl.allreduce(a, comm, op="mean", algorithm=algorithm) == 30000).all()
        assert np.isinf(hpcdl.allreduce(a * np.float16(2), comm, algorithm=algorithm)).all() == (comm.size > 1)


@pytest.mark.ranks(1, 2, 3)
def test_bool_and_small_integers_do_what_numpy_does(comm: MPI.Intracomm) -> None:
    mine = np.array([True, comm.rank == 0, False])
    assert hpcdl.allreduce(mine.copy(), comm).tolist() == [True, True, False]
    assert hpcdl.allreduce(mine.copy(), comm, op="prod").tolist() == [True, comm.size == 1, False]
    assert hpcdl.allreduce(mine.copy(), comm, op="max").tolist() == [True, True, False]
    assert hpcdl.allreduce(mine.copy(), comm, op="min").tolist() == [True, comm.size == 1, False]
    assert hpcdl.allreduce(np.array([200], np.uint8), comm)[0] == 200 * comm.size % 256
    x = torch.arange(2) + 1 + 2 * comm.rank
    assert hpcdl.allreduce(x, comm).tolist() == total(lambda rank: np.arange(2) + 1 + 2 * rank, comm.size).tolist()
    with pytest.raises(TypeError, match="mean of int64"):
        hpcdl.allreduce(torch.tensor([-3]), comm, op="mean")


@pytest.mark.ranks(1, 2)
def test_small_integers_of_many_shapes_arrive(comm: MPI.Intracomm) -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool):
        for shape in ((2, 4), (1,), (3, 5, 7)):
            x = torch.ones(shape, dtype=dtype)
            hpcdl.allreduce(x, comm)
            assert x.to(torch.int64).sum() == x.numel() * (1 if dtype == torch.bool else comm.size)


@pytest.mark.ranks(1, 2)
def test_the_buffers_of_a_batch_norm_can_be_averaged(comm: MPI.Intracomm) -> None:
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.randn(4, 3) + comm.rank)
    for buffer in norm.buffers():
        hpcdl.broadcast(buffer, comm)
        if buffer.is_floating_point():
            before = buffer.clone()
            hpcdl.allreduce(buffer, comm, op="mean")
            assert torch.allclose(buffer, before)
    assert norm.num_batches_tracked.shape == ()
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_nan_reaches_every_rank(comm: MPI.Intracomm, algorithm: str) -> None:
    ops = ("sum", "mean", "prod") if algorithm == "native" else ("sum", "mean", "min", "max", "prod")
    for op in ops:
        for dtype in ("float32", "float64"):
            x = np.arange(5, dtype=dtype)
            if comm.rank == comm.size - 1:
                x[3] = np.nan
            hpcdl.allreduce(x, comm, op=op, algorithm=algorithm)
            assert np.isnan(x).tolist() == [False, False, False, True, False]


REFUSED: dict[str, Callable[[], Any]] = {
    "object": lambda: np.array([None, 1]),
    "<U4|str": lambda: np.array(["a", "bcde"]),
    "void": lambda: np.zeros(3, [("a", "f4")]),
    "datetime64": lambda: np.zeros(3, "datetime64[s]"),
    "longdouble|float128|float96": lambda: np.zeros(3, np.longdouble),
    "complex256|clongdouble|complex192": lambda: np.zeros(3, np.clongdouble),
    ">f8 has the other byte order": lambda: np.arange(4, dtype=">f8"),
    ">c16": lambda: np.zeros(4, ">c16"),
    "masked": lambda: np.ma.array([1.0, 2], mask=[0, 1]),
    "a list": lambda: [1.0, 2.0],
    "a float": lambda: 3.0,
    "read-only": lambda: np.float32(3),
    "a str": lambda: "hello",
    "NoneType": lambda: None,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
    "float8": lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_everywhere(comm: MPI.Intracomm, what: str) -> None:
    # By all ranks, by one alone, and the communicator can be used afterwards.
    with pytest.raises(TypeError, match=what):
        hpcdl.allreduce(REFUSED[what](), comm)
    good = np.ones(3)
    with pytest.raises(hpcdl.UnsupportedArrayError, match=what):
        hpcdl.allreduce(REFUSED[what]() if comm.rank == comm.size - 1 else good, comm)
    assert (good == 1).all()
    assert hpcdl.allreduce(good, comm)[0] == comm.size


@pytest.mark.ranks(1, 2)
def test_native_byte_order_by_name_is_no_other_order(comm: MPI.Intracomm) -> None:
    for name in ("=f8", "<f8" if np.little_endian else ">f8"):
        assert hpcdl.allreduce(np.ones(2, name), comm)[0] == comm.size


@pytest.mark.ranks(1, 2, 3)
def test_complex_numbers_have_no_order(comm: MPI.Intracomm) -> None:
    for op in ("min", "max"):
        with pytest.raises(TypeError, match=f"no {op} of complex64"):
            hpcdl.allreduce(np.ones(2, np.complex64), comm, op=op)


@pytest.mark.ranks(1, 2)
def test_a_bad_argument_says_what_would_be_right(comm: MPI.Intracomm) -> None:
    x = np.ones(4)
    for options, message in (
        ({"op": "summe"}, "op is one of sum, mean, min, max, prod, band, bor, bxor, not 'summe'"),
        ({"op": MPI.LAND}, "op is one of MPI.SUM"),
        ({"algorithm": "rnig"}, "no algorithm is called 'rnig'; there are ring"),
        ({"out": np.ones(5)}, r"out has the shape \(5,\), x \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hpcdl.allreduce(x, comm, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out is of type float32 and x of type float64"):
        hpcdl.allreduce(x, comm, out=np.ones(4, np.float32))
    with pytest.raises(ValueError, match="root 7"):
        hpcdl.broadcast(x, comm, root=7)
    for name in ("native", "shared"):
        with pytest.raises(ValueError, match=f"{name} serves allreduce only; for broadcast take one of ring"):
            hpcdl.broadcast(x, comm, algorithm=name)
    with pytest.raises(ValueError, match="this rank's share of x has"):
        hpcdl.reduce_scatter(x, comm, out=np.ones(9))
    with pytest.raises(TypeError, match="MPI has no float16"):
        hpcdl.allreduce(np.ones(4, np.float16), comm, algorithm="native")


@pytest.mark.ranks(3, 5, 7)
def test_halving_names_the_alternatives(comm: MPI.Intracomm) -> None:
    with pytest.raises(ValueError, match=r"halving needs 2.*folded and binary_blocks take any number"):
        hpcdl.allreduce(np.ones(4), comm, algorithm="halving")


# ---- bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, 4, 5, 7, 8)
def test_the_bits_are_the_same_on_all_ranks(comm: MPI.Intracomm) -> None:
    for name in collectives.names(comm.size):
        for dtype in (np.float32, np.float64, np.complex64, np.float16):
            values = np.array([1e8, 1, -1e8, 1, 0.1, -0.0, 3, 1e-7]).astype(dtype)
            x = np.resize(np.roll(values, comm.rank), 1003)
            for op in ("sum", "prod", "mean"):
                with np.errstate(all="ignore"):
                    y = hpcdl.allreduce(x.copy(), comm, op=op, algorithm=name)
                    again = hpcdl.allreduce(x.copy(), comm, op=op, algorithm=name)
                assert len(set(comm.allgather(y.tobytes()))) == 1, f"{name} {op} of {np.dtype(dtype)}"
                assert y.tobytes() == again.tobytes()
        zeros = np.resize(np.array([0.0, -0.0]), 101) * (-1) ** comm.rank
        for op in ("min", "max"):
            y = hpcdl.allreduce(zeros.copy(), comm, op=op, algorithm=name)
            assert len(set(comm.allgather(y.tobytes()))) == 1


@pytest.mark.ranks(2, 3, 5, 8)
def test_a_sum_of_any_numbers_is_as_near_as_its_rounding_allows(comm: MPI.Intracomm) -> None:
    every = np.random.default_rng(1).standard_normal((comm.size, 4001))
    for name in collectives.names(comm.size):
        for dtype in (np.float32, np.float64):
            mine = every.astype(dtype)
            exact, scale = mine.astype(np.longdouble).sum(0), np.abs(mine).astype(np.longdouble).sum(0)
            y = hpcdl.allreduce(mine[comm.rank].copy(), comm, algorithm=name)
            # Whatever the bracketing: p - 1 roundings, each of at most half a unit of a partial sum.
            assert (np.abs(y - exact) <= (comm.size - 1) * np.finfo(dtype).eps / 2 * 1.01 * scale).all()


# ---- long messages -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
def test_messages_longer_than_the_limit_are_cut(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdl.execute.MESSAGE_BYTES", 1024)
    for name in collectives.names(comm.size):
        # At the limit, one element over it, and far above.
        for n in (1024 // 8 * comm.size, 1024 // 8 * comm.size + 1, 5003):
            for dtype in ("float64", "float16", "int8"):
                x = (np.arange(n) % 3 + comm.rank).astype(dtype)
                hpcdl.allreduce(x, comm, algorithm=name)
                assert (x == total(lambda rank, n=n: np.arange(n) % 3 + rank, comm.size).astype(dtype)).all()
