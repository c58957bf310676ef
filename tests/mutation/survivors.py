"""Mutants that no test finds, each with the reason.

The names are those that `run` prints. It reports those that are no longer among the mutants.
"""

# ruff: noqa: E501
SURVIVORS = {
    "evaluation/benchmark.py measure: 0 -> 1": "speed only: threads of a measurement",
    "evaluation/harness.py harness_model: 8 -> 9": "speed only: texts read together",
    "evaluation/maps.py : 0.85 -> 1.7 (2)": "equivalent: the width of a picture's margin",
    "files/torch_checkpoint.py _view: 0 -> 1 (2)": "equivalent: no byte of an empty tensor is read, wherever it lies",
    "hub/publish/runtimes.py _mlx_lm: notes.append(_FLOAT_ACTIVATIONS) -> pass": "message only: a note of a model card",
    "layers/attention/positions.py AxialPositions.__init__: 1 / math.sqrt(column_dims) -> 1 * math.sqrt(column_dims)": "equivalent: the size of first weights, which checkpoints replace",
    "layers/norms.py BatchNorm.of_linear: x.size <= x.shape[-1] ** 2 -> x.size < x.shape[-1] ** 2": "speed only: which of two equal ways is taken",
    "models/edgenext.py FourierPositions._codes: count + 1e-6 -> count - 1e-06": "equivalent: float32 holds no such difference beside a count",
    'models/edgenext.py SplitConvolution.__init__: check_counts("SplitConvolution", num_convolutions=num_convolutions) -> pass': "message only: a wrong count fails later",
    "models/qwen3_5_text.py _gguf_heads: 1 -> 2": "equivalent: NumPy infers an axis of any negative size",
    "models/reformer.py ReformerConfig: 1024 -> 1025": "guard only: no model hashes nearly as often as the bound says",
    "ops/gated_linear_attention/metal.py unsupported: q.shape[3] % piece == 0 -> q.shape[3] % piece != 0": "equivalent: the check of a kernel tries inputs of another width, all of which a sound kernel computes",
    "ops/inspection.py multiply_rate: 0.02 -> 0.04": "speed only: how long a measurement takes",
    "ops/ternary_matmul/metal.py _fault: is_few -> not is_few (2)": "equivalent: the check of a kernel tries inputs of another width, all of which a sound kernel computes",
    "server/connection.py Connection.connection_made: min(waiting, key=lambda other: (not other.is_answered, other._since)).abort() -> pass": "open: idle connections end by their time too",
    "training/corpus/tokenize.py write_token_file: 1 -> 2": "speed only: how many processes encode the texts",
}
