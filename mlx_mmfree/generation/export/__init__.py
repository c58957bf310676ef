"""One step of decoding as MLX's exported function, for programs without this library."""

from .write import Export as Export
from .write import export_step as export_step
