"""The counts of kernels with instructions for matrices follow the texts that are launched."""

import pytest

from mlx_mmfree.ops.inspection import kernel_texts
from tests.emulator import compiler
from tests.emulator.counts import matrices

if reason := compiler.unavailable():
    pytest.skip(reason, allow_module_level=True)

# products, loads and barriers of a round
FORWARD, KEYS, QUERIES, TILES = (72, 69, 5), (64, 68, 5), (48, 52, 5), (64, 32, 2)
COUNTS = {
    **dict.fromkeys(("attention_forward", "attention_forward_mask"), FORWARD),
    **dict.fromkeys(("attention_forward_sinks", "attention_forward_mask_sinks"), FORWARD),
    **dict.fromkeys(("attention_key_gradient", "attention_key_gradient_mask"), KEYS),
    **dict.fromkeys(("attention_query_gradient", "attention_query_gradient_mask"), QUERIES),
    **dict.fromkeys((f"bit_linear_tiles_{count}" for count in (1, 2, 3, 4)), TILES),
    "ternary_matmul_prefill": TILES,
}


def test_every_kind() -> None:
    assert {kind: tuple(counts) for kind, *counts in matrices.counted()} == COUNTS


def test_another_text_has_another_count() -> None:
    texts = kernel_texts()
    text = next(text for name, text in texts.items() if "ternary_matmul_prefill__float16" in name)
    product = "simdgroup_multiply_accumulate("
    at = text.index(product)
    line = text[at : text.index(";", at) + 1]
    # once more for each
    (code,) = compiler.machine_codes([text.replace(line, f"{{ {line} {line} }}", 1)])
    assert matrices.in_text("x", code).products == 2 * COUNTS["ternary_matmul_prefill"][0]
