"""What a conversion reports: how much was written, and how it compares with the source."""

from dataclasses import dataclass, field

from ..publish.runtimes import Opening


@dataclass
class Group:
    """Weights of one kind.

    Attributes:
        tensors: The number of parameters.
        weights: The number of weights.
        source_bytes: Their bytes in the source, including scales.
        target_bytes: Their bytes as written, including scales.
        difference: The largest difference of a weight from the source's; `None` if not compared.
    """

    tensors: int = 0
    weights: int = 0
    source_bytes: int = 0
    target_bytes: int = 0
    difference: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """The bits of a weight as written, including scales."""
        return 8 * self.target_bytes / max(self.weights, 1)


@dataclass
class Report:
    """What was written, and how it compares with the source.

    Attributes:
        groups: The weights by kind.
        is_lossless: Whether no weight differs from the source's and all linears compute alike.
        logits_difference: The largest difference of a logit for a fixed input, divided by the largest
            logit; `None` if not compared.
        openings: Which programs open the result; empty if that was not asked.

    Example:
        >>> from mlx_mmfree import demo
        >>> report = convert(open_checkpoint(demo.path()), "copied")
        >>> report.is_lossless, report.logits_difference
        (True, 0.0)
    """

    groups: dict[str, Group] = field(default_factory=dict)
    is_lossless: bool = True
    logits_difference: float | None = None
    openings: tuple[Opening, ...] = ()

    def figures(self) -> dict[str, str]:
        """The figures of the comparison for a model card; empty if there was none."""
        total = self.total
        if total.difference is None or self.logits_difference is None:
            return {}
        return {
            "tensors compared": str(total.tensors),
            "weights": f"{total.weights:,}",
            "bytes of the source": f"{total.source_bytes:,}",
            "bytes written": f"{total.target_bytes:,}",
            "bits a weight": f"{total.bits_per_weight:.3f}",
            "codes of ternary matrices": "equal",
            "largest difference of a weight": f"{total.difference:.3g}",
            "largest difference of a logit, over the largest": f"{self.logits_difference:.3g}",
        }

    @property
    def total(self) -> Group:
        """All weights."""
        groups = self.groups.values()
        differences = [g.difference for g in groups if g.difference is not None]
        return Group(
            sum(g.tensors for g in groups),
            sum(g.weights for g in groups),
            sum(g.source_bytes for g in groups),
            sum(g.target_bytes for g in groups),
            max(differences, default=None),
        )
