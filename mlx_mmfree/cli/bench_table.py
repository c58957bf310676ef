"""The lines that `mmfree bench` prints for people."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..evaluation.benchmark import Report
    from ..evaluation.benchmark_record import Figure


def report_lines(report: "Report") -> list[str]:
    """The lines of one part of the benchmark."""
    lines = []
    if "device" in report.machine:
        machine = report.machine
        lines += [f"{machine['device']}, ternary products by the backend '{machine['backend']}'"]
        lines += ["'of limit' compares with what limits it, measured in turn with it.", _HEADER]
    for threads, limit in report.machine.get("limits", {}).items():
        lines += _limit_lines(threads, limit)
    lines += [_figure_line(figure) for figure in report.figures]
    lines += _memory_lines(report.memory)
    for name, ratio in report.ratios.items():
        lines.append(
            f"{name}: {ratio['median']:.2f} times as fast as llama.cpp with TQ2_0 by the medians of "
            f"all processes, {ratio['best']:.2f} times by the best"
        )
    return lines


_HEADER = (
    f"\n{'':<58} {'threads':>7} {'time':>10} {'GB/s':>7} {'GMAC/s':>7} {'of limit':>8}  processes"
)


def _limit_lines(threads: str, limit: dict[str, Any]) -> list[str]:
    lines = []
    rate = limit["bytes_per_second"] / 1e9
    name = "limit: plain read"
    lines.append(f"{name:<58} {threads:>7} {'':>10} {rate:>7.1f} {'':>7} {'':>8}  fastest")
    if limit["macs_per_second"]:
        rate = limit["macs_per_second"] / 1e9
        name = "limit: 8-bit arithmetic"
        lines.append(f"{name:<58} {threads:>7} {'':>10} {'':>7} {rate:>7.0f} {'':>8}  fastest")
    return lines


def _figure_line(figure: "Figure") -> str:
    shown = figure.to_json()
    first = figure.records[0]
    seconds = shown["seconds"]
    time = f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
    bandwidth = f"{shown['gb_per_second']:.1f}" if first.bytes else ""
    counted = " ".join(
        f"{r.share * 100:.0f}" if r in figure.counted else f"({r.share * 100:.0f})"
        for r in figure.records
    )
    rate = f", {shown['rate']:.1f} tokens/s" if first.unit == "tokens" else ""
    return (
        f"{first.name:<58} {first.threads:>7} {time:>10} {bandwidth:>7} "
        f"{shown['gmac_per_second']:>7.0f} {figure.share:>8.0%}  {counted} "
        f"% of {first.limit}{rate}"
    )


def _memory_lines(notes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for note in notes[:1]:
        loading, peak = (
            max(other[name] for other in notes) for name in ("loading_bytes", "peak_bytes")
        )
        tensors = note["tensor_bytes"]
        lines.append(
            f"{note['model']}: {tensors / 1e6:.0f} MB of tensors; resident at most after loading "
            f"{loading / tensors:.2f} times that, at the end {peak / tensors:.2f} times"
        )
    return lines
