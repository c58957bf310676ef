"""The benchmark as it runs on Metal, with its kernels emulated at tiny shapes."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import product_tasks
import products
import pytest
from products import BenchmarkSettings, benchmark, report_lines

from mlx_mmfree.evaluation import benchmark as measuring
from mlx_mmfree.evaluation.benchmark import HALF, READ
from mlx_mmfree.models import find
from mlx_mmfree.ops.backend import self_check
from mlx_mmfree.platform import memory_reader
from tests.emulator.emulator import Emulator

pytestmark = pytest.mark.metal

OUTPUTS, INPUTS = 64, 128
PEERS = ("MLX 2-bit", "MLX 4-bit", "MLX LM BitNet")
SETTINGS = BenchmarkSettings(
    processes=1,
    rounds=1,
    walk_bytes=1,
    shapes=((OUTPUTS, INPUTS),),
    rows=(1, 3),
    heads=((70, 64),),
    head_bits=(4, 16),
)


@pytest.fixture
def on_gpu(emulated: Emulator, here: Any, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    """A GPU whose own kernels and mlx-lm's are emulated, and each queue a single pass."""
    for module in (measuring, product_tasks):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(self_check, "_checks", {})
    monkeypatch.setattr(memory_reader, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "_HALF_DIMS", 16)
    monkeypatch.setattr(products, "measure", here)
    module = product_tasks._mlx_lm_module()
    kernel = module._bitlinear_kernel
    monkeypatch.setattr(module, "_bitlinear_kernel", lambda **call: emulated.launch(kernel, **call))
    return emulated


def test_products_of_a_gpu(on_gpu: Emulator) -> None:
    [machine, report] = benchmark(SETTINGS, [0], training=False)
    assert machine.machine["backend"] == "metal"
    limit = report.machine["limits"]["0"]
    assert limit["arithmetic"] == HALF and "Metal kernel" in limit["read_method"]
    assert limit["bytes_per_second"] > 0 and limit["macs_per_second"] > 0
    assert "left_out" not in report.machine and "switched_off" not in report.machine
    limits = {figure.records[0].name: figure.records[0].limit for figure in report.metrics}
    size = f"{OUTPUTS} x {INPUTS}"
    products = {f"{name} {size}": (1, 3) for name in ("ternary", *PEERS)}
    expected = {
        f"{name}, {rows} row{'s' * (rows > 1)}": READ if rows == 1 else HALF
        for name, numbers in products.items()
        for rows in numbers
    }
    assert limits == expected | {f"head 70 x 64, {bits} bits, 1 row": READ for bits in (4, 16)}
    assert {figure.records[0].threads for figure in report.metrics} == {0}
    own = f"ternary {size}, 3 rows"
    assert [ratio.other for ratio in report.ratios if ratio.name == own] == list(PEERS)
    shown = "\n".join(report_lines(report))
    assert "limit: fastest float16 products" in shown and "times as fast as MLX LM BitNet" in shown
    json.dumps(report.to_json())


def test_what_is_launched(on_gpu: Emulator) -> None:
    product_tasks.measure_products([(OUTPUTS, INPUTS)], [1], [], [], 1, 1)
    on_gpu.records.clear()
    product_tasks.measure_products([(OUTPUTS, INPUTS)], [1], [], [], 1, 1)
    names = [
        record.kernel.removeprefix("custom_kernel_").split("__")[0] for record in on_gpu.records
    ]
    counts = {name: names.count(name) for name in names}
    # two copies of a matrix; each measurement has a pass that does not count, and so has each queue
    assert counts["bit_linear_1"] == counts["bitlinear_matmul"] == 2 * 2 * 2
    reads = [record.loaded["words"] for record in on_gpu.records if "plain_read" in record.kernel]
    weights = OUTPUTS * INPUTS // 4
    # ours, MLX's of 2 and 4 bits, and mlx-lm's
    assert reads[-4 * 8 :] == [weights] * 16 + [2 * weights] * 8 + [weights] * 8


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """The emulator needs values, and arrays have none while a step is traced."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("on_gpu", "uncompiled")
def test_a_model_of_a_gpu() -> None:
    settings = replace(SETTINGS, prompt_tokens=(9,), positions=(2,), decoded_tokens=1)
    choice = {"name": "tiny", "config": {"model_type": "hgrn_bit", **find("hgrn_bit").tiny}}
    [_, report] = benchmark(settings, [0], products=False, training=False, models=[choice])
    records = [figure.records[0] for figure in report.metrics]
    assert [(record.name, record.limit, record.threads) for record in records] == [
        ("tiny: prefill of 9", HALF, 0),
        ("tiny: decode after 2", READ, 0),
    ]
    assert all(figure.share > 0 for figure in report.metrics)
    assert "GPU" in "".join(report_lines(report))


def test_a_switched_off_kernel_is_reported(on_gpu: Emulator) -> None:
    on_gpu.edit = lambda text: text.replace(
        "word < filled; word += 32", "word < filled; word += 31"
    )
    with pytest.warns(RuntimeWarning, match="bit_linear"):
        notes = product_tasks.measure_products([(OUTPUTS, INPUTS)], [1], [], [], 1, 1)["notes"]
    [(name, fault)] = notes["switched_off"].items()
    assert name.startswith("bit_linear") and "wrong values" in fault


def test_mlx_lm_multiplies_the_codes(on_gpu: Emulator) -> None:
    layer = product_tasks.peers()[-1].make(8, 32, mx.float32)
    codes = np.array(layer.weight)
    trits = np.concatenate([(codes >> 2 * index) & 3 for index in range(4)]).astype(np.float32) - 1
    assert set(np.unique(trits)) == {-1, 0, 1}
    x = mx.random.normal((2, 32))
    want = np.array(x) @ trits.T * 32**-0.5
    assert np.allclose(np.array(layer(x)), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("missing", ["package", "file"])
def test_without_mlx_lm(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "package":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setattr(product_tasks, "_MLX_LM_FILE", product_tasks.Path("models/none.py"))
        monkeypatch.delitem(sys.modules, "mlx_lm.models.none", raising=False)
    product_tasks._mlx_lm_module.cache_clear()
    assert product_tasks.mlx_lm_missing()
    assert [peer.name for peer in product_tasks.peers()] == list(PEERS[:2])
    product_tasks._mlx_lm_module.cache_clear()
