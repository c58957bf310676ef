"""The certificate of a model: what one decoded token takes, and which products are left.

Its energy is an estimate from published energies of single operations: M. Horowitz, "Computing's energy
problem (and what we can do about it)", ISSCC 2014, figure 1.1.9: 45 nm, 0.9 V. Divisions, roots,
exponentials and comparisons are not in the figure and not in the estimate. Neither is what moves
instructions and controls them, which takes more than arithmetic in any processor.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import UnsupportedModelError
from ...models import Decoder
from ...ops.backend.cost import Call, Cost, Work, product_work
from .metal_step import MetalStep, metal_step
from .primitives import VIEWS, cost_of_kernel, cost_of_mlx
from .products import MatrixProduct, products_of
from .record import Recording, record

SOURCE = "M. Horowitz, Computing's energy problem, ISSCC 2014, figure 1.1.9 (45 nm, 0.9 V)"

_PICOJOULES = {
    ("multiply", 16): 1.1,
    ("multiply", 32): 3.7,
    ("add", 16): 0.4,
    ("add", 32): 0.9,
    ("integer", 8): 0.03,
    ("integer", 16): 0.05,
    ("integer", 32): 0.1,
}
"""Of integers, additions."""

_DRAM = 1300 / 8
"""Of a byte, by the lower of the two values for 8 bytes, 1.3 and 2.6 nJ."""

_CACHE = 20 / 8
"""Of a byte, in a cache of 32 kB."""


@dataclass(frozen=True)
class Energy:
    """Microjoules of one decoded token.

    Attributes:
        arithmetic: Operations on floats and integers.
        memory: Weights and state, from DRAM.
        cache: What passes between operations.
    """

    arithmetic: float
    memory: float
    cache: float

    @property
    def total(self) -> float:
        return self.arithmetic + self.memory + self.cache

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def energy(work: Work, far_bytes: int, near_bytes: int) -> Energy:
    """Estimates the energy of some work.

    Args:
        work: The operations. Those of other widths than the figure has count as the next wider one.
        far_bytes: Bytes of weights and state that are read or written.
        near_bytes: Bytes that pass between operations.
    """
    picojoules = sum(count * _each(kind, bits) for (kind, bits), count in work.items())
    return Energy(picojoules / 1e6, far_bytes * _DRAM / 1e6, near_bytes * _CACHE / 1e6)


def _each(kind: str, bits: int) -> float:
    widths = sorted(width for known, width in _PICOJOULES if known == kind)
    if not widths:
        return 0.0
    return _PICOJOULES[kind, next((width for width in widths if width >= bits), widths[-1])]


_HALF = 16
"""Bits of the weights of the dense twin."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a token reads and writes.

    Attributes:
        weights_read: Of what the model holds.
        state_read, state_written: Of what it keeps of the text.
        between_read, between_written: Of what one operation passes to another.
    """

    weights_read: int = 0
    state_read: int = 0
    state_written: int = 0
    between_read: int = 0
    between_written: int = 0

    @property
    def read(self) -> int:
        return self.weights_read + self.state_read + self.between_read

    @property
    def written(self) -> int:
        return self.state_written + self.between_written

    @property
    def far(self) -> int:
        """Bytes of weights and state."""
        return self.weights_read + self.state_read + self.state_written

    @property
    def near(self) -> int:
        """The others."""
        return self.between_read + self.between_written


@dataclass(frozen=True)
class Certificate:
    """The cost of one decoded token.

    Attributes:
        position: The tokens before it.
        operations: How often each operation of MLX and each kernel of this library runs.
        kernels: Which of them are kernels of this library.
        unknown: The names of operations whose cost is not known, which nothing else counts.
        work: Arithmetic.
        traffic: Bytes.
        state_bytes: Bytes of the state after the token.
        launches: Operations that run on a CPU, `cpu_kernels` of this library and `cpu_mlx`, and kernels
            that would run on Metal, `metal`.
        on_metal: The step there.
        lookups: Tables of weights of which a token reads rows.
        products: All products, in the order in which they are computed.
        twin_work, twin_traffic: The same of a model with float16 matrices of the same shapes.
    """

    position: int
    operations: Counter[str]
    kernels: frozenset[str]
    unknown: Counter[str]
    work: Work
    traffic: Traffic
    state_bytes: int
    launches: Mapping[str, int]
    on_metal: MetalStep
    lookups: tuple[str, ...]
    products: tuple[MatrixProduct, ...]
    twin_work: Work
    twin_traffic: Traffic

    @property
    def dense_in_blocks(self) -> list[MatrixProduct]:
        """The products with matrices of float weights or codes in the blocks."""
        return [each for each in self.products if each.kind == "dense" and not each.is_outside]

    @property
    def is_matmul_free(self) -> bool | None:
        """True if no product with a float matrix is left in the blocks; `None` if nobody knows."""
        if self.dense_in_blocks:
            return False
        return None if self.unknown else True

    @property
    def energy(self) -> Energy:
        """An estimate."""
        return energy(self.work, self.traffic.far, self.traffic.near)

    @property
    def twin_energy(self) -> Energy:
        """The same of the dense twin."""
        return energy(self.twin_work, self.twin_traffic.far, self.twin_traffic.near)

    def count(self, kind: str) -> int:
        """The operations of a kind, of all widths."""
        return sum(count for arithmetic, count in self.work.items() if arithmetic.kind == kind)


def certify(model: Decoder, position: int = 16) -> Certificate:
    """Certifies what a decoded token takes. Nothing is computed but matrices whose values are in doubt.

    Args:
        model: A decoder, with or without values in its weights.
        position: The tokens before the one that is decoded.

    Raises:
        UnsupportedModelError: The model does not continue texts token by token.
        BackendError: The compiled extension, which reads graphs, cannot be used.

    Example:
        >>> certify(model).is_matmul_free  # doctest: +SKIP
        True
    """
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(
            f"[audit] 'model' must continue texts token by token but {type(model).__name__} does not. "
            "Certify a decoder."
        )
    recording = record(model, position)
    total, twin = _Sum(), _Sum()
    operations: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    kernels: set[str] = set()
    lookups: dict[str, None] = {}
    products: list[MatrixProduct] = []
    for number in range(len(recording.graph.nodes)):
        call = recording.call(number)
        if call.name in VIEWS or (call.name == "Full" and call.outputs[0].size == 1):
            continue
        operations[call.name] += 1
        if call.given is not None:
            kernels.add(call.name)
        cost = cost_of_mlx(call) if call.given is None else cost_of_kernel(call)
        if cost is None:
            unknown[call.name] += 1
            continue
        traffic = _traffic(recording, number, call, cost)
        found = products_of(recording, number, call, cost)
        total.add(cost.work, traffic)
        if any(recording.depends[index] for index in recording.graph.nodes[number].outputs):
            # what is made of weights alone is ready in a model that holds float16
            twin.add(*_of_twin(cost.work, traffic, found))
        products += found
        if name := _lookup(recording, number):
            lookups[name] = None
    arrays, on_metal = recording.graph.arrays, metal_step(model, position)
    own = sum(operations[name] for name in kernels)
    return Certificate(
        position,
        operations,
        frozenset(kernels),
        unknown,
        total.work,
        Traffic(**total.bytes),
        sum(arrays[index].nbytes for index in recording.new_state),
        {
            "cpu_kernels": own,
            "cpu_mlx": operations.total() - own,
            "metal": on_metal.launches(),
        },
        on_metal,
        tuple(lookups),
        tuple(products),
        twin.work,
        Traffic(**twin.bytes),
    )


class _Sum:
    """Work and traffic so far."""

    def __init__(self) -> None:
        self.work: Work = Counter()
        self.bytes: Counter[str] = Counter()

    def add(self, work: Work, traffic: Counter[str]) -> None:
        self.work.update(work)
        self.bytes.update(traffic)


def _traffic(recording: Recording, number: int, call: Call, cost: Cost) -> Counter[str]:
    node = recording.graph.nodes[number]
    found: Counter[str] = Counter()
    for n, index in enumerate(node.inputs):
        origin = recording.origin(index)
        role = "between"
        if origin in recording.state:
            role = "state"
        elif recording.is_weight(origin):
            role = "weights"
        found[f"{role}_read"] += cost.read.get(n, recording.bytes_of(index))
    for n, index in enumerate(node.outputs):
        role = "state" if index in recording.state else "between"
        found[f"{role}_written"] += cost.written.get(n, recording.graph.arrays[index].nbytes)
    return found


def _lookup(recording: Recording, number: int) -> str | None:
    """The name of the table that an operation takes rows of."""
    node = recording.graph.nodes[number]
    if node.name != "Gather":
        return None
    table, *rows = node.inputs
    is_lookup = recording.is_weight(recording.origin(table)) and recording.depends[rows[0]]
    return recording.name_of(table) if is_lookup else None


def _of_twin(
    work: Work, traffic: Counter[str], products: Sequence[MatrixProduct]
) -> tuple[Work, Counter[str]]:
    """The same with float16 in the place of every matrix of weights."""
    work, traffic = Counter(work), Counter(traffic)
    for each in products:
        if each.kind == "activations":
            continue
        work.subtract(each.work)
        work.update(product_work(each.macs, _HALF))
        traffic["weights_read" if each.is_stored else "between_read"] -= each.matrix_bytes
        traffic["weights_read"] += each.inputs * each.outputs * _HALF // 8
    return work, traffic


def to_json(certificate: Certificate) -> dict[str, Any]:
    """All that a certificate says, in what JSON can hold."""
    return {
        "is_matmul_free": certificate.is_matmul_free,
        "position": certificate.position,
        "float_multiplications": certificate.count("multiply"),
        "float_additions": certificate.count("add"),
        "other_float_operations": certificate.count("other"),
        "integer_operations": certificate.count("integer"),
        "bytes": vars(certificate.traffic)
        | {"read": certificate.traffic.read, "written": certificate.traffic.written},
        "state_bytes": certificate.state_bytes,
        "launches": dict(certificate.launches),
        "lookups": list(certificate.lookups),
        "operations": dict(certificate.operations.most_common()),
        "unknown_operations": dict(certificate.unknown),
        "products": [
            {
                "path": each.path,
                "operation": each.operation,
                "kind": each.kind,
                "storage": each.storage,
                "inputs": each.inputs,
                "outputs": each.outputs,
                "count": each.times,
                "is_outside_blocks": each.is_outside,
            }
            for each in certificate.products
        ],
        "energy_estimate": {
            "source": SOURCE,
            "unit": "microjoules",
            "model": certificate.energy.to_json(),
            "dense_twin": certificate.twin_energy.to_json(),
        },
    }
