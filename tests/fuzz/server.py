"""A process that imports the library once and runs cases in forked children with limits.

It starts no thread and computes nothing itself, since a fork keeps only the calling thread: sources
are made, and cases run, in children alone.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx_mmfree
from tests.fuzz.case import (
    SUSPECT,
    FuzzClass,
    Verdict,
    clear_temporary,
    prepare_work,
    run_case,
)

WORK = "work"
_OUTPUT = "output.txt"
# thread stacks and heaps are reserved long before they are used
_RESERVED_BYTES = 4 * 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="empty folder for sources and cases")
    parser.add_argument("parts", nargs="+", help="CLASS:FIRST_SEED:COUNT")
    arguments = parser.parse_args()
    work = arguments.folder.resolve() / WORK
    prepare_work(work)
    parts = [part.rsplit(":", 2) for part in arguments.parts]
    _import_library()
    classes = {name: load_class(name) for name, _, _ in parts}
    # children need not look at what was imported when they collect garbage
    gc.freeze()
    _check_threads()
    for name, first, count in parts:
        sources = arguments.folder.resolve() / name
        make_sources(classes[name], sources, work)
        counts: Counter[str] = Counter()
        slowest = (0.0, int(first))
        seeds = range(int(first), int(first) + int(count))
        for seed, verdict in run_seeds(classes[name], sources, work, seeds):
            counts[verdict.kind] += 1
            slowest = max(slowest, (verdict.seconds, seed))
            if verdict.kind == "fault":
                _tell(name=name, seed=seed, fault=verdict.text)
            if counts.total() % 100 == 0 or counts.total() == len(seeds):
                _tell(name=name, counts=counts, slowest=slowest)


def load_class(name: str) -> FuzzClass:
    """The class in a file of `tests.fuzz.classes`, or in another module by its full name."""
    module = name if "." in name else f"tests.fuzz.classes.{name}"
    fuzz: FuzzClass = importlib.import_module(module).CLASS
    return fuzz


def _import_library() -> None:
    """Imports every module, so that no child does, nor sees a file that changed meanwhile.

    Without torch, which takes more memory than the cases may; nothing that reads files uses it.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]
    for module in pkgutil.walk_packages(mlx_mmfree.__path__, "mlx_mmfree."):
        # pyarrow starts threads, and reads files in a process of its own
        if module.name.endswith(("__main__", ".parquet_server")):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            # what belongs to an extra stays out where that is not installed
            if str(error.name).startswith(mlx_mmfree.__name__):
                raise


def _check_threads() -> None:
    tasks = Path("/proc/self/task")
    if tasks.exists() and len(list(tasks.iterdir())) != 1:
        raise RuntimeError(
            "A library started threads when it was imported; a fork would lose them."
        )


def make_sources(fuzz: FuzzClass, sources: Path, work: Path) -> None:
    """Makes the sources in a process of its own.

    Raises:
        RuntimeError: It failed.
    """
    sources.mkdir()
    prepare_work(work)
    process = _fork(lambda: fuzz.make_sources(sources), work / _OUTPUT)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError(f"The sources cannot be made: {(work / _OUTPUT).read_text()}")


def run_seeds(
    fuzz: FuzzClass, sources: Path, work: Path, seeds: Sequence[int]
) -> Iterator[tuple[int, Verdict]]:
    """Runs cases in batches; one that fails is tried again alone."""
    left = list(seeds)
    while left:
        done = 0
        for seed, verdict in _run_batch(fuzz, sources, work, left[: fuzz.batch]):
            done += 1
            if verdict.kind in ("accepted", "refused"):
                yield seed, verdict
            else:
                yield seed, _confirmed(fuzz, sources, work, seed, verdict)
                # what a failure leaves running must not blame the cases after it
                break
        left = left[done:]


