"""What the Metal kernels of `bit_linear` have in common, as text."""

from ..backend.metal_functions import SIGMOID

MAX_MATRICES = 4
"""The most matrices of one launch."""

GATED = (
    SIGMOID
    + """
    // an input, or a gate and an input
    template <int GATE>
    inline float gated(float value, float up) {
        if (GATE == 0) return value;
        if (GATE == 1) return value * sigmoid(value) * up;
        // NaN is not less than zero, and stays
        const float positive = value < 0.0f ? 0.0f : value;
        return (GATE == 2 ? positive * positive : positive) * up;
    }
"""
)


def input_of_row(start: str) -> str:
    """Input `k` of those of `x` that begin at `start`, gated.

    Neighbours are loaded at once where a number `k` is known to the compiler.
    """
    up = f"GATE == 0 ? 0.0f : static_cast<float>((x + ({start} + dims))[k])"
    return f"gated<GATE>(static_cast<float>((x + ({start}))[k]), {up})"


def choice_of_matrix(matrices: int, outputs_of_block: int | str, integer: str) -> str:
    """Sets the matrix of a threadgroup, `chosen`, and the `block` of its outputs.

    A matrix has inputs of its own, named with its number. `outputs` and `weights` are those of the
    chosen one, and `before` counts the outputs of those before it. Numbers are of type `integer`, and
    `outputs_of_block` is a number or the name of one.
    """
    first = f"""{integer} block = threadgroup_position_in_grid.x;
    int chosen = 0;
    {integer} before = 0;
    {integer} outputs = weight0_shape[0];
    const device uint* weights = weight0;  // (outputs, words)"""
    others = (
        f"""
    if (chosen == {n - 1} && block >= {_blocks(outputs_of_block)}) {{
        block -= {_blocks(outputs_of_block)};
        before += outputs;
        chosen = {n};
        outputs = weight{n}_shape[0];
        weights = weight{n};
    }}"""
        for n in range(1, matrices)
    )
    return "".join([first, *others])


def weight_of_own_norm(matrices: int, start: str = "0") -> str:
    """Weight `k` of the norm of the chosen matrix, from the one at `start` on."""
    return _chosen([f"(own_norm{n} + {start})[k]" for n in range(matrices)])


def scale_of_output(matrices: int) -> str:
    """The scale of an `output` of the chosen matrix."""
    return _chosen([f"scale{n}[scale{n}_shape[0] == 1 ? 0 : output]" for n in range(matrices)])


def all_outputs(matrices: int) -> str:
    """How many outputs the matrices have together."""
    return f"({' + '.join(f'weight{n}_shape[0]' for n in range(matrices))})"


def _blocks(outputs_of_block: int | str) -> str:
    return f"(outputs + {outputs_of_block} - 1) / {outputs_of_block}"


def _chosen(values: list[str]) -> str:
    chain = [f"chosen == {n} ? static_cast<float>({value})" for n, value in enumerate(values[:-1])]
    return f"({' : '.join([*chain, f'static_cast<float>({values[-1]})'])})"
