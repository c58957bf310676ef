"""The logs of several runs side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...errors import TrainingError
from ..log import is_figure, read_log

LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class RunSummary:
    """What a log says of its run. A figure is `None` where the log has none.

    Attributes:
        name: How the run was named.
        records: The log.
        steps: Steps done.
        tokens: Tokens learned from.
        loss: The last training loss, in nats.
        best_loss: The best validation loss, in nats.
        best_step: The step that it was measured at.
        tokens_per_second: The median of the reports.
        peak_memory_bytes: The largest of the reports.
        settings: The settings of the run.
    """

    name: str
    records: Sequence[Mapping[str, Any]]
    steps: int
    tokens: int
    loss: float | None
    best_loss: float | None
    best_step: int | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    settings: Mapping[str, Any]


def read_run(path: Path) -> RunSummary:
    """Reads the log of a run.

    Args:
        path: The folder of the run, or its log.

    Raises:
        TrainingError: There is no log, or it holds no run.
    """
    file = path if path.is_file() else path / LOG_FILE
    if not file.is_file():
        raise TrainingError(
            f"[runs] '{path}' must be the folder of a run but has no {LOG_FILE}. Give the folder that "
            "'output' or 'adapter_path' names."
        )
    records = read_log(file)
    if not records:
        raise TrainingError(f"[runs] '{file}' must be the log of a run but its first line is not.")
    # that of a log file tells more than its name
    name = path.stem if path.is_file() and path.name != LOG_FILE else file.resolve().parent.name
    losses = _values(records, "loss")
    speeds, peaks = _values(records, "tokens_per_second"), _values(records, "peak_memory_bytes")
    measured = [
        (record["valid_loss"], record["step"])
        for record in records
        if is_figure(record.get("valid_loss")) and is_figure(record.get("step"))
    ]
    best = min(measured, default=(None, None))
    settings = records[0].get("settings")
    return RunSummary(
        name=name,
        records=records,
        steps=int(max(_values(records, "step"), default=0)),
        tokens=int(max(_values(records, "tokens"), default=0)),
        loss=losses[-1] if losses else None,
        best_loss=best[0],
        best_step=best[1],
        tokens_per_second=median(speeds) if speeds else None,
        peak_memory_bytes=int(max(peaks)) if peaks else None,
        settings=settings if isinstance(settings, dict) else {},
    )


def distinct_names(paths: Sequence[Path], runs: Sequence[RunSummary]) -> list[str]:
    """A name for each run: that of its folder, or the path where several have that one."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def differing_settings(runs: Sequence[RunSummary]) -> dict[str, list[str]]:
    """The settings that the runs do not share, as JSON; `-` where a run has none.

    Those of a mapping in the settings have names such as `model.hidden_size`.
    """
    each = [_flat(run.settings) for run in runs]
    names = sorted({name for settings in each for name in settings})
    found = {name: [settings.get(name, "-") for settings in each] for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value, sort_keys=True)
    return flat


def _values(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [record[key] for record in records if is_figure(record.get(key))]
