"""A training loses ranks and goes on: each sample counts once an epoch, and the rate follows the batch."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.launch import run_ranks
from harness.ulfm import IS_OURS, PYTHON, needs_ulfm
from hypothesis import given
from hypothesis import strategies as st
from idx import write_images

from hpcdl.cli.main import UsageError, parse
from hpcdl.cli.train_options import choose
from hpcdl.data import shares
from hpcdl.survive import Fault
from hpcdl.survive.deck import Deck

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
has_torch = find_spec("torch") if IS_OURS else [*PYTHON.parents[1].glob("lib/python*/site-packages/torch")]
ULFM = ("--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1")


def loses(test: Any) -> Any:
    """A test that loses ranks in a training: Open MPI starts it."""
    return pytest.mark.usefixtures("open_mpi")(
        needs_ulfm(pytest.mark.skipif(not has_torch, reason="torch is not installed beside Open MPI")(test))
    )


# ---- who is dealt what -----------------------------------------------------------------------------------------------


def test_without_losses_the_samples_are_dealt_as_ever() -> None:
    deck, members = Deck.shuffled(23, 4, seed=7), (0, 1, 2)
    for step in range(3):
        dealt = deck.deal(members, 3)
        for rank in members:
            mine, total = [*shares(23, 4, seed=7, batch=9, rank=rank, size=3)][step]
            assert dealt[rank].tolist() == mine.tolist()
        assert deck.settle(dealt, members) == total
    assert not len(deck.left)


@given(
    n=st.integers(0, 60),
    each=st.integers(1, 5),
    first=st.integers(1, 8),
    fates=st.lists(st.tuples(st.sampled_from(["kill", "miss", "drop", "join"]), st.integers(0, 7)), max_size=12),
)
def test_every_sample_counts_once_whoever_is_lost_or_joins(
    n: int, each: int, first: int, fates: list[tuple[str, int]]
) -> None:
    """A rank is killed with or without its samples in the sum, or none of the sum can be had, or a rank joins."""
    deck, members, seen = Deck.shuffled(n, 0, seed=1), [*range(first)], Counter[int]()
    ever = first
    while len(deck.left):
        fate, who = fates.pop(0) if fates else ("", 0)
        dealt = deck.deal(members, each)
        assert [*dealt] == members and all(len(numbers) <= each for numbers in dealt.values())
        victim = members[who % len(members)]
        counted = [] if fate == "drop" else [rank for rank in members if fate != "miss" or rank != victim]
        numbers = [number for rank in counted for number in dealt[rank].tolist()]
        seen.update(numbers)
        assert deck.settle(dealt, counted) == len(numbers)
        if fate in ("kill", "miss") and len(members) > 1:
            members.remove(victim)
        elif fate == "join":
            members.append(ever)
            ever += 1
    assert seen == Counter(range(n))


def test_what_is_taken_back_is_dealt_next() -> None:
    deck = Deck(np.arange(8))
    dealt = deck.deal((0, 1, 2), 2)
    assert deck.settle(dealt, {0, 2}) == 4
    assert {rank: numbers.tolist() for rank, numbers in deck.deal((0, 2), 2).items()} == {0: [2, 3], 2: [6, 7]}


# ---- a training, told step by step -----------------------------------------------------------------------------------

# The input of sample i is 1 in place i alone, and the weights are put back to 0 behind every step. So the gradient of
# the first class is -1/2 in place i for each time that sample i is in the sum, exactly.
PROGRAM = """
import json, sys
import numpy as np, torch
from hpcdl.survive import Fault, Survivors, leave
from hpcdl.survive.training import Training
from hpcdl.torch.recipe import Schedule, optimizer, scheduler
from hpcdl.torch.tasks import Task

wanted = json.loads(sys.argv[1])
n = wanted["samples"]
told, sums, ranks = [], [], []

class Spy(Survivors):
    def allreduce(self, x, op="sum", *, out=None):
        result = super().allreduce(x, op, out=out)
        if len(x) > 2 * n:
            sums.append((-2 * result[:n]).to(int).tolist())
            ranks.append(int(result[2 * n + 1 :].sum()))
        return result

def samples(numbers):
    return torch.nn.functional.one_hot(torch.from_numpy(numbers), n).float(), torch.zeros(len(numbers), dtype=int)

survivors = Spy(policy=wanted["policy"], faults=[Fault(*fault) for fault in wanted["faults"]] or [Fault(99, 0)])
model = torch.nn.Linear(n, 2, bias=False)
model.weight.data.zero_()
task = Task("ones", "", "ones", (1, n), n, 7, 1, samples, samples)
training = Training(
    task, model, optimizer("sgd", model, lr=8.0, momentum=0.0), survivors, batch_size=2,
    on_change=lambda change: told.append({"change": str(change)}),
)
training.scheduler = scheduler(
    Schedule(wanted.get("schedule", "constant")), training.optimizer, epochs=3, updates=training.updates,
    growth=training.growth,
)

