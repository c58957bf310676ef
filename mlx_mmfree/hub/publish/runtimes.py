"""Tells which programs open the result of a conversion, by architecture and format.

`convert` prints the answers and the model card repeats them. The tests compare them with what the
programs themselves do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...layers.attention.positions import yarn_attention_factor
from ...models import architecture_of
from ...models.parts.rotation import Rotation
from ..checkpoint.parameter_reader import ParameterReader
from ..checkpoint.weight_format import formats_of, rotated_format

Format = Literal["mlx", "hf", "gguf"]

MLX_LM, TRANSFORMERS, LLAMA_CPP, BITNET_CPP = "mlx-lm", "transformers", "llama.cpp", "bitnet.cpp"
_FLOAT_ACTIVATIONS = "computes with float activations instead of 8-bit ones"
_QWEN3_HEAD_DIM = 128
# the names of the architectures in GGUF files
BITNET_CPP_ONLY, _1BIT_LLM, _QWEN35 = "bitnet-b1.58", "bitnet", "qwen35"


@dataclass(frozen=True)
class Opening:
    """True if one program opens a result.

    Attributes:
        runtime: The program.
        opens: Whether it does; `None` if it should by its source code, which was not tried.
        note: The flags that it needs and what it computes differently, or why it does not open it.
    """

    runtime: str
    opens: bool | None
    note: str = ""

    def __str__(self) -> str:
        answer = {True: "yes", False: "no", None: "not tried"}[self.opens]
        return f"{answer}: {self.note}" if self.note else answer


def openings(written: ParameterReader, format: Format, gguf_type: str) -> tuple[Opening, ...]:
    """Returns whether each program opens a written model.

    Args:
        written: The result of a conversion.
        format: Its format.
        gguf_type: The type of its matrices in GGUF, such as `TQ2_0`.
    """
    config = written.checkpoint.config
    if format == "gguf":
        return _gguf_openings(written, gguf_type)
    outside = (_no(LLAMA_CPP, "it reads GGUF"), _no(BITNET_CPP, "it reads GGUF"))
    mlx_lm, transformers = _mlx_lm(written, config), _transformers(written, config)
    return (mlx_lm, transformers, *outside)


def opening(found: tuple[Opening, ...], runtime: str) -> Opening | None:
    """The answer for one program; `None` if there is none."""
    return next((each for each in found if each.runtime == runtime), None)


def _no(runtime: str, why: str) -> Opening:
    return Opening(runtime, False, why)


def _mlx_lm(written: ParameterReader, config: Mapping[str, Any]) -> Opening:
    is_ternary = bool(written.ternary)
    is_read = any(MLX_LM in format.opens_in for format, _ in formats_of(config).values())
    if is_ternary and not is_read:
        return _no(MLX_LM, "it needs MLX's format of ternary weights, which --to mlx writes")
    if written.packed_dense and not is_read:
        return _no(MLX_LM, "it knows no packed weights of this library; --to mlx writes others")
    rotated = [
        format.rotated for format, _ in formats_of(config).values() if format.rotated is not None
    ]
    if rotated and config["model_type"] != rotated[0].mlx_lm_type:
        return _no(
            MLX_LM, "it reads rotated weights of Qwen3.5 alone; --unrotate undoes the rotation"
        )
    model_file = config.get("model_file")
    needed = architecture_of(written.model.config).mlx_lm(
        written.model.config, written.ternary_dims
    )
    if written.model.pipeline == "feature-extraction":
        return _no(MLX_LM, "it embeds no texts")
    if needed is None:
        return _no(MLX_LM, "it has no such architecture")
    if needed and model_file is None:
        return _no(MLX_LM, "it has no such architecture, and only --to mlx brings one")
    rotation = _rotation(written)
    if (why := _mlx_lm_rotation(rotation, written.model.config)) is not None:
        return _no(MLX_LM, why)
    notes = []
    if model_file is not None:
        notes.append("with --trust-remote-code")
    if is_ternary:
        notes.append(_FLOAT_ACTIVATIONS)
    if rotation.scaling == "dynamic":
        notes.append("rotates a text differently once it is longer than in training")
    return Opening(MLX_LM, True, "; ".join(notes))


def _mlx_lm_rotation(rotation: Rotation, config: Any) -> str | None:
    """Why mlx-lm would rotate differently from the first token on."""
    if rotation.scaling == "yarn":
        usual = yarn_attention_factor(rotation.factor)
        if not math.isclose(rotation.attention_factor, usual, rel_tol=1e-6):
            return "it knows no attention factor of YaRN but the usual one"
        if not rotation.is_rounded:
            return "it rounds the ends of YaRN's blend"
    if rotation.scaling == "longrope":
        stretch = config.max_position_embeddings / rotation.trained_length
        usual = 1.0
        if stretch > 1:
            usual = math.sqrt(1.0 + math.log(stretch) / math.log(rotation.trained_length))
        if not math.isclose(rotation.attention_factor, usual, rel_tol=1e-6):
            return "it knows no attention factor of longrope but the usual one"
    return None


def _transformers(written: ParameterReader, config: Mapping[str, Any]) -> Opening:
    model = written.model.config
    architecture = architecture_of(model)
    is_own = any(TRANSFORMERS not in format.opens_in for format, _ in formats_of(config).values())
    if architecture.transformers is None:
        return _no(TRANSFORMERS, "it has no such architecture")
    if is_own:
        return _no(TRANSFORMERS, "it does not read this format of weights; --to hf writes its own")
    if (why := architecture.transformers(model)) is not None:
        return _no(TRANSFORMERS, why)
    if not written.lies_as_on_hub:
        return _no(
            TRANSFORMERS, "its arrays lie as in mlx-lm; --to hf writes the format of the Hub"
        )
    note = "rotates a text differently once it is longer than in training"
    is_dynamic = _rotation(written).scaling == "dynamic"
    return Opening(TRANSFORMERS, True, note if is_dynamic else "")


def _gguf_rotation(rotation: Rotation) -> str | None:
    """Why llama.cpp, and bitnet.cpp with it, would rotate differently."""
    usual = Rotation(scaling="yarn")
    betas = [(each.beta_fast, each.beta_slow) for each in (rotation, usual)]
    if rotation.scaling == "yarn" and betas[0] != betas[1]:
        fast, slow = betas[1]
        return f"it computes YaRN with beta_fast {fast:g} and beta_slow {slow:g}, whatever the file says"
    return None


def _gguf_openings(written: ParameterReader, kind: str) -> tuple[Opening, ...]:
    config = written.model.config
    other_rotation = _gguf_rotation(_rotation(written))
    is_ternary = bool(written.ternary)
    name = architecture_of(config).gguf_name(config) or ""
    has_codes = bool(written.ternary or written.ternary_values or written.quantized)
    if kind == rotated_format().gguf_type:
        llama_cpp = _no(
            LLAMA_CPP, f"it has no {kind}; PrismML's llama.cpp has, which was not tried"
        )
    elif kind == "I2_S" and is_ternary:
        llama_cpp = _no(
            LLAMA_CPP, "I2_S is a type of bitnet.cpp; --gguf-type tq2_0 is for llama.cpp"
        )
    elif name == BITNET_CPP_ONLY:
        llama_cpp = _no(LLAMA_CPP, "it has no such architecture; bitnet.cpp has")
    elif name == _1BIT_LLM and not config.tie_word_embeddings:
        llama_cpp = _no(LLAMA_CPP, "its bitnet has no output head of its own")
    elif name == _QWEN35 and config.linear_key_head_dim != config.linear_value_head_dim:
        llama_cpp = _no(LLAMA_CPP, "its linear layers have keys and values of one width")
    elif other_rotation is not None:
        llama_cpp = _no(LLAMA_CPP, other_rotation)
    else:
        notes = []
        # matrices of floats are multiplied by floats
        if has_codes:
            notes.append("rounds activations for each block of inputs instead of each token")
        if kind in ("Q1_0", "Q2_0"):
            notes.append("needs a version of June 2026 or newer")
        llama_cpp = Opening(LLAMA_CPP, True, "; ".join(notes))
    return (
        _no(MLX_LM, "it reads no GGUF; --to mlx writes its format"),
        _transformers_gguf(written, name, kind),
        llama_cpp,
        _bitnet_cpp(name, kind, is_ternary, other_rotation),
    )


def _transformers_gguf(written: ParameterReader, name: str, kind: str) -> Opening:
    if name not in ("llama", "qwen3"):
        return _no(TRANSFORMERS, "it has no such architecture for GGUF; --to hf writes its format")
    is_used = written.ternary or written.ternary_values or written.quantized
    if is_used and kind not in ("TQ1_0", "TQ2_0"):
        return _no(TRANSFORMERS, f"it does not read {kind}; --to hf writes its format")
    if _rotation(written).scaling != "default":
        return _no(TRANSFORMERS, "it leaves out the rotary scaling of GGUF; --to hf keeps it")
    if name == "qwen3" and written.model.config.head_dim != _QWEN3_HEAD_DIM:
        return _no(TRANSFORMERS, f"it takes Qwen3's heads in GGUF for {_QWEN3_HEAD_DIM} dims")
    note = "with gguf_file=…, written out as floats"
    return Opening(TRANSFORMERS, True, f"{note}; {_FLOAT_ACTIVATIONS}" if is_used else note)


def _bitnet_cpp(name: str, kind: str, is_ternary: bool, other_rotation: str | None) -> Opening:
    if name in ("qwen3", _QWEN35):
        return _no(BITNET_CPP, "it has no such architecture")
    if kind != "I2_S" or not is_ternary:
        return _no(BITNET_CPP, "its kernels are for ternary weights in I2_S; --gguf-type i2_s")
    if other_rotation is not None:
        return _no(BITNET_CPP, other_rotation)
    note = "by its source code only"
    if name == BITNET_CPP_ONLY:
        note += "; its users report that it computes SiLU instead of squared ReLU"
    return Opening(BITNET_CPP, None, note)


def _rotation(written: ParameterReader) -> Rotation:
    return getattr(written.model.config, "rotation", Rotation())
