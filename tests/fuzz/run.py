"""Damages small checkpoints by the thousand: `python -m tests.fuzz.run --count 10000`.

Works in processes of their own, so that a crash is found and reported with the seed that caused it.
"""

import argparse
import collections
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH = 250
BATCH_SECONDS = 600
MAX_ADDRESS_BYTES = 16 * 2**30
MAX_RESIDENT_BYTES = 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="number of damaged checkpoints")
    parser.add_argument("--seed", type=int, default=1_000, help="seed of the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return run_batch(*arguments.worker)
    return run_all(arguments.seed, arguments.count, max(1, arguments.jobs))


def run_batch(first: int, stop: int) -> int:
    """Exercises the seeds one after the other; prints a line before and after each."""
    from tests.fuzz.exercise import exercise
    from tests.fuzz.mutations import make_sources

    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        sources = make_sources(Path(folder) / "sources")
        for seed in range(first, stop):
            print(f"start {seed}", flush=True)
            try:
                loaded, _ = exercise(sources, Path(folder) / "copy", seed)
            except AssertionError as error:
                failed = True
                print(f"fault {error!s}".replace("\n", " "), flush=True)
            else:
                print("loaded" if loaded else "refused", flush=True)
    # kilobytes on Linux, bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if resident > MAX_RESIDENT_BYTES:
        print(f"fault seeds {first} to {stop}: {resident / 1e6:.0f} MB of memory", flush=True)
    return int(failed)


def run_all(first: int, count: int, jobs: int) -> int:
    starts = list(range(first, first + count, BATCH))
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    for index in range(0, len(starts), jobs):
        running = [
            (start, _start(start, min(start + BATCH, first + count)))
            for start in starts[index : index + jobs]
        ]
        for start, process in running:
            _collect(start, process, counts, faults)
        print(
            f"{sum(counts.values())} of {count}: {dict(counts)}, faults {len(faults)}", flush=True
        )
    print("\n".join(faults))
    return int(bool(faults))


def _start(first: int, stop: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.fuzz.run", "--worker", str(first), str(stop)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _collect(
    start: int, process: subprocess.Popen[str], counts: collections.Counter[str], faults: list[str]
) -> None:
    try:
        output, _ = process.communicate(timeout=BATCH_SECONDS)
        ending = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        ending = f"was still running after {BATCH_SECONDS} s"
    lines = output.splitlines()
    counts.update(line for line in lines if line in ("loaded", "refused"))
    found = [line for line in lines if line.startswith("fault")]
    counts["fault"] += len(found)
    faults.extend(found)
    if process.returncode not in (0, 1) or (process.returncode and not found):
        seeds = [line for line in lines if line.startswith("start")]
        last = seeds[-1].removeprefix("start ") if seeds else str(start)
        tail = " | ".join(line for line in lines[-15:] if not line.startswith(("start", "refused")))
        faults.append(f"crash at seed {last}: the process {ending}: {tail}")


if __name__ == "__main__":
    sys.exit(main())