rates = []
step = training.optimizer.step
training.optimizer.step = lambda: (rates.append(training.lr), step())

def on_step(counted):
    told.append({"samples": counted, "ranks": ranks[-1], "seen": training.seen, "rate": rates[-1], "sum": sums[-1],
                 "messages": survivors.messages, "plain": training.lr})
    model.weight.data.zero_()

for epoch in training.train(3, on_step):
    told.append({"epoch": epoch.number, "accuracy": epoch.accuracy, "sums": sums[:], "loss": epoch.loss})
    sums.clear()
spread = training.spread()
if survivors.rank == survivors.members[0]:
    print(json.dumps({"told": told, "members": survivors.members, "spread": spread}), flush=True)
survivors.close()
leave(0)
"""


def watched(ranks: int, policy: str, faults: Sequence[Sequence[Any]] = (), samples: int = 60, **more: Any) -> Any:
    """What the lowest of those who are left tells."""
    wanted = {"policy": policy, "faults": faults, "samples": samples, **more}
    done = run_ranks(ranks, "-c", PROGRAM, json.dumps(wanted), options=ULFM, timeout_s=120)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def steps(told: Any) -> list[Any]:
    return [line for line in told["told"] if "samples" in line]


def assert_each_counts_once(told: Any) -> None:
    """By the gradients themselves, not by what the training believes."""
    epochs = [line for line in told["told"] if "epoch" in line]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    for epoch in epochs:
        assert [sum(each) for each in zip(*epoch["sums"], strict=True)] == [1] * len(epoch["sums"][0])
        assert epoch["accuracy"] == 1 and epoch["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert all(sum(step["sum"]) == step["samples"] for step in steps(told) if step["samples"])
    assert told["spread"] == 0


@loses
@pytest.mark.parametrize("policy", ["exact", "survivors"])
def test_each_sample_counts_once_and_the_rate_follows_the_ranks_and_the_samples(policy: str) -> None:
    """Rank 4 is lost before its samples can be in a sum, rank 0 in a step, and rank 2 in an evaluation."""
    faults = [(4, 24), (0, 44), (2, 90)]
    told = watched(5, policy, faults, schedule="cosine")
    assert told["members"] == [1, 3]
    changes = [line["change"] for line in told["told"] if "change" in line]
    assert [re.search(r"rank (\d) was lost in (\w+)", change)[1] for change in changes] == ["4", "0", "2"]  # type: ignore[index]
    assert "2 ranks go on, batch 4, rate " in changes[-1]
    assert_each_counts_once(told)

    # 60 samples in batches of 10 are 18 updates. A step has the rate of the update that an undisturbed training would
    # have come to with these samples, times the share of the ranks whose samples are in it.
    seen, epoch = 0, 0
    for step in steps(told):
        if step["samples"]:
            update = 6 * epoch + seen // 10
            assert step["rate"] == pytest.approx(4 * (1 + np.cos(np.pi * update / 18)) * step["ranks"] / 5), step
            seen = step["seen"]
            epoch, seen = (epoch + 1, 0) if seen == 60 else (epoch, seen)
    assert steps(told)[-1]["plain"] == 0 and steps(told)[-1]["ranks"] == 2


@loses
def test_exact_finishes_the_step_of_a_loss_as_if_all_were_there() -> None:
    calm, hit = watched(3, "exact"), watched(3, "exact", [(1, 61)])
    (change,) = [line["change"] for line in hit["told"] if "change" in line]
    found = re.fullmatch(
        r"rank 1 was lost in step (\d+) \(rank (0|2) spoke for it\); 2 ranks go on, batch 4, .*", change
    )
    assert found, change
    until = int(found[1])
    assert [step["sum"] for step in steps(hit)[:until]] == [step["sum"] for step in steps(calm)[:until]]
    assert [step["samples"] for step in steps(hit)[until - 1 : until + 1]] == [6, 4]
    assert_each_counts_once(hit)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_images(tmp_path_factory.mktemp("data")))


def hpcdl_train(n: int, *arguments: str, options: Sequence[str] = ULFM) -> subprocess.CompletedProcess[str]:
    return run_ranks(n, "-m", "hpcdl", "train", *arguments, options=options, timeout_s=120)


def lines(folder: Path, kind: str) -> list[Any]:
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


@loses
def test_where_rank_0_is_lost_another_one_prints_logs_and_saves(data: str, tmp_path: Path) -> None:
    words = ["--survive", "survivors", "--data", data, "--epochs", "3", "--batch-size", "16", "--lr", "1e-9"]
    words += ["--fault", "0:100", "--log-dir", str(tmp_path / "log"), "--checkpoint", str(tmp_path / "saved")]
    done = hpcdl_train(3, *words, "--status", str(tmp_path / "new" / "status"), "--target-accuracy", "0.9")
    assert done.returncode == 1, done.stderr
    assert re.search(r"^hpcdl: test accuracy \S+% is below the target of 90.00%$", done.stderr, re.MULTILINE)
    header, *printed = done.stdout.splitlines()
    assert "ranks 3, threads 1, all-reduce binary_blocks among the survivors (survivors), model mlp" in header
    assert "batch 3 x 16, sgd, lr 1e-09, momentum 0.9, seed 0, Open MPI" in header
    assert [line[:9] for line in printed[:3]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    rows = [line.split()[:3] for line in printed[4:7]]
    assert rows == [["1", "48", "1e-09"], ["2", "32", "6.67e-10"], ["3", "32", "6.67e-10"]]
    assert re.fullmatch(r"[\d.]+ s, \d+ steps, lost ranks 1, left 2; largest difference .* ranks: 0", printed[7])
    (loss,) = [line for line in done.stderr.splitlines() if "was lost in step" in line]
    assert re.fullmatch(
        r"\[rank 1 on \S+\] hpcdl: warning: rank 0 was lost in step \d+; 16 samples are dealt again; "
        r"2 ranks go on, batch 32, rate 6.66667e-10",
        loss,
    )
    assert (tmp_path / "new" / "status").read_text() == "1\n"
    assert [line["samples"] for line in lines(tmp_path / "log", "epoch")] == [400] * 3
    (logged,) = lines(tmp_path / "log", "loss")
    assert [each[0] for each in logged["lost"]] == [0] and (logged["ranks"], logged["again"]) == (2, 16)
    first, second = lines(tmp_path / "log", "start")
    assert (first["settings"]["ranks"], second["settings"]["ranks"]) == (3, 2) and second["step"] == logged["step"]
    assert first["settings"]["fault"][0]["message"] == 100
    newest = max((tmp_path / "saved").iterdir())
    assert json.loads((newest / "manifest.json").read_text())["step"] == lines(tmp_path / "log", "epoch")[-1]["step"]


@loses
def test_without_a_quorum_it_ends_with_status_1_and_can_be_resumed_by_fewer(data: str, tmp_path: Path) -> None:
    words = ["--survive", "survivors", "--data", data, "--epochs", "4", "--checkpoint", str(tmp_path / "saved")]
    words += ["--resume", "--base-batch", "128", "--log-dir", str(tmp_path), "--status", str(tmp_path / "status")]
    broken = hpcdl_train(4, *words, "--fault", "0:90", "--fault", "1:90", "--checkpoint-every", "3")
    assert broken.returncode == 1, broken.stdout + broken.stderr
    told = re.findall(r"^\[rank \d on \S+\] hpcdl: (.*)$", broken.stderr, re.MULTILINE)
    ends = [line for line in told if line.startswith("no quorum: of the last members, ranks 0, 1, 2, 3, no more than ")]
    assert len(ends) == 2 and all(line.endswith(f"; go on from {tmp_path}/saved by --resume") for line in ends), told
    assert not (tmp_path / "status").exists()

    done = hpcdl_train(2, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "status").read_text() == "0\n"
    assert re.search(rf"hpcdl: note: going on from {tmp_path}/saved/checkpoint-\d+, step \d+", done.stderr)
    assert "ranks 2, " in done.stdout and "lr 0.05, " in done.stdout  # for the batch of the 4 ranks at the beginning
    first, *_, last = lines(tmp_path, "epoch")
    assert (first["batch"], first["lr"], last["batch"], last["lr"]) == (128, 0.05, 64, 0.025)
    assert [line["samples"] for line in lines(tmp_path, "epoch")][-3:] == [400] * 3

    other = hpcdl_train(2, *words, "--seed", "1")
    assert other.returncode == 2
    assert re.search(r"hpcdl: --resume: \S+ is of a training with seed 0, this one has 1$", other.stderr, re.MULTILINE)


RAISES = """
import sys
from mpi4py import MPI
from hpcdl.cli.main import main
from hpcdl.survive.training import Training

