"""The transformer tells what comes next from what came before, and from nothing else."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.models import transformer  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several only wait for each other, on so little work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_has_the_parameters_that_its_description_tells() -> None:
    model = transformer(63, 64)
    assert sum(parameter.numel() for parameter in model.parameters()) == 112_319
    assert "112,319" in (transformer.__doc__ or "")


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_there_is_a_score_for_each_character_of_the_vocabulary_at_each_place(batch: int, length: int) -> None:
    scores = transformer(11, 16, width=8, heads=2)(torch.zeros(batch, length, dtype=torch.int64))
    assert scores.shape == (batch, length, 11)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_character_changes_the_scores_from_its_own_place_on_and_none_before(place: int) -> None:
    torch.manual_seed(0)
    model = transformer(5, 8, width=16, heads=4).double()
    text = torch.randint(5, (2, 8))
    other = text.clone()
    other[:, place] = (other[:, place] + 1) % 5
    changed = (model(text) - model(other)).abs().amax(dim=(0, 2))
    assert changed[:place].max().item() == 0 if place else True
    assert changed[place:].min().item() > 1e-6


def test_the_order_of_what_came_before_matters() -> None:
    torch.manual_seed(0)
    model = transformer(5, 8).double()
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert (one[0, -1] - other[0, -1]).abs().max().item() > 1e-6


def test_it_learns_what_only_attention_can_tell() -> None:
    # Each half is the other again: the second can be known from the first, four places back.
    torch.manual_seed(0)
    model = transformer(4, 7, width=32)
    step_size = 3e-2
    velocity = [torch.zeros_like(parameter) for parameter in model.parameters()]
    losses = []
    for _ in range(200):
        half = torch.randint(4, (32, 4))
        text = torch.cat([half, half], dim=1)
        scores = model(text[:, :-1])[:, 3:]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 4:].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():  # by hand: torch.optim takes seconds to import
            for parameter, moving, gradient in zip(model.parameters(), velocity, gradients, strict=True):
                parameter -= step_size * moving.mul_(0.9).add_(gradient)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1.39, abs=0.4)  # ln 4: it knows nothing
    assert losses[-1] < 0.3


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="64 is no multiple of 5"):
        transformer(63, 64, heads=5)
    with pytest.raises(ValueError, match="9 characters are longer than the block of 8"):
        transformer(5, 8)(torch.zeros(1, 9, dtype=torch.int64))


def test_importing_them_starts_no_mpi() -> None:
    code = "import sys, hpcdl.torch.checkpoint, hpcdl.torch.models, hpcdl.text; print('mpi4py.MPI' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr
