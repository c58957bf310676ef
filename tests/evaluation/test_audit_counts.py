"""The counts of a certificate equal a count by hand, with kernels and with plain operations."""

from collections import Counter

import pytest

from mlx_mmfree.evaluation.audit import Certificate, certify
from mlx_mmfree.evaluation.audit.skeleton import skeleton
from mlx_mmfree.models import find
from mlx_mmfree.ops import packed_width
from tests.evaluation.audit_models import BACKENDS, TERNARY, needs_graphs, on, tiny

pytestmark = needs_graphs

# of the tiny models: dims, inner dims, tokens, blocks, heads, key heads, dims of a head
D, F, V, BLOCKS, H, G, K = 32, 48, 60, 2, 4, 2, 8
AFTER = 5
USED = AFTER + 1


def products(certificate: Certificate, kind: str, *, is_outside: bool = False) -> Counter:
    found: Counter = Counter()
    for each in certificate.products:
        if each.kind == kind and each.is_outside is is_outside:
            found[each.inputs, each.outputs] += each.times
    return found


def packed_bytes(outputs: int, inputs: int) -> int:
    """Trits, and one scale."""
    return outputs * packed_width(inputs) * 4 + 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_matmul_free_model(backend: str) -> None:
    with on(backend):
        found = certify(tiny("hgrn_bit"), AFTER)
    assert found.is_matmul_free is True and not found.unknown
    in_blocks = {(D, D): 4, (D, 2 * F): 1, (F, D): 1}
    assert products(found, "ternary") == {shape: BLOCKS * n for shape, n in in_blocks.items()}
    assert products(found, "ternary", is_outside=True) == {(D, V): 1}
    assert not products(found, "dense") and not products(found, "activations")
    assert found.lookups == ("embed",)
    assert found.state_bytes == BLOCKS * D * 4
    assert found.traffic.state_read == found.traffic.state_written == found.state_bytes

    is_plain = backend == "reference"
    macs = BLOCKS * (4 * D * D + D * 2 * F + F * D) + D * V
    # a plain norm multiplies by the reciprocal of the dims; halves are rounded away from zero by sign
    norm = {dims: 3 * dims + is_plain for dims in (D, F)}
    quantised = {dims: norm[dims] + dims + is_plain * dims for dims in (D, F)}
    block = norm[D] + 3 * (quantised[D] + D)
    # input gate and its SiLU, the recurrence, the output's SiLU, and the product with it
    block += 5 * D + norm[D]
    block += quantised[D] + D
    block += norm[D] + quantised[D] + 2 * F
    block += 2 * F + quantised[F] + D
    head = norm[D] + quantised[D] + V
    # blocks but the first have a bound
    bounds = (BLOCKS - 1) * D
    assert found.count("multiply") == BLOCKS * block + bounds + head + is_plain * macs
    if not is_plain:
        assert found.count("integer") == macs
        # squares with epsilon, gates, and residuals
        norms = BLOCKS * (8 * D + F) + 2 * D
        assert found.count("add") == norms + BLOCKS * (2 * D + 2 * D) + 2 * bounds
        weights = BLOCKS * (4 * packed_bytes(D, D) + packed_bytes(2 * F, D) + packed_bytes(D, F))
        norms_read = 4 * (BLOCKS * (8 * D + F) + 2 * D)
        row, head_read = 4 * D, packed_bytes(V, D)
        assert found.traffic.weights_read == weights + norms_read + row + head_read + 4 * bounds
        assert found.launches["cpu_kernels"] == BLOCKS * 5 + 2
    assert found.launches["metal"] == BLOCKS * 5 + 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bitnet(backend: str) -> None:
    with on(backend):
        found = certify(tiny("bitnet"), AFTER)
    assert found.is_matmul_free is True and not found.unknown
    in_blocks = {(D, (H + 2 * G) * K): 1, (D, D): 1, (D, 2 * F): 1, (F, D): 1}
    ternary = products(found, "ternary")
    macs = sum(a * b * n for (a, b), n in in_blocks.items())
    assert sum(a * b * n for (a, b), n in ternary.items()) == BLOCKS * macs
    assert ternary[F, D] == BLOCKS
    # queries with keys, and weights with values
    assert products(found, "activations").total() >= 2 * BLOCKS
    meeting = sum(a * b * n for (a, b), n in products(found, "activations").items())
    assert meeting == BLOCKS * 2 * H * USED * K
    assert products(found, "dense", is_outside=True) == {(D, V): 1}
    # a slot of each buffer, and the positions, which plain operations compute once for all blocks
    written = BLOCKS * 2 * G * K * 4 + (BLOCKS if backend == "native" else 1) * USED * 4
    assert found.traffic.state_written == written
    if backend == "native":
        # codes and scales; norms before and within; rotation, scaling and attention; squared ReLU
        block = 3 * D + D + (H + 2 * G) * K + 2 * (H + G) * K + H * K + 2 * H * USED * K
        block += 3 * D + D + D + 3 * D + D + 2 * F + 2 * F + 3 * F + F + D
        assert found.count("multiply") == BLOCKS * block + 3 * D + D * V
        assert found.count("integer") == BLOCKS * (macs + USED)
        slots = BLOCKS * 2 * G * K * 4 * USED
        assert found.traffic.state_read == slots + BLOCKS * AFTER * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_llama(backend: str) -> None:
    with on(backend):
        found, ternary = (certify(tiny("llama", **of), AFTER) for of in ({}, TERNARY))
    assert found.is_matmul_free is False and ternary.is_matmul_free is True
    macs = BLOCKS * (D * (H + 2 * G) * K + D * D + 3 * D * F)
    dense = products(found, "dense")
    assert sum(a * b * n for (a, b), n in dense.items()) == macs
    assert not products(found, "ternary") and not products(ternary, "dense")
    assert sum(a * b * n for (a, b), n in products(ternary, "ternary").items()) == macs
    for each in (found, ternary):
        assert products(each, "dense", is_outside=True) == {(D, V): 1}
    if backend == "native":
        own = 3 * D + 2 * (H + G) * K + H * K + 2 * H * USED * K + 3 * D + 2 * F
        assert found.count("multiply") == macs + BLOCKS * own + 3 * D + D * V
        norms = BLOCKS * 2 * D + D
        weights = 4 * (macs + norms + D * V + D)
        # each block rotates by a table of its own
        assert 0 <= found.traffic.weights_read - weights <= BLOCKS * 4 * K


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hybrid(backend: str) -> None:
    with on(backend):
        found = certify(tiny("hybrid"), AFTER)
    paths = {each.path for each in found.products if each.kind == "ternary"}
    assert "blocks.0.channel_mixer.down_proj" in paths
    assert found.is_matmul_free is True and not found.unknown
    meeting = sum(a * b * n for (a, b), n in products(found, "activations").items())
    assert meeting == 2 * H * USED * K
    state_bytes = D * 4 + 4 * USED
    assert state_bytes < found.state_bytes
    macs = (4 * D * D) + (D * (H + 2 * G) * K + D * D) + BLOCKS * 3 * D * F
    ternary = products(found, "ternary")
    assert sum(a * b * n for (a, b), n in ternary.items()) == macs


