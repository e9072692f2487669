"""To look through rows finds what looking at each element finds."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.compress.sparse import ROW, _above, _in_rows, select  # noqa: E402


@pytest.mark.parametrize("n", [1, ROW - 1, ROW, ROW + 1, 5 * ROW, 5 * ROW + 3])
@pytest.mark.parametrize("threshold", [0.0, 0.5, 2.0, 100.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_rows_hide_nothing(n: int, threshold: float, sign: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * sign
    x[::3] = 0
    assert sorted(_in_rows(x)(threshold).tolist()) == _above(x, threshold).tolist()


def test_rows_may_lie_apart_in_memory() -> None:
    x = torch.arange(-400.0, 400.0)[::2]
    assert (
        sorted(_in_rows(x)(390.0).tolist()) == _above(x, 390.0).tolist() == [0, 1, 2, 3, 4, 5, 395, 396, 397, 398, 399]
    )


@pytest.mark.parametrize("n", [1 << 16, (1 << 16) + 17])
@pytest.mark.parametrize("share", [0.0005, 0.007, 0.009, 0.2])
def test_what_is_selected_is_larger_than_the_rest(n: int, share: float) -> None:
    x, k = torch.randn(n, generator=torch.Generator().manual_seed(1)), round(share * n)
    chosen = select(x, k)
    left = torch.ones(n, dtype=torch.bool).index_fill(0, chosen, False)
    assert 0.8 * k <= len(set(chosen.tolist())) == len(chosen) <= k
    assert x[chosen].abs().min() >= x[left].abs().max()
