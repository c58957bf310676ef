"""Readers of hostile input in a process of their own, and their limits.

The table of `.github/SECURITY.md` says the same as text, beside what this program reads itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .process import ConfinedProcess

MB = 2**20


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of input.

    Attributes:
        module: As for `ConfinedProcess`.
        packages: Likewise.
        memory_bytes: The memory that a request may use beside what the process begins with.
        memory_a_unit: More memory for each byte of the input.
        seconds: The processor time of a request.
        seconds_a_unit: More time for each byte, or character, of it.
    """

    module: str
    packages: tuple[str, ...]
    memory_bytes: int
    seconds: float
    memory_a_unit: int = 0
    seconds_a_unit: float = 0.0

    def process(self, size: int = 0, first: Callable[[], Any] | None = None) -> ConfinedProcess:
        """A process for inputs of a size; `first` as for `ConfinedProcess`."""
        memory_bytes = self.memory_bytes + self.memory_a_unit * size
        return ConfinedProcess(self.module, self.packages, memory_bytes, first)

    def seconds_for(self, size: int) -> float:
        """The processor time of a request about so much input."""
        return self.seconds + self.seconds_a_unit * size


@dataclass(frozen=True)
class Branch:
    """Limits of a fork of a process for a request.

    Attributes:
        memory_bytes: The memory beyond what it begins with.
        seconds: The processor time.
    """

    memory_bytes: int
    seconds: float


TEMPLATE = Reader(
    "mlx_mmfree.tokenizer.chat_sandbox", ("jinja2", "markupsafe"), 256 * MB, seconds=2.0
)
"""A chat template with a conversation."""

TOKENIZER_FILE = Reader(
    "mlx_mmfree.tokenizer.tokenizer_engine", ("tokenizers",), 1024 * MB, seconds=10.0
)
"""A `tokenizer.json` of an unusual layout."""

TOKENIZED_TEXT = Reader(
    TOKENIZER_FILE.module,
    TOKENIZER_FILE.packages,
    TOKENIZER_FILE.memory_bytes,
    seconds=2.0,
    seconds_a_unit=1 / 50_000,
)
"""A text that such a file encodes, in the same process."""

GRAMMARS = Reader(
    "mlx_mmfree.server.tool_calls.grammar_server", ("llguidance",), 1024 * MB, seconds=0.0
)
"""A vocabulary, from which the process of each schema of a request is forked."""

COMPILATION, FOLLOWING = Branch(100 * MB, seconds=1.0), Branch(50 * MB, seconds=0.1)
"""A schema that is compiled, and a token of a text that follows it."""

BODY = Reader(
    "mlx_mmfree.server.bodies.body_server",
    ("pydantic", "starlette", "typing_extensions"),
    1024 * MB,
    seconds=10.0,
    memory_a_unit=32,
    seconds_a_unit=2e-6,
)
"""A large body of a request."""

# pages of texts grow to a few times their size, and are held a few times over
PARQUET_PART = Reader(
    "mlx_mmfree.training.corpus.parquet_server",
    ("pyarrow",),
    1024 * MB,
    seconds=60.0,
    memory_a_unit=16,
)
"""A part of a parquet file."""
