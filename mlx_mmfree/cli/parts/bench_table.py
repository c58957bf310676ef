"""The table that `mmfree bench` prints."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...evaluation.benchmark import Report
    from ...evaluation.benchmark_host import GraphCost
    from ...evaluation.benchmark_record import Figure


def report_lines(report: "Report") -> list[str]:
    """The lines of one part of the benchmark."""
    lines = []
    if "device" in report.machine:
        machine = report.machine
        lines += [f"{machine['device']}, ternary products by the backend '{machine['backend']}'"]
        lines += [
            "'of limit' compares each figure with its limit, measured in turn with it. It is the median "
            "of the processes whose limit was fast.",
            _HEADER,
        ]
    for threads, limit in report.machine.get("limits", {}).items():
        lines += _limit_lines(threads, limit)
    lines += [_figure_line(figure) for figure in report.figures]
    lines += _memory_lines(report.memory)
    for ratio in report.ratios:
        lines.append(
            f"{ratio.name}: {ratio.median:.2f} times as fast as {ratio.other} by the medians of all "
            f"processes, {ratio.best:.2f} times by the best"
        )
    for name, reason in report.machine.get("left_out", {}).items():
        lines.append(f"{name} was not measured: {reason}")
    for name, fault in report.machine.get("switched_off", {}).items():
        lines.append(f"The kernel {name} is switched off and slower code did its work: {fault}")
    return lines


_NAMES = ("", "threads", "time", "GB/s", "GMAC/s", "of limit", "limit", "tokens/s")


def _row(*cells: str) -> str:
    name, threads, time, bandwidth, rate, share, limit, tokens = cells
    return (
        f"{name:<58} {threads:>7} {time:>10} {bandwidth:>7} {rate:>7} {share:>8}  {limit:<16} "
        f"{tokens:>8}"
    )


_HEADER = f"\n{_row(*_NAMES)}  of limit in each process (not counted)"


def _limit_lines(threads: str, limit: dict[str, Any]) -> list[str]:
    rate = f"{limit['bytes_per_second'] / 1e9:.1f}"
    shown = _threads(int(threads))
    cells = ("limit: fastest plain read", shown, "", rate, "", "", "", "")
    lines = [_row(*cells).rstrip()]
    if limit["macs_per_second"]:
        rate = f"{limit['macs_per_second'] / 1e9:.0f}"
        cells = (f"limit: fastest {limit['arithmetic']}", shown, "", "", rate, "", "", "")
        lines.append(_row(*cells).rstrip())
    return lines


def _threads(count: int) -> str:
    return str(count) if count else "GPU"


def _figure_line(figure: "Figure") -> str:
    shown = figure.to_json()
    first = figure.records[0]
    seconds = shown["seconds"]
    counted = figure.counted
    shares = " ".join(
        f"{r.share:.0%}" if r in counted else f"({r.share:.0%})" for r in figure.records
    )
    cells = (
        first.name,
        _threads(first.threads),
        f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms",
        f"{shown['gb_per_second']:.1f}" if first.bytes else "",
        f"{shown['gmac_per_second']:.0f}",
        f"{figure.share:.0%}",
        first.limit,
        f"{shown['rate']:.1f}" if first.unit == "tokens" else "",
    )
    return f"{_row(*cells)}  {shares}"


def _memory_lines(notes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for note in notes[:1]:
        loading, peak = (
            max(other[name] for other in notes) for name in ("loading_bytes", "peak_bytes")
        )
        tensors = note["tensor_bytes"]
        lines.append(
            f"{note['model']}: {tensors / 1e6:.0f} MB of tensors; the peak of resident memory was "
            f"{loading / tensors:.2f} times that after loading and {peak / tensors:.2f} times at the end"
        )
    return lines


def graph_lines(cost: "GraphCost") -> list[str]:
    """What it costs to build the graph of a decoded token, and how many texts Metal compiles."""
    layers = cost.layers
    kinds = {"uncompiled": cost.seconds, "compiled": cost.compiled_seconds}
    parts = [
        f"{kind} {seconds * 1e6:.0f} us a token, {seconds / layers * 1e6:.1f} us a layer"
        for kind, seconds in kinds.items()
        if seconds is not None
    ]
    texts = cost.kernel_texts
    return [
        f"{cost.model}, {layers} layers, building the graph: {'; '.join(parts)}",
        f"{cost.model}, kernel texts that Metal compiles: {texts.chat} for a chat ({texts.decode} to "
        f"decode, {texts.prompt} to read long prompts), {texts.every_length} with prompts of every "
        "length",
    ]


def starting_lines(seconds: dict[str, float]) -> list[str]:
    """The processor time of programs from start to end."""
    return [f"starting: {time * 1e3:.0f} ms  {name}" for name, time in seconds.items()]
