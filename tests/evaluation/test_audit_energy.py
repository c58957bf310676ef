"""The estimate of energy follows the published values, and its dense twin has float16 matrices."""

import pytest

from mlx_mmfree.evaluation.audit import certify
from mlx_mmfree.evaluation.audit.certificate import energy
from mlx_mmfree.evaluation.audit.skeleton import skeleton
from mlx_mmfree.models import find
from mlx_mmfree.ops.backend.cost import work
from tests.evaluation.audit_models import BACKENDS, needs_graphs, on, tiny

MILLION = 10**6


@pytest.mark.parametrize(
    ("counts", "bits", "picojoules"),
    [
        # Horowitz, ISSCC 2014, figure 1.1.9
        ({"multiply": MILLION}, 32, 3.7),
        ({"multiply": MILLION}, 16, 1.1),
        ({"add": MILLION}, 32, 0.9),
        ({"add": MILLION}, 16, 0.4),
        ({"integer": MILLION}, 8, 0.03),
        ({"integer": MILLION}, 32, 0.1),
        ({"integer": MILLION}, 64, 0.1),
        ({"other": MILLION}, 32, 0),
    ],
)
def test_metrics_of_operations(counts: dict[str, int], bits: int, picojoules: float) -> None:
    assert energy(work(**counts, bits=bits), 0, 0).arithmetic == pytest.approx(picojoules)


def test_metrics_of_memory() -> None:
    found = energy(work(), 8 * MILLION, 16 * MILLION)
    # 1.3 nJ for 64 bits of DRAM, and 20 pJ for 64 bits of a cache of 32 kB
    assert (found.memory, found.cache) == pytest.approx((1300, 40))
    assert found.total == pytest.approx(1340)


@needs_graphs
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_twin_has_the_same_shapes_in_float16(backend: str) -> None:
    with on(backend):
        found = certify(tiny("bitnet"), 4)
    macs = sum(each.macs for each in found.products if each.kind != "activations")
    others = found.twin_work["multiply", 32]
    assert found.twin_work["multiply", 16] == found.twin_work["add", 16] == macs
    twin = found.twin_traffic.weights_read
    norms = 4 * (2 * (32 + 32 + 32 + 48) + 32)
    # a row of the embedding, and beside it scales and single numbers
    assert 0 <= twin - 2 * macs - norms - 4 * 32 < 400
    assert 0 < others <= found.work["multiply", 32]
    assert found.twin_energy.total > found.energy.total


@needs_graphs
def test_a_dense_model_in_float16_is_its_own_twin() -> None:
    architecture = find("llama")
    config = {"model_type": "llama", **architecture.tiny, "torch_dtype": "float16"}
    found = certify(skeleton(config), 4)
    assert found.is_matmul_free is False
    assert found.twin_traffic == found.traffic and found.twin_work.total() == found.work.total()


@needs_graphs
def test_a_skeleton_has_the_certificate_of_the_model() -> None:
    config = {"model_type": "hgrn_bit", **find("hgrn_bit").tiny}
    assert certify(skeleton(config), 4) == certify(tiny("hgrn_bit"), 4)