def test_backends_agree_on_products() -> None:
    recurrent = ("hgrn_bit", "gla", "retnet")
    for name in (*recurrent, "bitnet", "hybrid", "metaformer", "qwen3", "minicpm", "maple"):
        totals = []
        for backend in BACKENDS:
            with on(backend):
                found = certify(tiny(name), AFTER)
            assert not found.unknown, name
            sums: Counter = Counter()
            for each in found.products:
                sums[each.kind, each.is_outside] += each.macs
            totals.append(sums)
        assert totals[0] == totals[1], name


def test_a_later_token_reads_more_state_of_attention_alone() -> None:
    near, far = (certify(tiny("bitnet"), position) for position in (AFTER, 2 * AFTER))
    assert near.traffic.state_read < far.traffic.state_read
    near, far = (certify(tiny("hgrn_bit"), position) for position in (AFTER, 2 * AFTER))
    assert near == far.__class__(**(vars(far) | {"position": AFTER}))


@needs_graphs
def test_of_experts_in_codes_those_are_read_that_a_row_chooses() -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
    codes = {"model_type": "maple", "quantization": {"group_size": 128, "bits": 2}}
    found = {}
    for count in (16, 32):
        config = find("maple").tiny | sizes | experts | codes | {"num_experts": count}
        found[count] = certify(skeleton(config), 1)
        names = ("gate_proj", "up_proj", "down_proj")
        products = [each for each in found[count].products if each.path.endswith(names)]
        assert {(each.kind, each.storage) for each in products} == {("dense", "codes of 2 bits")}
        assert sum(each.macs for each in products) == 4 * 3 * 2 * 128 * 128
    added = found[32].traffic.weights_read - found[16].traffic.weights_read
    # rows of the routers alone, in float32
    assert added == 4 * 16 * 128 * 4
