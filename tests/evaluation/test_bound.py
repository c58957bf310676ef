"""Bounds of chips: each lies above what was published for the chip, and not far above."""

import re
from functools import cache

import pytest
from mlx.utils import tree_unflatten

from mlx_mmfree.errors import UsageError
from mlx_mmfree.evaluation import bound
from mlx_mmfree.evaluation.audit import Certificate, certify
from mlx_mmfree.evaluation.audit.skeleton import presets, skeleton
from mlx_mmfree.evaluation.kernel_slots import Around, KernelSlots, counts, fewest_slots
from mlx_mmfree.layers import PackedLinear
from mlx_mmfree.layers.matrix import matrices
from mlx_mmfree.models import Decoder
from tests.evaluation.audit_models import needs_graphs
from tests.hub.test_published_memory import MAPLE

# Statements of their sources: tokens a second in decoding and in a prompt, 0 where none was given.
PUBLISHED = [
    # mlx-lm pull request 219, with a head of 16 bits
    ("bitnet-2b-4t", "M3 Max", 105, 0),
    ("bitnet-2b-4t", "M2 Ultra", 150, 0),
    # ik_llama.cpp pull requests 107 and 108
    ("bitnet-b1.58-3b", "M2 Max 30", 94.7, 702),
    # Prism ML's page and its Bonsai-demo, issue 108
    ("ternary-bonsai-1.7b", "M4 Max", 442, 4623),
    ("ternary-bonsai-1.7b", "M3 Pro", 165, 1349),
    ("ternary-bonsai-8b", "M4 Pro", 82, 0),
    ("ternary-bonsai-8b", "M3 Pro", 51.3, 288),
    # rMLX issue 177, after 4,096 tokens
    ("ternary-bonsai-8b", "M5 Max", 133, 0),
    ("bonsai-8b of 1 bit", "M4 Pro", 117, 487),
    # Bonsai-demo, issues 100, 133, 159 and 201; of two speeds of a chip the faster program's
    ("ternary-bonsai-27b", "M5 Pro", 29.5, 466),
    ("ternary-bonsai-27b", "M4 Pro", 24.8, 127),
    ("ternary-bonsai-27b", "M1 Pro", 15.0, 65),
    ("ternary-bonsai-27b", "M3 Max 30", 24.3, 162),
    ("ternary-bonsai-27b", "M1 Max 24", 14.1, 97),
    # mlx-serve issue 457 and Rapid-MLX issue 3552, with rotated weights
    ("ternary-bonsai-27b", "M5 Max", 42.6, 0),
    ("ternary-bonsai-27b", "M4 Max", 34.0, 157),
    # the README of deepgrove's mlx-lm-deepgrove
    ("maple-20b-a1b", "M4", 169, 1075),
    ("maple-20b-a1b", "M5 Pro", 387, 3511),
]
NOT_FAR = 2.3
_ONE_BIT = presets()["ternary-bonsai-8b"] | {"quantization": {"group_size": 128, "bits": 1}}


def maple() -> Decoder:
    """Attention and experts ternary by row, embedding and head in codes of 4 bits, as published."""
    model: Decoder = skeleton(MAPLE | {"quantization": {"group_size": 64, "bits": 4}})
    packed = [
        (path, PackedLinear(matrix.input_dims, matrix.output_dims, has_row_scales=True))
        for path, matrix in matrices(model).items()
        if path.endswith("_proj")
    ]
    model.update_modules(tree_unflatten(packed))
    return model


@cache
def token_of(name: str, position: int = 512) -> Certificate:
    if name.startswith("maple"):
        return certify(maple(), position)
    config = presets().get(name) or _ONE_BIT
    return certify(skeleton(config), position)


@pytest.mark.sample(2)
@needs_graphs
@pytest.mark.parametrize(("model", "chip", "decoding", "prompt"), PUBLISHED)
def test_published_metrics_lie_below(model: str, chip: str, decoding: float, prompt: float) -> None:
    token, of = token_of(model), bound.chip(chip)
    decodes = bound.decoding_bound(token, of).tokens_per_second
    assert decodes > decoding
    is_near = not {"Max", "Ultra"} & set(chip.split())
    if is_near:
        assert decodes < NOT_FAR * decoding
    if (found := bound.prompt_bound(token, of, 512)) is None:
        assert of.name.startswith("M5")
        return
    assert found.tokens_per_second > prompt
    if prompt and is_near:
        assert found.tokens_per_second < NOT_FAR * prompt


