"""Classes of hostile input, and how one case is judged."""

import gc
import os
import random
import re
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_mmfree.errors import MMFreeError

CASE, TEMPORARY, HOME, OUTSIDE = "case", "tmp", "home", "outside"
SECRET = "outside-8d1f-not-to-be-read"
_SECRET_FILE = "secret.txt"
# this is reported of sound files too, since a changed configuration may name another writer
_NOTE = re.compile(rb"^\[load\] '[^'\n]*' may hold wrong ternary weights: [^\n]*\n", re.MULTILINE)
_LONGEST_MESSAGE = 2000


@dataclass(frozen=True)
class FuzzClass:
    """A class of hostile input; a file of `tests.fuzz.classes` holds one as `CLASS`.

    Attributes:
        make_sources: Writes sound files to a folder, once, in a process of its own.
        mutate: Writes a hostile case made from the sources to a new folder; says what it did.
        exercise: Uses the case as a user would; returns for sound input, raises a refusal, or fails.
        refusals: Exceptions that refuse an input. Their message must be one clear line.
        cpu_seconds: Processor time that a case may take.
        wall_seconds: Time that a case may take, long enough for a busy machine.
        memory_bytes: Resident memory that a process may reach.
        batch: Cases that share a process until one of them fails.
        kept_until_exit: Names of temporary files that stay until the process ends.
        is_command: Whether a case runs a whole command, which takes longer than a parser.
        count: Cases that pytest runs; the script runs as many as its flag says.
        packages: Packages of an extra that it needs; without them it is left out.
    """

    make_sources: Callable[[Path], object]
    mutate: Callable[[Path, Path, random.Random], str]
    exercise: Callable[[Path, random.Random], object]
    refusals: tuple[type[Exception], ...] = (MMFreeError,)
    cpu_seconds: int = 5
    wall_seconds: float = 150.0
    memory_bytes: int = 500_000_000
    batch: int = 40
    stays_until_exit: str = ""
    is_command: bool = False
    count: int = 6
    packages: tuple[str, ...] = ()


def command_class(
    make_sources: Callable[[Path], object],
    mutate: Callable[[Path, Path, random.Random], str],
    exercise: Callable[[Path, random.Random], object],
    stays_until_exit: str = "",
    refusals: tuple[type[Exception], ...] = (MMFreeError,),
) -> FuzzClass:
    """A class each of whose cases runs whole commands, with the limits that these need."""
    return FuzzClass(
        make_sources,
        mutate,
        exercise,
        refusals,
        cpu_seconds=30,
        wall_seconds=300,
        memory_bytes=700_000_000,
        batch=1,
        stays_until_exit=stays_until_exit,
        is_command=True,
        count=3,
    )


SUSPECT = "suspect"


class Late(Exception):
    """A case took too long, which counts only if it does so when tried alone."""


@dataclass(frozen=True)
class Verdict:
    """How a case ended.

    Attributes:
        kind: `accepted`, `refused`, `fault`, or `suspect` if it is to be tried alone.
        text: What was done to the input and, for a fault, what happened.
        seconds: How long its use took.
    """

    kind: str
    text: str
    seconds: float = 0.0


def prepare_work(work: Path) -> None:
    """Makes the folders of a worker: for the case, for temporary files, and one to keep out of."""
    for name in (TEMPORARY, HOME, OUTSIDE):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / OUTSIDE / _SECRET_FILE).write_text(SECRET)


def run_case(
    fuzz: FuzzClass,
    sources: Path,
    work: Path,
    seed: int,
    output: Path,
    tell: Callable[[str], object],
) -> Verdict:
    """Makes, uses and judges one case.

    Args:
        fuzz: Its class.
        sources: The sound files.
        work: The worker's folder.
        seed: Decides everything.
        output: Where the process writes what it prints.
        tell: Takes what was done to the input before it is used.
    """
    rng = random.Random(seed)
    shutil.rmtree(work / CASE, ignore_errors=True)
    kind, problem = "accepted", ""
    what = fuzz.mutate(sources, work / CASE, rng)
    tell(what)
    begun = time.monotonic()
    try:
        fuzz.exercise(work / CASE, rng)
    except fuzz.refusals as error:
        kind, problem = "refused", _unclear(str(error))
        what += f" -> {error!s:.300}"
    except Late as error:
        return Verdict(SUSPECT, f"{what}: {error}", time.monotonic() - begun)
    # a panic of a compiled library is no Exception
    except BaseException as error:
        problem = f"{type(error).__name__}: {error!s:.500} {_location(error)}"
    seconds = time.monotonic() - begun
    problem = problem or _printed(output) or _strayed(work, output.name, fuzz.stays_until_exit)
    if problem:
        return Verdict("fault", f"{what}: {problem}", seconds)
    return Verdict(kind, what, seconds)


def _unclear(message: str) -> str:
    is_clear = 20 <= len(message) <= _LONGEST_MESSAGE and "\n" not in message
    return "" if is_clear else f"unclear message {message!r:.300}"


def _location(error: BaseException) -> str:
    """The last lines of the library, or of the test, that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    shown = [frame for frame in frames if "mlx_mmfree" in frame.filename] or frames
    return "at " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in shown[:-4:-1])


def _printed(output: Path) -> str:
    if not output.stat().st_size:
        return ""
    text = _NOTE.sub(b"", output.read_bytes())
    os.truncate(output, 0)
    return f"printed {text[:300]!r}" if text else ""


def clear_temporary(work: Path, expected: str = "") -> list[str]:
    """Removes temporary files but compiled code, which MLX keeps; says what there was.

    Args:
        work: The worker's folder.
        expected: A regular expression of names to leave alone.
    """
    names = [
        name for name in os.listdir(work / TEMPORARY) if not re.fullmatch(f"mlx|{expected}", name)
    ]
    if names:
        # what nothing refers to any longer is removed
        gc.collect()
    left = [name for name in names if (work / TEMPORARY / name).exists()]
    for name in left:
        shutil.rmtree(work / TEMPORARY / name, ignore_errors=True)
        (work / TEMPORARY / name).unlink(missing_ok=True)
    return left


def _strayed(work: Path, output: str, expected: str) -> str:
    """The files that were written outside the folder of the case."""
    secret = work / OUTSIDE / _SECRET_FILE
    if os.listdir(work / OUTSIDE) != [_SECRET_FILE] or secret.read_text() != SECRET:
        return f"changed files outside: {os.listdir(work / OUTSIDE)}"
    if left := clear_temporary(work, expected):
        return f"left temporary files {left[:3]}"
    if added := set(os.listdir(work)) - {CASE, TEMPORARY, HOME, OUTSIDE, output}:
        return f"wrote {sorted(added)[:3]} beside its folder"
    return ""
