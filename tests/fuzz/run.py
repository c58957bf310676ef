"""Runs hostile input by the thousand: `python -m tests.fuzz.run --count 10000 --commands 300`.

`--class templates --seed 1234 --count 1` runs one case again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.case import HOME, TEMPORARY
from tests.fuzz.server import WORK, load_class

_SHOWN_FAULTS = 20
_ROOT = Path(__file__).parents[2]
Part = tuple[str, int, int]


@dataclass
class Result:
    """The results of the cases of a class.

    Attributes:
        counts: How many were accepted, refused or faults.
        slowest: The most seconds that one took, and its seed.
        faults: What happened, by seed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, 0)
    faults: dict[int, str] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="cases of each parser class")
    parser.add_argument("--commands", type=int, default=0, help="cases of each class of commands")
    parser.add_argument("--class", dest="names", nargs="+", choices=class_names(), metavar="CLASS")
    parser.add_argument("--seed", type=int, default=1_000, help="seed of the first case")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once")
    arguments = parser.parse_args()
    failed = False
    for name in arguments.names or class_names():
        is_chosen = arguments.names is not None
        is_command = load_class(name).is_command and not is_chosen
        count = arguments.commands if is_command else arguments.count
        if count > 0:
            failed |= _run_class(name, arguments.seed, count, arguments.jobs)
    return int(failed)


def _run_class(name: str, first: int, count: int, jobs: int) -> bool:
    started = time.monotonic()
    jobs = min(count, jobs)
    starts = [first + count * job // jobs for job in range(jobs + 1)]
    total = Result()
    with ThreadPoolExecutor(jobs) as pool:
        parts = [[(name, starts[job], starts[job + 1] - starts[job])] for job in range(jobs)]
        for results in pool.map(serve, parts, [True] * jobs):
            total.counts.update(results[name].counts)
            total.slowest = max(total.slowest, results[name].slowest)
            total.faults |= results[name].faults
    seconds = time.monotonic() - started
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(total.counts.items()))
    print(
        f"{name}: seeds {first} to {first + count - 1} in {seconds:.0f} s: {counts}; the slowest, "
        f"{total.slowest[1]}, took {total.slowest[0]:.2f} s",
        flush=True,
    )
    return bool(total.faults)


def class_names() -> list[str]:
    """All classes whose packages are installed, by the files of the folder."""
    files = (Path(__file__).parent / "classes").glob("[a-z]*.py")
    names = sorted(file.stem for file in files)
    return [name for name in names if all(map(find_spec, load_class(name).packages))]


def serve(parts: Sequence[Part], show_faults: bool = False) -> dict[str, Result]:
    """Runs cases in one server, by class, first seed and number of cases.

    Raises:
        RuntimeError: The server failed by itself, not for a case.
    """
    results = {name: Result() for name, _, _ in parts}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.fuzz.server", folder]
        command += [":".join(map(str, part)) for part in parts]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=_environment(Path(folder).resolve() / WORK),
        ) as process:
            for line in process.stdout or ():
                entry = json.loads(line)
                result = results[entry["name"]]
                if "fault" in entry:
                    result.faults[entry["seed"]] = entry["fault"]
                    if show_faults and len(result.faults) <= _SHOWN_FAULTS:
                        print(
                            f"fault: {entry['name']} {entry['seed']}: {entry['fault']}", flush=True
                        )
                else:
                    result.counts = Counter(entry["counts"])
                    result.slowest = tuple(entry["slowest"])
    if process.returncode:
        raise RuntimeError(f"The server of {parts} ended with status {process.returncode}.")
    return results


def _environment(work: Path) -> dict[str, str]:
    """Home, caches and temporary files lie in the server's folder; libraries start no threads."""
    home = str(work / HOME)
    return os.environ | {
        "HOME": home,
        "XDG_CACHE_HOME": home,
        "HF_HOME": home,
        "TMPDIR": str(work / TEMPORARY),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLX_MMFREE_CACHE": "0",
        # what MLX compiles on a CPU goes through the C++ compiler
        "MLX_DISABLE_COMPILE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


if __name__ == "__main__":
    sys.exit(main())