@needs_graphs
def test_the_slowest_binds() -> None:
    """By hand: of 8B, 7.57e9 weights of 2.25 bits with their scales and biases, 36 layers, each of which
    reads and writes a tail of 64 keys and values of 8 heads of 128 dims."""
    token = token_of("ternary-bonsai-8b", 1)
    weights = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288) + 4096 * 151936
    read = weights * 2.25 / 8 + 36 * 2 * 64 * 2 * 8 * 128 * 2
    m1 = bound.decoding_bound(token, bound.chip("M1"))
    assert m1.seconds["bandwidth"] == pytest.approx(read / 68.25e9, rel=2e-3)
    # what a step reads and writes, and what the next one writes meanwhile
    assert token.on_metal.held_tails == 36 * 3 * (2 * 64 * 8 * 128 * 2)
    eight = next(
        kernel
        for kernel in counts().kernels
        if kernel.product == "codes of 2 bits" and kernel.outputs == 8
    )
    rounds = {4096: 4, 12288: 12}
    groups = {dims: eight.outside + count * eight.rounds[1024] for dims, count in rounds.items()}
    narrow = 36 * (2 * 4096 + 2 * 1024 + 2 * 12288) + 151936
    lanes = 32 / 8 * (narrow * groups[4096] + 36 * 4096 * groups[12288])
    assert m1.seconds["instructions"] == pytest.approx(lanes / (8 * 128 * 1.278e9), rel=1e-3)
    # of a weight, the hot loop and what is around it
    assert 2.2 < lanes / weights < 2.6
    assert m1.binds == "bandwidth"
    prompt = bound.prompt_bound(token, bound.chip("M1"), 512)
    in_blocks = weights - 4096 * 151936
    macs = 512 * in_blocks + 4096 * 151936
    assert prompt is not None
    assert prompt.seconds["multiply-adds"] == pytest.approx(macs / (8 * 128 * 1.278e9), rel=1e-6)


def test_a_kernel_takes_whole_rounds_and_threadgroups() -> None:
    kernel = KernelSlots("x", outputs=4, simd_groups=[2], outside=100, rounds={512: 10, 4096: 7})
    own = 100 + 2 * 10 + 7
    assert kernel.of_a_simd_group(513) == own
    # 9 outputs take two threadgroups
    assert kernel.of_all_lanes(513, 9) == 2 * 2 * 32 * own
    around = Around("codes", outside=5, each=0.25)
    assert kernel.of_all_lanes(513, 9, around) == 2 * 32 * (2 * (own + 5) + 0.25 * 513)
    # a larger one takes as many for outputs that it has not
    larger = kernel._replace(simd_groups=[2, 4])
    assert larger.of_all_lanes(513, 9) == 4 * 32 * own
    assert larger.of_all_lanes(513, 17) == 6 * 32 * own


def test_gates_and_norms_add_to_a_product() -> None:
    plain, *more = (
        fewest_slots("BitLinear", 2816, 1024, around)
        for around in ("codes", "norm, codes", "norm, own norm, codes", "silu, own norm, codes")
    )
    assert all(1.01 * plain < each < 1.4 * plain for each in more)


def test_products_that_were_not_counted_take_no_slots() -> None:
    assert fewest_slots("codes of 3 bits", 4096, 4096) == 0
    assert fewest_slots("codes of 2 bits", 4096, 4096) > 2.2 * 4096**2


@needs_graphs
def test_what_is_not_known_is_left_out() -> None:
    token = token_of("ternary-bonsai-1.7b")
    m3, m5 = bound.chip("M3 Pro"), bound.chip("M5")
    assert "instructions" not in bound.decoding_bound(token, m3).seconds
    assert bound.prompt_bound(token, m3, 512).binds == "multiply-adds"
    assert bound.prompt_bound(token, m5, 512) is None


def test_names_of_chips() -> None:
    assert bound.chip("Apple M2 Max").cores == 38
    assert bound.chip("m2 max 30") == bound.Chip("M2 Max", 30, 400e9, 1.398e9, True)
    for wrong in ("M2 Max 31", "M9", ""):
        with pytest.raises(UsageError, match=re.escape(f"but got {wrong!r}")):
            bound.chip(wrong)
    # one that is not known yet is most like the newest
    for wrong, meant in (("M9", "M5"), ("apple m2max", "M2 Max")):
        with pytest.raises(UsageError, match=rf"Did you mean '{meant}'\?"):
            bound.chip(wrong)


@needs_graphs
def test_products_of_a_token_are_those_of_their_kernels() -> None:
    """Gates and norms around each product of a MatMul-free layer, and the kernels of experts."""
    token = token_of("mmfreelm-370m", 1)
    around = {each.path.rpartition(".")[2]: each.around for each in token.products}
    assert around["input_proj"] == around["gate_up_proj"] == "norm, own norm, codes"
    assert around["down_proj"] == "silu, own norm, codes"
    assert all(each.around in {None, *counts().around} for each in token.products)
    maple = token_of("maple-20b-a1b")
    chosen = {each.operation for each in maple.products if each.is_chosen}
    assert chosen == {"GatherTernaryMatmul"}
    in_codes = certify(skeleton(MAPLE | {"quantization": {"group_size": 64, "bits": 2}}), 1)
    expert = next(each for each in in_codes.products if each.is_chosen and each.outputs > 64)
    assert expert.storage == "codes of 2 bits"
    own = fewest_slots("GatherAffineMatmul", expert.inputs, expert.outputs)
    assert bound._slots(expert) == expert.times * own > 0
    # embedding and head in codes of 4 bits, left to MLX, take as much as its kernel
    (head,) = (each for each in maple.products if each.storage == "codes of 4 bits")
    assert bound._slots(head) > 4 * head.inputs * head.outputs
