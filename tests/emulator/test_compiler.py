"""The checks of kernels' texts see what Metal's compiler would refuse, and count what there is."""

import pytest

from tests.emulator import compiler
from tests.emulator.compiler import KernelError

if reason := compiler.unavailable():
    pytest.skip(reason, allow_module_level=True)

TEXT = """
[[kernel]] void custom_kernel_trial(
    const device float* x [[buffer(0)]],
    const constant int& size [[buffer(1)]],
    const device bfloat16_t* small [[buffer(2)]],
    device float* out [[buffer(3)]],
    uint n [[thread_position_in_grid]]) {{
    threadgroup float shared[32];
    {}
}}
"""
SOUND = {
    "plain": "out[n] = max(x[n], 0.0f);",
    "bfloat": "out[n] = static_cast<float>(small[n]);",
    "vectors": "float4 y = fma(float4(x[n]), float4(2.0f), as_type<float4>(uint4(7u))); out[n] = y[0];",
    "threadgroup": "shared[n % 32] = x[n]; out[n] = *(shared + 1);",
    "select": "out[n] = select(1.0f, 2.0f, n > 3u);",
}
FAULTS = {
    "pointer without address space": "const float* y = x; out[n] = *y;",
    "pointer to another address space": "const device float* y = shared; out[n] = *y;",
    "constant as device": "const device int* y = &size; out[n] = *y;",
    "store to an input": "x[n] = 0.0f;",
    "bfloat from a float": "bfloat16_t y = x[n]; out[n] = static_cast<float>(y);",
    "bfloat from a whole number": "bfloat16_t y = 1; out[n] = static_cast<float>(y);",
    "bfloat to a float": "float y = small[n]; out[n] = y;",
    "sum of bfloat and float": "out[n] = small[n] + x[n];",
    "max of two types": "out[n] = max(x[n], 0);",
    "min of signs": "out[n] = min(n, size);",
    "clamp of two types": "out[n] = clamp(x[n], 0, 1.0f);",
    "abs of a bfloat as a float": "out[n] = abs(small[n]);",
    "select by a number": "out[n] = select(x[n], 1, n > 3u);",
    "double": "out[n] = static_cast<float>(double(x[n]));",
    "as_type of another size": "out[n] = as_type<float>(static_cast<ushort>(n));",
    "if constexpr": "if constexpr (true) out[n] = 0.0f;",
    "a variable named thread": "const uint thread = n; out[thread] = 0.0f;",
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_text(name: str) -> None:
    compiler.check([TEXT.format(SOUND[name])])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAULTS)
def test_faulty_text(name: str) -> None:
    with pytest.raises(KernelError, match="does not compile"):
        compiler.check([TEXT.format(SOUND["plain"]), TEXT.format(FAULTS[name])])


LOOP = """
    float4 sum = float4(0.0f);
    for (int k = 0; k < size; k++) {{ {} }}
    out[n] = sum[0] + sum[1] + sum[2] + sum[3];
"""


@pytest.mark.parametrize(
    ("body", "numbers"),
    # load and product
    [("sum[0] = fma(x[k], 2.0f, sum[0]);", 2), ("sum = fma(float4(x[k]), sum, sum);", 5)],
)
def test_count_of_a_loop(body: str, numbers: int) -> None:
    [code] = compiler.machine_codes([TEXT.format(LOOP.format(body))])
    # at most an addition, a comparison and a jump lead to the next step
    assert compiler.hot_loop(code).count - numbers in (1, 2, 3)
    assert not compiler.hot_loop(code).slow


@pytest.mark.parametrize(
    ("body", "slow"),
    [
        ("sum[0] += static_cast<float>(n >> k);", "lsr"),
        ("sum[0] += 1.0f / x[k];", "fdiv"),
        ("sum[0] += static_cast<float>(static_cast<int>(n) / (k + 1));", "sdiv"),
        ("sum[0] += precise::exp(x[k]);", "bl"),
    ],
)
def test_slow_instructions_are_seen(body: str, slow: str) -> None:
    [code] = compiler.machine_codes([TEXT.format(LOOP.format(body))])
    assert [each.split("\t")[0] for each in compiler.hot_loop(code).slow] == [slow]
