"""torch's own distributed tests on the backend hpcdl, beside gloo: python tests/torch_distributed/suite.py --ranks 3 4

Every test that passes on gloo must pass here, but for those in LEFT_OUT. Tests that go by the backend's name, and skip
or do nothing for one that they do not know, are run once more and told that this is gloo. A test that hangs ends its
start; the next start goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.launch import Job

RANK = Path(__file__).with_name("rank.py")
START_LIMIT_S = 1500
GLOOS_OWN = "torch.distributed.monitored_barrier takes no group but gloo's: here it is hpcdl.torch.monitored_barrier"
LEFT_OUT: dict[str, str] = {
    "test_monitored_barrier_failure_order": GLOOS_OWN,
    "test_monitored_barrier_gloo": GLOOS_OWN,
    "test_monitored_barrier_gloo_rank_0_timeout": GLOOS_OWN,
    "test_monitored_barrier_gloo_subgroup": GLOOS_OWN,
    "test_monitored_barrier_wait_all_ranks": GLOOS_OWN,
}
"""Tests that pass on gloo and not here, each with the reason."""

Found: TypeAlias = dict[str, tuple[str, str]]


def results(backend: str, ranks: int, tests: str, named: str = "") -> Found:
    """What becomes of every test: pass, skip, fail or hang, and why."""
    found: Found = {}
    with tempfile.TemporaryDirectory(prefix="torch-distributed-") as name:
        folder = Path(name)
        file = folder / "results"
        file.touch()
        first = 0
        while True:
            env = {
                "TESTS": tests,
                "NAMED": named or backend,
                "OMP_NUM_THREADS": "1",
                "HPCDL_TUNING": "0",
            }
            output = folder / "output"
            words = str(RANK), backend, name, str(first)
            with open(output, "wb") as out, Job(ranks, *words, env=env, stdout=out, stderr=out) as job:
                try:
                    status = job.process.wait(START_LIMIT_S)
                except subprocess.TimeoutExpired:
                    status = -1
            began = None
            for line in file.read_text().splitlines():
                event = json.loads(line)
                if "began" in event:
                    began = event
                else:
                    found[event["ended"]], began = (event["outcome"], event["why"]), None
            if began is None and status == 0:
                return found
            text = output.read_text(errors="replace")[-6000:]
            if began is None or began["number"] < first:
                raise RuntimeError(f"the ranks ended with status {status} before a test began:\n{text}")
            found[began["began"]] = ("hang", f"status {status}\n{text}")
            first = began["number"] + 1


def compare(ranks: int, tests: str, *, verbose: bool) -> bool:
    """Run both backends, and say what is not as it should be; is all well?"""
    began = time.monotonic()
    gloo = results("gloo", ranks, tests)
    ours = results("hpcdl", ranks, tests)
    wanted = {name for name, (outcome, _) in gloo.items() if outcome == "pass"}
    by_name = sorted(name for name in wanted - {*LEFT_OUT} if ours[name][0] != "pass")
    again = results("hpcdl", ranks, " ".join(by_name), named="gloo") if by_name else {}
    failed = {name: ours[name] if found[0] == "skip" else found for name, found in again.items() if found[0] != "pass"}
    print(f"{ranks} ranks, {time.monotonic() - began:.0f} s: gloo {_counts(gloo)}; hpcdl {_counts(ours)}")
    print(f"  of {len(wanted)} that pass on gloo {len(wanted) - len(failed) - len(wanted & {*LEFT_OUT})} pass here")
    for name in sorted(wanted & {*LEFT_OUT}):
        print(f"  left out: {name}: {LEFT_OUT[name]}" + ("; it passes" if ours[name][0] == "pass" else ""))
    if verbose:
        for name in by_name:
            print(f"  goes by the backend's name: {name}")
        for name, (outcome, why) in ours.items():
            if outcome != "pass" and name not in wanted:
                last = why.strip().splitlines()[-1] if why else ""
                print(f"  {outcome} here, on gloo {gloo[name][0]}: {name}: {last}")
    for name in sorted({name for name, (outcome, _) in ours.items() if outcome == "pass"} - wanted):
        print(f"  passes here, on gloo {gloo[name][0]}: {name}")
    for name, (outcome, why) in failed.items():
        print(f"  {outcome.upper()}: {name}\n{why}")
    return not failed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--tests", default="", help="names, instead of all")
    parser.add_argument("--verbose", action="store_true", help="show what does not pass on gloo either")
    options = parser.parse_args()
    verdicts = [compare(ranks, options.tests, verbose=options.verbose) for ranks in options.ranks]
    return 0 if all(verdicts) else 1


def _counts(found: Found) -> str:
    outcomes = [outcome for outcome, _ in found.values()]
    return ", ".join(f"{outcomes.count(each)} {each}" for each in ("pass", "fail", "hang", "skip"))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
