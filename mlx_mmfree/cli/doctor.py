"""`mmfree doctor`: shows what this machine offers, what the library uses of it, and any problems."""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..platform.resident_memory import BYTES_PER_GB
from ..version import REPOSITORY
from .parts.command import check_writable, command
from .parts.flags import add_json_flag
from .parts.parser import CommandParser

Progress = Callable[[str, int, int], None]

HELP = "show versions, device, backends and problems"


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="mmfree doctor", description=__doc__)
    add_json_flag(parser)
    parser.add_argument(
        "--all", action="store_true", help="also show every operation and every kernel"
    )
    parser.add_argument(
        "--report",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FOLDER",
        help="write a file about this machine, its kernels and its speed into this folder (the current "
        "one); it holds no names or paths of yours",
    )
    parser.add_argument(
        "--model",
        help="only list the texts of Metal kernels that this model's first token compiles; with "
        "--report: measure this model too, beside the bundled one",
    )
    parser.add_argument(
        "--dump-kernels",
        type=Path,
        metavar="DIR",
        help="only write the texts of all Metal kernels, with a script that compiles them",
    )
    return parser


@command
def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    if args.dump_kernels is not None:
        from ..ops.inspection import SCRIPT, write_kernel_files

        count = write_kernel_files(args.dump_kernels)
        script = shlex.quote(str(args.dump_kernels / SCRIPT))
        print(f"Wrote {count} kernels. On a Mac with Xcode, compile them with: sh {script}")
        return 0
    if args.model is not None and args.report is None:
        return _show_first_token(args)
    if args.report is not None:
        check_writable("[doctor] 'report'", args.report / "report.json")
    from .parts.terminal import TaskBars

    with TaskBars() as bars:
        found = examine(bars)
    print(json.dumps(found, indent=2) if args.json else "\n".join(table(found, args.all)))
    if args.report is not None:
        from .parts.machine_report import machine_report, write_machine_report

        models = [None] if args.model is None else [None, args.model]
        file = write_machine_report(args.report, machine_report(found, models))
        print(f"Wrote {file}. Send it in an issue: {REPOSITORY}/issues", file=sys.stderr)
    return 0


PROMPT_TOKENS = 64
"""The length of the prompt before the first token, where `--model` asks for it."""


def _show_first_token(args: argparse.Namespace) -> int:
    """Lists the texts of Metal kernels that a model's first token compiles."""
    from ..evaluation.audit.first_token import first_token_texts
    from ..hub.checkpoint.checkpoint import open_checkpoint
    from ..hub.checkpoint.load import OpenedModel

    model = OpenedModel(open_checkpoint(args.model)).model
    of_prompt, of_next = first_token_texts(model, PROMPT_TOKENS)
    if args.json:
        print(json.dumps({"prompt": of_prompt, "next_token": of_next}, indent=2))
        return 0
    print(f"A prompt of {PROMPT_TOKENS} tokens compiles {len(of_prompt)} texts of Metal kernels:")
    print(*(f"  {_of_kernel(name)}" for name in of_prompt), sep="\n")
    print(f"The next token compiles {len(of_next)} more:")
    print(*(f"  {_of_kernel(name)}" for name in of_next), sep="\n")
    return 0


def _of_kernel(name: str) -> str:
    return name.removeprefix("custom_kernel_")


def examine(progress: Progress | None = None) -> dict[str, Any]:
    """Collects all facts as values that JSON can hold. This takes a few seconds, with Metal longer.

    Args:
        progress: Called with a task, how much of it is done and how much there is.

    Raises:
        UsageError: An environment variable has an unknown value.
    """
    from ..ops.backend.choice import environment_candidate, stored_choices
    from ..ops.dense_matmul import rounds_activations
    from ..ops.device import forced_backend
    from ..ops.inspection import cpu_kernels, metal_kernels, operation_reports
    from ..ops.kernel_times import kernel_times
    from ..platform import blas
    from ..platform.device import device_info
    from ..platform.memory_reader import read_bandwidth
    from ..platform.threads import thread_count

    forced, forced_product = forced_backend(), environment_candidate()
    with warnings.catch_warnings():
        # the list of problems names these kernels
        warnings.filterwarnings("ignore", r"\[mlx_mmfree\] The kernel", RuntimeWarning)
        reports = operation_reports(progress=_part(progress, "Checking kernels"))
        times = kernel_times(progress=_part(progress, "Timing kernels"))
    found: dict[str, Any] = {
        "versions": _versions(),
        "device": asdict(device_info()),
        "threads": thread_count(),
        "memory_bandwidth": asdict(read_bandwidth()),
        "blas": blas.bind()._asdict(),
        "cpu_kernels": asdict(cpu_kernels()),
        "forced_backend": forced,
        "forced_product": forced_product,
        "rounds_activations": rounds_activations(),
        "operations": {
            op: {"runs_on": _choice(report, forced), "backends": report}
            for op, report in reports.items()
        },
        "metal_kernels": metal_kernels(),
        "kernel_times": [time._asdict() for time in times],
        "choices": stored_choices(),
    }
    return found | {"problems": [*host_problems(current_host()), *_problems(found)]}


