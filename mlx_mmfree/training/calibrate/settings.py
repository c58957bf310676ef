"""The settings of a calibration."""

from dataclasses import dataclass
from typing import ClassVar

from ..corpus.mixture import Stage
from ..distil.settings import DerivedModelSettings
from ..run_settings import NOT_NEGATIVE, POSITIVE, Rule, setting
from ..settings import Settings
from .modulation import Start

_BITS = Rule("4, 6 or 8", lambda value: value in (4, 6, 8))
STARTS: tuple[Start, ...] = ("kept", "mean")


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings(DerivedModelSettings):
    """One run from a dense model to the same one with ternary linears, window by window."""

    command: ClassVar[str] = "calibrate"

    samples: int = setting("Number of sequences to learn from.", 512, POSITIVE)
    valid_samples: int = setting(
        "Number of held-out sequences, of `valid` or else of `data`.", 16, POSITIVE
    )
    sequence_length: int = setting(
        "Number of tokens of a sequence.", 2048, POSITIVE, called="length"
    )
    batch_size: int = 4
    epochs: int = setting("How often each window reads the samples.", 5, POSITIVE)
    window: int = setting("Layers that are trained together.", 1, POSITIVE)
    stride: int | None = setting(
        "Layers from the start of a window to the start of the next. Default: all of a window.",
        None,
    )
    group_size: int = setting(
        "Inputs that share a scale.", 128, Rule("32, 64 or 128", lambda n: n in (32, 64, 128))
    )
    rank: int | None = setting(
        "Rank of the change of the weights; 0 learns scales, shifts and thresholds alone. Default: all "
        "weights, or where they do not fit into memory a rank of 64.",
        None,
        NOT_NEGATIVE,
    )
    dense_last: int = setting("Last layers that stay dense.", 0, NOT_NEGATIVE)
    embed_bits: int | None = setting(
        "Bits of the embedding: 4, 6 or 8. Default: it stays as it is.", None, _BITS
    )
    head_bits: int | None = setting(
        "Bits of the output head: 4, 6 or 8. Default: it stays as it is.", None, _BITS
    )
    start: str = setting(
        "How scales and thresholds begin: `kept`, a threshold of 0.7 and the mean of what is kept, or "
        "`mean`, as in the published method.",
        "kept",
        Rule.one_of(*STARTS),
    )
    soft: bool = setting(
        "Whether trits become hard bit by bit, over the first four fifths of a window's steps.",
        True,
    )
    learning_rate: float = setting(
        "Learning rate at the start of a window, of weights in units of their root mean square. It "
        "falls to 0.",
        1.5e-2,
        POSITIVE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        stride = self.stride
        if stride is not None:
            self.check("stride", 1 <= stride <= self.window, f"from 1 to 'window' ({self.window})")
        self.check("batch_size", self.batch_size <= self.samples, "at most 'samples'")
        self.check("valid", len(self.valid) < 2, "one file")

    @property
    def steps(self) -> int:
        """The optimizer steps of a window."""
        return self.samples // self.batch_size * self.epochs

    def corpus(self) -> Settings:
        """The settings by which texts are read: all samples are the rows of one step."""
        held_out = 0 if self.valid else self.valid_samples
        return Settings(
            output=self.output,
            init_from=self.model,
            stages=(Stage(1, dict.fromkeys(self.data, 1.0)),),
            valid=self.valid,
            order="epochs",
            steps=1,
            warmup_steps=0,
            batch_size=self.samples + held_out,
            sequence_length=self.sequence_length,
            seed=self.seed,
        )

    def windows(self, layers: int) -> list[range]:
        """The layers of each window, first to last.

        Args:
            layers: The layers of the model.
        """
        end, stride = layers - self.dense_last, self.stride or self.window
        starts = range(0, max(1, end - self.window + stride), stride)
        return [range(first, min(first + self.window, end)) for first in starts]
