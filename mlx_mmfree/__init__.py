"""Language models without dense matrix multiplication, on MLX.

    from mlx_mmfree import generate, load

    model, tokenizer = load("ridger/MMfreeLM-370M")
    print(generate(model, tokenizer, "Once upon a time"))

Networks of your own take the building blocks: `BitLinear`, `GQA`, `MLGRU` and `SwiGLU`.
"""

from .channel_mixers import SwiGLU
from .generation import batch_generate, generate, stream_generate
from .hub import load, load_model, load_tokenizer, save_model
from .layers import BitLinear
from .platform import blas as _blas
from .token_mixers import GQA, MLGRU
from .version import __version__

__all__ = [
    "GQA",
    "MLGRU",
    "BitLinear",
    "SwiGLU",
    "__version__",
    "batch_generate",
    "generate",
    "load",
    "load_model",
    "load_tokenizer",
    "save_model",
    "stream_generate",
]

# MLX's own BLAS on Linux is slow.
_blas.bind()