def _confirmed(fuzz: FuzzClass, sources: Path, work: Path, seed: int, first: Verdict) -> Verdict:
    """The verdict of a case alone; limits of time and memory count only so."""
    [(_, verdict)] = _run_batch(fuzz, sources, work, [seed])
    if verdict.kind == SUSPECT:
        return Verdict("fault", verdict.text)
    if verdict.kind == "fault" or first.kind == SUSPECT:
        return verdict
    return Verdict("fault", f"{first.text} (only after other cases)")


def _run_batch(
    fuzz: FuzzClass, sources: Path, work: Path, seeds: Sequence[int]
) -> Iterator[tuple[int, Verdict]]:
    """Runs cases in one child, up to the first failure."""
    clear_temporary(work)
    reader, writer = os.pipe()
    child = _fork(lambda: _run_child(fuzz, sources, work, seeds, writer), work / _OUTPUT)
    os.close(writer)
    lines = _lines(reader, fuzz.wall_seconds)
    status = None
    try:
        for seed in seeds:
            what, line = next(lines, b'""'), next(lines, None)
            if line is not None:
                yield seed, Verdict(*json.loads(line))
                continue
            is_late = not select.select([reader], [], [], 0)[0]
            os.killpg(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            death = _death(fuzz, status, is_late, work / _OUTPUT)
            yield seed, Verdict(death.kind, f"{json.loads(what)}: {death.text}")
            return
    finally:
        os.close(reader)
        if status is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _death(fuzz: FuzzClass, status: int, is_late: bool, output: Path) -> Verdict:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if is_late:
        return Verdict(SUSPECT, f"it was not done after {fuzz.wall_seconds:g} s")
    if number == signal.SIGXCPU:
        return Verdict(SUSPECT, f"it took over {fuzz.cpu_seconds} s of processor time")
    tail = output.read_bytes()[-1500:].decode(errors="backslashreplace").replace("\n", " | ")
    ending = f"signal {number}" if number else f"status {os.WEXITSTATUS(status)}"
    return Verdict("fault", f"crash: the process ended with {ending}: {tail}")


def _lines(reader: int, seconds: float) -> Iterator[bytes]:
    """Lines of a pipe; ends with the pipe, or when none has come for so long."""
    buffer = b""
    while True:
        deadline = time.monotonic() + seconds
        while b"\n" not in buffer:
            if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return
            received = os.read(reader, 65536)
            if not received:
                return
            buffer += received
        line, _, buffer = buffer.partition(b"\n")
        yield line


def _run_child(
    fuzz: FuzzClass, sources: Path, work: Path, seeds: Sequence[int], writer: int
) -> None:
    def tell(value: object) -> None:
        os.write(writer, json.dumps(value).encode() + b"\n")

    _limit_memory()
    for seed in seeds:
        _limit_processor_time(fuzz.cpu_seconds)
        verdict = run_case(fuzz, sources, work, seed, work / _OUTPUT, tell)
        if verdict.kind != "fault" and (peak := _peak_bytes()) > fuzz.memory_bytes:
            text = f"{verdict.text}: {peak / 1e6:.0f} MB of memory"
            verdict = Verdict(SUSPECT, text, verdict.seconds)
        tell([verdict.kind, verdict.text, verdict.seconds])
        if verdict.kind not in ("accepted", "refused"):
            return


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + _RESERVED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_processor_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def _peak_bytes() -> int:
    # kilobytes on Linux, bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def _fork(run: Callable[[], object], output: Path | None = None) -> int:
    """Runs a function in a child with a process group of its own; returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        # both set it, since either may be first
        _set_group(child)
        return child
    status = 1
    try:
        _set_group(0)
        if output is not None:
            _redirect(output)
        run()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def _set_group(process: int) -> None:
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(process, process)


def _redirect(output: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    handle = os.open(output, flags)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (handle, 1), (handle, 2)):
        os.dup2(source, target)
    faulthandler.enable(file=2, all_threads=False)


def _tell(**entry: object) -> None:
    print(json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
