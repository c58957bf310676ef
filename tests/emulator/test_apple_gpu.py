"""How few instructions the kernels take on an Apple GPU, as `mlx_mmfree/ops/README.md` shows."""

import pytest

from mlx_mmfree.evaluation.kernel_slots import FILE
from mlx_mmfree.ops.bit_linear.definition import Variant
from mlx_mmfree.ops.bit_linear.metal_tuning import (
    MOST_OUTPUTS,
    MOST_OUTPUTS_OF_MORE_ROWS,
    SIMD_GROUPS,
    instructions,
)
from tests.emulator import apple_gpu, yardstick
from tests.emulator.counts import bit_linear, codes, experts, products, small_layers, widest
from tests.emulator.yardstick import Row

pytestmark = pytest.mark.slow
if reason := apple_gpu.unavailable():
    pytest.skip(reason, allow_module_level=True)

# of whole kernels for 2560 and 6912 inputs, a weight and row; a little more than was counted
WHOLE = {
    "`bit_linear`, 1 row, 4 outputs": (2.8, 2.55),
    "`bit_linear`, 1 row, 8 outputs": (2.35, 2.2),
    "`bit_linear`, 1 row, 10 outputs": (2.2, 2.1),
    "`bit_linear`, 2 rows, 8 outputs": (1.9, 1.8),
    "`bit_linear`, 3 rows, 4 outputs": (2.1, 1.9),
    "`bit_linear`, 4 rows, 4 outputs": (1.95, 1.8),
    "`bit_linear`, 5 rows, 4 outputs": (1.9, 1.8),
    "`bit_linear`, 1 row, without halves, 4 outputs": (4.3, 4.1),
    "`ternary_matmul`, 1 row": (3.2,),
    "`ternary_matmul`, 4 rows": (2.1,),
}
# what each adds to one row with 8 outputs
ADDED = {"gate `silu`": 0.3, "gate `relu2`": 0.2, "norm": 0.15, "own norm": 0.15}
# slots of issue of the hot loop, an element
SLOTS = {
    "`mlgru_step`": 36,
    "`linear_scan`": 4,
    "`rms_norm_quantize`": 10,
    "`gated_rms_norm`": 18,
}
INSTRUCTION_CACHE = 12 * 1024


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.name: row for row in yardstick.rows()}


def test_whole_kernels(rows: dict[str, Row]) -> None:
    for name, most in WHOLE.items():
        for count, limit in zip(rows[name].whole, most, strict=True):
            # a mask for two trits and a product for each
            assert 1.25 < count <= limit, (name, count)


def test_what_gates_and_norms_add(rows: dict[str, Row]) -> None:
    plain = rows["`bit_linear`, 1 row, 8 outputs"].whole
    for name, most in ADDED.items():
        for count, without in zip(
            rows[f"`bit_linear`, 1 row, {name}, 8 outputs"].whole, plain, strict=True
        ):
            assert 0 < count - without <= most, (name, count)


def test_slots_of_an_element(rows: dict[str, Row]) -> None:
    for name, most in SLOTS.items():
        assert 0 < rows[name].slots <= most, (name, rows[name].slots)


def test_the_product_takes_fewer_than_others(rows: dict[str, Row]) -> None:
    whole = rows["`bit_linear`, 1 row, 4 outputs"].whole
    # theirs without what is around the loop
    assert max(whole) < rows["MLX's `qmv_fast`, product alone"].loop


def test_attention_of_a_token_takes_fewer_than_that_of_mlx(rows: dict[str, Row]) -> None:
    most = rows["MLX's `sdpa_vector`, with a mask"].loop
    for kind in ("", ", gated", ", in parts"):
        assert rows[f"`attention_step`{kind}"].loop <= 9.5 < most
    assert rows["`attention_step`, bfloat16"].loop <= 11.5
    assert rows["`attention_step`, with a window"].loop <= 15


def test_all_lies_in_registers_and_in_the_instruction_cache(rows: dict[str, Row]) -> None:
    for name, row in rows.items():
        if name.startswith("MLX's"):
            continue
        assert (row.code.stack, row.code.spills) == (0, 0), name
        assert row.code.bytes <= INSTRUCTION_CACHE, name
        # a step of the delta rule is launched with 256
        assert row.code.threads >= (256 if "delta_rule" in name else 512), name
    for kind, code in yardstick.other_kernels():
        assert (code.stack, code.spills) == (0, 0), kind


def test_a_step_of_the_delta_rule_takes_fewer_than_that_of_mlx_lm(rows: dict[str, Row]) -> None:
    pytest.importorskip("mlx_lm")
    for gate in ("a gate for each head", "for each key"):
        own, others = rows[f"`gated_delta_rule`, {gate}"], rows[f"mlx-lm's delta rule, {gate}"]
        assert own.loop <= 14.6 <= others.loop


def test_a_rotation_with_signs_takes_fewer_than_one_of_mlx_without(rows: dict[str, Row]) -> None:
    assert rows["`hadamard`"].loop < rows["MLX's `hadamard_n`, without signs"].loop
    for kind, most in (("norm", 65), ("sum", 76), ("gate", 42)):
        assert rows[f"`hadamard_of_{kind}`"].loop <= most


