"""MLX's own Metal kernels, from its files, as texts that the emulator and the compiler take."""

import importlib.util
import re
from pathlib import Path


def text_of(file: str) -> str:
    """One of MLX's files of Metal kernels, without comments."""
    found = importlib.util.find_spec("mlx")
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0], "include/mlx/backend/metal/kernels")
    return re.sub(r"//[^\n]*", "", (folder / file).read_text())


def product_of_codes() -> str:
    """The parts of `qmv_fast_impl`, the product of few rows with a matrix of codes."""
    text = text_of("quantized.h")
    shared = text[
        text.index("MLX_MTL_CONST int SIMD_SIZE") : _template_of(text, "void dequantize(")
    ]
    product = text[_template_of(text, "void qmv_fast_impl(") :]
    product = product[: product.index("\n}\n") + 3]
    # as text that C++14 knows too
    words = {
        r"\bMLX_MTL_CONST\b": "constant constexpr",
        r"\bMETAL_FUNC\b": "inline",
        r"\bif constexpr\b": "if",
        r"\buint16_t\b": "ushort",
        r"\bthread (?=\w)": "",
    }
    for pattern, word in words.items():
        shared, product = (re.sub(pattern, word, part) for part in (shared, product))
    return shared + product


def _template_of(text: str, function: str) -> int:
    return text.rindex("template <", 0, text.index(function))
