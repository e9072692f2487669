"""One rank of torch's own distributed tests, without their spawning: mpiexec -n 3 python rank.py BACKEND FOLDER FIRST

The tests are run in one process a rank, one after the other from number FIRST. What becomes of each rank 0 writes to
FOLDER/results, a line of JSON for its beginning and one for its end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

from mpi4py import MPI

LIMIT_S = 40
LIMITS_S = {"test_ddp_uneven_inputs": 200}

world = MPI.COMM_WORLD
backend, folder, first = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
(folder / "barrier").mkdir(exist_ok=True)
(folder / "test_dir").mkdir(exist_ok=True)
os.environ |= {
    "BACKEND": os.environ.get("NAMED", backend),  # what the tests take it for
    "WORLD_SIZE": str(world.size),
    "TEMP_DIR": str(folder),
    "RANK": str(world.rank),
    "MASTER_ADDR": "127.0.0.1",
}
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402

import hpcdl.torch  # noqa: E402, F401

torch.set_num_threads(1)

# By these the tests ask whether a backend can do DDP and groups at all; of one that is not named they skip.
for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add("hpcdl")

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    CUSTOM_PG_TIMEOUT,
    Barrier,
    DistributedTest,
    TestDistBackend,
)

PASS, SKIP, FAIL = "pass", "skip", "fail"
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Suite(TestDistBackend, DistributedTest._DistTestBase):
    """All of them."""


def names() -> list[str]:
    """Every test, in alphabetical order."""
    return sorted(name for name in dir(Suite) if name.startswith("test_"))


def outcome(test: Any, name: str) -> tuple[str, str]:
    """What becomes of one test on this rank."""
    try:
        getattr(test, name)()
    except unittest.SkipTest as skipped:
        return SKIP, str(skipped)
    except SystemExit as end:
        if end.code in (None, 0):
            return PASS, ""
        return (SKIP, SKIPS[end.code]) if end.code in SKIPS else (FAIL, f"exit {end.code}")
    except Exception:
        return FAIL, traceback.format_exc()
    return PASS, ""


def run(name: str, number: int) -> tuple[str, str]:
    """One test on all ranks: it passes, or is skipped, if it does on all."""
    if world.rank == 0:
        for file in (folder / "barrier").iterdir():
            file.unlink()
    Barrier.barrier_id = 0
    test = Suite(name)
    test.rank, test.file_name = world.rank, str(folder / f"store-{number}")
    faulthandler.dump_traceback_later(LIMITS_S.get(name, LIMIT_S), exit=True)
    dist.init_process_group(
        backend=backend,
        init_method=test.init_method,
        world_size=world.size,
        rank=world.rank,
        timeout=timedelta(seconds=CUSTOM_PG_TIMEOUT.get(name, 30)),
    )
    world.Barrier()
    set_rng_seed()  # the same on all ranks, as their own start has it
    every = world.allgather(outcome(test, name))
    if dist.is_initialized():  # some tests end it themselves
        dist.destroy_process_group()
    world.Barrier()
    faulthandler.cancel_dump_traceback_later()
    worst = max(every, key=lambda each: (PASS, SKIP, FAIL).index(each[0]))
    told = "\n".join(f"rank {rank}: {why}" for rank, (what, why) in enumerate(every) if what == worst[0] == FAIL)
    return worst[0], told or worst[1]


def main() -> None:
    """Run what is to be run."""
    chosen = os.environ.get("TESTS", "").split() or names()
    with open(folder / "results", "a", buffering=1) as results:
        for number, name in enumerate(chosen[first:], first):
            if world.rank == 0:
                results.write(json.dumps({"began": name, "number": number}) + "\n")
            what, why = run(name, number)
            if world.rank == 0:
                results.write(json.dumps({"ended": name, "outcome": what, "why": why}) + "\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Tests leave hooks and threads behind.
    os._exit(0)