def _part(progress: Progress | None, task: str) -> Callable[[int, int], None] | None:
    return None if progress is None else partial(progress, task)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from ..version import __version__

    return {
        "mlx_mmfree": __version__,
        "mlx": version("mlx"),
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _choice(report: dict[str, str | None], forced: str | None) -> str | None:
    """The backend that runs the operation, or `None` if the forced one cannot."""
    names = [name for name, reason in report.items() if reason is None]
    if forced:
        return forced if forced in names else None
    return next(iter(names), None)


def _problems(found: dict[str, Any]) -> Iterator[str]:
    binding, cpu = found["blas"], found["cpu_kernels"]
    if binding["is_needed"]:
        yield (
            f"MLX keeps its slow reference BLAS: {binding['reason']}. If scipy-openblas32 is missing "
            "or damaged, install it again: pip install --force-reinstall scipy-openblas32"
        )
    if cpu["reason"] and found["device"]["backend"] == "cpu":
        yield f"The CPU kernels cannot be used: {cpu['reason']}"
    if found["device"]["backend"] == "cpu" and found["versions"]["platform"].startswith("macOS"):
        yield (
            "MLX computes on the CPU of this Mac. Install MLX again (pip install --force-reinstall "
            "mlx), and do not set the default device to the CPU."
        )
    if forced := found["forced_backend"]:
        yield (
            f"Every operation is forced to the backend '{forced}'. Unset MLX_MMFREE_BACKEND to let "
            "the fastest one run."
        )
    if product := found["forced_product"]:
        yield (
            f"Every ternary product is forced to '{product}' where there is such a way. Unset "
            "MLX_MMFREE_PRODUCT to let the fastest one run."
        )
    if found["rounds_activations"]:
        yield (
            "On a CPU, products with codes of 1 and 2 bits are inexact, since their activations are "
            "rounded to 8 bits in each 32. Unset MLX_MMFREE_ACTIVATION_BITS to compute exactly."
        )
    for op, facts in found["operations"].items():
        if facts["runs_on"] is None:
            reason = facts["backends"].get(forced, "the operation has no such backend")
            yield f"No backend can run '{op}': '{forced}' is forced, but {reason}."
    for kernel, fault in found["metal_kernels"].items():
        if fault:
            yield (
                f"The kernel {kernel} is switched off: {fault}. Slower code does its work. Please send "
                f"the file that 'mmfree doctor --report' writes: {REPOSITORY}/issues"
            )


def table(found: dict[str, Any], shows_all: bool = True) -> list[str]:
    """The lines that show the facts to people. The problems come first.

    Args:
        found: The facts.
        shows_all: Also shows every operation and every kernel.
    """
    problems = [f"  - {problem}" for problem in found["problems"]]
    lines = [
        *(["problems", *problems] if problems else ["No problems found."]),
        "",
        *_section("versions", found["versions"]),
        *_section("machine", _machine(found)),
        *_section("CPU kernels", _cpu_kernels(found["cpu_kernels"])),
    ]
    if not shows_all:
        return [*lines, "'mmfree doctor --all' shows every operation and kernel."]
    for op, facts in found["operations"].items():
        rows = {
            name: "runs" if name == facts["runs_on"] else reason or "could run, not chosen"
            for name, reason in facts["backends"].items()
        }
        lines += _section(op, rows)
    kernels = {name: fault or "sound" for name, fault in found["metal_kernels"].items()}
    lines += _section("GPU kernels", kernels or {"none checked": "there is no GPU"})
    if found["kernel_times"]:
        lines += _section("times of Metal kernels", dict(map(_time, found["kernel_times"])))
    if found["choices"]:
        lines += _section("chosen by timing", dict(map(_chosen, found["choices"].items())))
    reason = found["cpu_kernels"]["reason"]
    if reason and any(reason in problem for problem in problems):
        # it is long, and each operation gives it
        start = len(problems) + 1
        lines[start:] = [line.replace(reason, "see the problems above") for line in lines[start:]]
    return lines


def _machine(found: dict[str, Any]) -> dict[str, str]:
    device, bandwidth, binding = found["device"], found["memory_bandwidth"], found["blas"]
    rows = {"device": f"{device['name']} ({device['backend']})"}
    for name in ("memory", "working_set", "available"):
        if (size := device[f"{name}_bytes"]) is not None:
            rows[name.replace("_", " ")] = f"{size / BYTES_PER_GB:.1f} GB"
    rate = bandwidth["bytes_per_second"] / BYTES_PER_GB
    rows["read rate"] = f"{rate:.1f} GB/s ({bandwidth['method']})"
    rows["threads"] = str(found["threads"])
    bound = f"OpenBLAS, {len(binding['symbols'])} functions of MLX bound to it"
    rows["BLAS"] = bound if binding["symbols"] else f"MLX's own ({binding['reason']})"
    return rows


def _time(time: dict[str, Any]) -> tuple[str, str]:
    shape = f"{time['kernel']}, {time['inputs']} x {time['outputs']}, rows: {time['rows']}"
    rate = f"{time['seconds'] * 1e6:.1f} us, {time['bytes_per_second'] / BYTES_PER_GB:.1f} GB/s"
    share = time["share_of_read"]
    return shape, rate if share is None else f"{rate}, {share:.0%} of a plain read"


def _chosen(item: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    task, choice = item
    times = (f"{name} {seconds * 1e6:.1f} us" for name, seconds in choice["seconds"].items())
    return task, f"{choice['chosen']} ({', '.join(times)})"


def _cpu_kernels(cpu: dict[str, Any]) -> dict[str, str]:
    if cpu["reason"]:
        return {"not used": cpu["reason"]}
    choices = ", ".join(cpu["choices"])
    return {
        "instructions": f"{cpu['instructions']} (of {choices})",
        "threads": str(cpu["threads"]),
    }


def _section(title: str, rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [title, *(f"  {name:{width}}  {value}" for name, value in rows.items()), ""]


OLDEST_PYTHON = (3, 11)
OLDEST_MACOS = 14


@dataclass(frozen=True)
class Host:
    """The system and the Python that run this process.

    Attributes:
        system: `Darwin`, `Linux` or another name.
        machine: The type of the processor, such as `arm64` or `x86_64`.
        python: The major and minor version of Python.
        macos: The version of macOS; empty on other systems.
        is_translated: Whether Rosetta runs an Intel program on Apple silicon.
    """

    system: str
    machine: str
    python: tuple[int, int]
    macos: str = ""
    is_translated: bool = False


def current_host() -> Host:
    """Describes the running system."""
    system = platform.system()
    return Host(
        system=system,
        machine=platform.machine(),
        python=sys.version_info[:2],
        macos=platform.mac_ver()[0],
        is_translated=system == "Darwin" and _runs_under_rosetta(),
    )


def host_problems(host: Host) -> list[str]:
    """The problems that keep MLX from running on a host, each with a hint."""
    found = []
    if host.python < OLDEST_PYTHON:
        wanted, got = (".".join(map(str, v)) for v in (OLDEST_PYTHON, host.python))
        found.append(f"Python {wanted} or newer is needed but this is {got}.")
    if host.is_translated:
        found.append(
            "This Python is an Intel program that Rosetta translates. Install an arm64 Python, "
            "make a new virtual environment with it, and install again."
        )
    elif host.system == "Darwin" and host.machine != "arm64":
        found.append("MLX needs a Mac with Apple silicon; this one has an Intel processor.")
    if host.macos and int(host.macos.split(".")[0]) < OLDEST_MACOS:
        found.append(f"MLX needs macOS {OLDEST_MACOS} or newer but this is {host.macos}.")
    if host.system == "Linux" and host.machine not in ("x86_64", "aarch64"):
        found.append(f"MLX has no packages for Linux on {host.machine}; build it from source.")
    if host.system not in ("Darwin", "Linux"):
        found.append(f"{host.system} is not supported: use macOS, or Linux.")
    return found


def _runs_under_rosetta() -> bool:
    answer = subprocess.run(
        ["sysctl", "-in", "sysctl.proc_translated"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() == "1"
