"""The report of a machine that `mmfree doctor --report` writes: what it is, its kernels, its rates.

It holds no name, path or text of a person, so that it may be sent: a folder on the disk is named by its
`model_type` and size, a repository without its owner.
"""

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1
"""The version of the report's keys."""


def machine_report(found: dict[str, Any], models: Sequence[str | None]) -> dict[str, Any]:
    """Joins what `mmfree doctor` found with the rates of models.

    Args:
        found: The facts, as `mmfree doctor --json` prints them.
        models: The models to measure, as `--model` names them; `None` is the bundled model.

    Raises:
        UsageError: A model cannot be loaded or cannot continue texts.
        MeasurementError: A measurement failed.
    """
    from ...ops.inspection import kernel_checks
    from ..bench import rates

    device = found["device"]
    mac = platform.mac_ver()[0]
    system = f"macOS {mac}" if mac else f"{platform.system()} {platform.machine()}"
    machine = {"chip": device["name"], "memory_gib": round(device["memory_bytes"] / 2**30)}
    machine |= {"system": system, "backend": device["backend"], "threads": found["threads"]}
    versions = {name: found["versions"][name] for name in ("mlx_mmfree", "mlx", "numpy", "python")}
    report = {
        "schema": SCHEMA,
        "machine": machine,
        "versions": versions,
        "cpu_kernels": found["cpu_kernels"]["instructions"],
        "kernels": kernel_checks(),
        "kernel_times": found["kernel_times"],
        "problems": found["problems"],
        "rates": [rate for model in models for rate in rates(model)],
    }
    return _without_paths(report)


def write_machine_report(folder: Path, report: dict[str, Any]) -> Path:
    """Writes the report as `<chip>_<memory>-gb.json`. A report that is there already stays.

    Raises:
        OSError: The folder cannot be written.
    """
    from ...files.reading import write_json
    from ...files.writing import new_file, writing

    machine = report["machine"]
    words = (machine["chip"], f"{machine['memory_gib']} gb")
    name = "_".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words)
    file, number = folder / f"{name}.json", 1
    while file.exists():
        number += 1
        file = folder / f"{name}_{number}.json"
    with writing("doctor", file), new_file(file) as new:
        write_json(new, report)
    return file


def _without_paths(value: Any) -> Any:
    """The value, in whose texts absolute paths are left out: messages of the system may name them."""
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"(?<![\w.:/])~?/[\w.@+~-]+(?:/[\w.@+~ -]+)*", "<path>", value)
    return value