def step(self, deck, step=Training._step):
    if self.steps == 4 and self.survivors.rank == 1:
        raise KeyError("fed up")
    return step(self, deck)

Training._step = step
sys.exit(main())
"""


@loses
def test_a_rank_that_raises_ends_alone_with_its_traceback(data: str) -> None:
    words = ["train", "--survive", "survivors", "--data", data, "--epochs", "1", "--batch-size", "16"]
    done = run_ranks(3, "-c", RAISES, *words, options=ULFM, timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("KeyError: 'fed up'") == 1
    assert re.search(r"rank 1 was lost in step 5; 16 samples are dealt again; 2 ranks go on, batch 32,", done.stderr)
    assert re.search(r", lost ranks 1, left 2; largest difference .* ranks: 0$", done.stdout.rstrip())


@loses
def test_a_lost_rank_is_replaced_and_the_new_one_by_another(data: str, tmp_path: Path) -> None:
    words = ["--survive", "exact", "--data", data, "--epochs", "4", "--batch-size", "16", "--replace"]
    words += ["--schedule", "onecycle", "--log-dir", str(tmp_path)]
    done = hpcdl_train(3, *words, "--fault", "1:60", "--fault", "3:80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stderr.splitlines() if " ranks go on, batch " in line]) == 4
    first, second = [line for line in lines(tmp_path, "loss") if line["joined"]]
    assert first["joined"] == [3] and (first["ranks"], first["batch"]) == (3, 48)
    assert second["joined"] > [3] and (second["ranks"], second["batch"]) == (3, 48)
    assert [line["samples"] for line in lines(tmp_path, "epoch")] == [400] * 4
    assert [line["batch"] for line in lines(tmp_path, "epoch")] == [48] * 4
    assert re.search(r", lost ranks 2, left 3; largest difference .* ranks: 0$", done.stdout.rstrip())


@loses
def test_a_rank_that_cannot_begin_is_not_replaced_for_ever(data: str) -> None:
    words = ["--survive", "survivors", "--data", data, "--epochs", "2", "--batch-size", "16", "--replace"]
    done = hpcdl_train(3, *words, "--fault", "1:60", "--fault", "3:0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hpcdl: warning: lost ranks are not replaced any more: rank 3 ended before a first step\n" in done.stderr
    assert "joined" not in done.stderr
    assert re.search(r", lost ranks 2, left 2; largest difference .* ranks: 0$", done.stdout.rstrip())


@needs_torch
def test_what_it_cannot_go_together_with_is_refused_by_all_with_status_2(data: str) -> None:
    done = hpcdl_train(2, "--survive", "exact", "--data", data, options=())
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "--survive" in line]
    assert line.startswith("hpcdl: --survive exact: ") and "mpiexec --with-ft ulfm" in line


@loses
def test_an_algorithm_for_some_numbers_of_ranks_is_refused_by_all(data: str) -> None:
    done = hpcdl_train(2, "--survive", "exact", "--data", data, "--algorithm", "halving")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "halving" in line]
    assert line.startswith("hpcdl: --algorithm halving: any number of ranks may be left, which halving must serve")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--replace", "--replace is for --survive POLICY"),
        ("--fault 1:2", "--fault is for --survive POLICY"),
        ("--status s", "--status is for --survive POLICY"),
        (
            "--survive exact --compress topk",
            "--survive adds up whole gradients in float32, in one go: leave out --comp",
        ),
        ("--survive exact --wire-dtype float16", "--survive adds up whole gradients in float32, in one go: leave out"),
        ("--survive exact --schedule step --grow-batch 99", "--survive has batches that follow the ranks: leave out"),
        ("--survive exact --bucket-cap-mb 3", "--survive adds up whole gradients in float32, in one go: leave out"),
        ("--survive exact --overlap on", "--survive adds up gradients behind backward: leave out --overlap on"),
        ("--survive exact --precision fp16", "--survive has no loss scaling, which fp16 needs: take --precision bf16"),
    ],
)
def test_what_contradicts_it_is_refused(arguments: str, line: str) -> None:
    assert (choose(parse(["train", *arguments.split()])) or "").startswith(line)


def test_bf16_is_computed_in_but_not_sent() -> None:
    chosen = parse(["train", "--survive", "exact", "--precision", "bf16"])
    assert choose(chosen) is None
    assert (chosen.algorithm, chosen.wire_dtype) == ("binary_blocks", None)


def test_faults_are_said_in_words() -> None:
    chosen = parse(["train", "--fault", "3:120", "--fault", "0:1:after:delay:2.5"])
    assert chosen.fault == [Fault(3, 120), Fault(0, 1, "after", "delay", 2.5)]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("3", "3 is not RANK:MESSAGE[:WHEN[:KIND[:SECONDS]]], as is 3:120:before:kill"),
        ("a:1", "a:1: a and 1 are no whole numbers"),
        ("1:2:during", "1:2:during: when is one of before, after, completion, not 'during'"),
        ("1:2:after:delay", "1:2:after:delay: a delay lasts more than 0 seconds"),
        ("1:2:after:delay:x", "1:2:after:delay:x: x is no number of seconds"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"argument --fault: {re.escape(why)}"):
        parse(["train", "--fault", fault])
