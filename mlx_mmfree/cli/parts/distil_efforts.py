"""The tokens, operations, memory and hours of each stage of a distillation, as a table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .columns import aligned, size_text

if TYPE_CHECKING:
    from ...training.distil.distil import Distillation


def efforts_shown(distillation: "Distillation") -> list[str]:
    """The lines that a dry run prints: a row for each stage, one for all, and where rates come from."""
    import mlx.core as mx

    from ...training.distil.effort import MACHINES

    asked: mx.Dtype = getattr(mx, distillation.settings.dtype)
    memory: dict[str, int] = {name: plan.total for name, plan in distillation.plans(asked).items()}
    stages = {name: [effort] for name, effort in distillation.efforts().items()}
    every = [effort for efforts in stages.values() for effort in efforts]
    head = ("stage", "tokens", "operations", "GPU memory", *(f"hours, {name}" for name in MACHINES))
    rows: list[Sequence[str]] = [head]
    for name, efforts in (*stages.items(), ("all", every)):
        tokens, operations = (sum(getattr(e, key) for e in efforts) for key in ("tokens", "total"))
        most = memory.get(name, max(memory.values()))
        hours = (_hours(sum(e.hours(machine) for e in efforts)) for machine in MACHINES)
        rows.append((name, f"{tokens:,}", f"{operations:.2e}", size_text(most), *hours))
    lines = aligned(rows)
    if logits := distillation.settings.logits_bytes:
        lines.append(f"The teacher's logits take {size_text(logits)} of the disk.")
    lines.append("Estimates. A GPU's rate is 40 % of that of large products, which is assumed.")
    rates = (f"{name}: {m.rate / 1e12:.3g} TFLOP/s ({m.source})." for name, m in MACHINES.items())
    return [*lines, *rates]


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