def test_small_matrices_keep_all_cores_busy() -> None:
    by_name = {linear.name: linear for linear in small_layers.LAYER}
    small = [by_name[name] for name in ("gates", "output", "down")]
    # with the launches, of what it was with threadgroups of 8 SIMD groups of 4 or 8 outputs
    assert small_layers.share(80, small) <= 0.75
    for cores in small_layers.CORES:
        for linear in small_layers.LAYER:
            assert small_layers.share(cores, [linear]) <= 1, (linear.name, cores)


def test_norm_and_codes_in_a_launch_of_their_own_would_take_longer() -> None:
    for linear in small_layers.LAYER:
        for cores in small_layers.CORES:
            saved = small_layers.work(linear, cores).instructions
            saved -= small_layers.work_without_norms(linear, cores)
            most = small_layers.INSTRUCTIONS_OF_A_LAUNCH
            # of the most threadgroups on the fewest cores, 5 %, before that launch's own work
            if (linear.name, cores) == ("gate and up", 8):
                most += 0.052 * small_layers.work(linear, cores).instructions
            assert saved <= most, (linear.name, cores)


@pytest.mark.parametrize("rows", range(1, 6))
def test_texts_are_chosen_by_about_what_they_take(rows: int) -> None:
    most = MOST_OUTPUTS.get(rows, MOST_OUTPUTS_OF_MORE_ROWS)
    for options in (
        bit_linear.options(),
        bit_linear.options(has_norm=True, eps=1e-6),
        bit_linear.options(gate="silu", eps=1e-6),
    ):
        for outputs in {1, most // 2, most}:
            count = bit_linear.of(rows, outputs, options)
            assert (count.code.stack, count.code.spills) == (0, 0)
            assert count.code.threads >= 32 * max(SIMD_GROUPS)
            for dims in (1024, 2560, 6912):
                about = instructions(Variant.of(options), rows, dims, outputs, 8)
                assert about == pytest.approx(count.of_a_threadgroup(dims), rel=0.08)


def test_experts_take_as_many_as_one_matrix(rows: dict[str, Row]) -> None:
    assert rows["`gather_ternary_matmul`, 2 rows"].loop <= 1.75
    assert rows["`gather_affine_matmul`, 2 rows"].loop <= 2.15


def test_prompts_of_experts() -> None:
    for tokens in experts.TOKENS:
        for counts in (experts.even(tokens), experts.skewed(tokens)):
            assert 1.25 < experts.of_a_weight(counts, False) <= 2.4
            assert experts.of_a_weight(counts, True) <= 2.7


def test_the_page_holds_the_table(rows: dict[str, Row]) -> None:
    assert yardstick.table(list(rows.values())) in yardstick.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "instructions"),
    [
        # load, product, addition of the counter, comparison, jump and wait
        ("sum = fma(x[k], 2.0f, sum);", (5, 8)),
        ("sum = fma(x[k], precise::exp(x[k]), sum);", (7, 11)),
    ],
)
def test_instructions_of_a_loop(body: str, instructions: tuple[int, int]) -> None:
    text = f"""
[[kernel]] void custom_kernel_trial(
    const device float* x [[buffer(0)]],
    const constant int& size [[buffer(1)]],
    device float* out [[buffer(2)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {{
    float sum = 0.0f;
    for (int k = thread_index_in_simdgroup; k < size; k += 32) {{ {body} }}
    out[thread_index_in_simdgroup] = sum;
}}
"""
    code = apple_gpu.machine_code("custom_kernel_trial", text, (32, 1, 1))
    least, most = instructions
    assert least <= code.hot.instructions <= most
    assert code.spills == 0


# of whole kernels for 4096 and 5120 inputs, a weight and row, by the bits of a code
OF_CODES = {1: 2.4, 2: 2.5, 6: 3.1}


@pytest.mark.parametrize("bits", OF_CODES)
def test_products_with_codes(bits: int) -> None:
    one = codes.own(bits, 1)
    assert max(one.whole(4096), one.whole(5120)) <= OF_CODES[bits] < codes.of_mlx(bits).loop
    if bits == 2:
        assert one.whole(2048) <= 2.6
    counted = [one, *(codes.own(bits, rows) for rows in range(2, codes.metal.MOST_ROWS))]
    for rows, count in enumerate(counted, 1):
        assert (count.code.stack, count.code.spills) == (0, 0), count.name
        assert count.code.bytes <= INSTRUCTION_CACHE, count.name
        if rows > 1:
            most = 2.2 if bits <= 2 else OF_CODES[bits]
            assert max(count.whole(4096), count.whole(5120)) <= most, count.name


def test_a_product_with_codes_without_halves_takes_fewer_than_that_of_mlx() -> None:
    for bits in OF_CODES:
        assert codes.own(bits, 1, are_halves=False).loop < codes.of_mlx(bits).loop


def test_the_package_holds_the_slots_of_its_kernels() -> None:
    assert products.as_json(products.counted()) == FILE.read_text(encoding="utf-8")


def test_what_the_widest_shapes_take() -> None:
    for name, threads, code in widest.counted():
        assert threads <= code.threads, name
        assert code.shared <= widest.MOST_MEMORY, name
        assert (code.stack, code.spills) == (0, 0), name
        assert code.bytes <= INSTRUCTION_CACHE, name
