"""The common parts of transformers whose feed-forward is a mixture of experts, as in Qwen3-MoE."""

from collections.abc import Mapping
from typing import Any

from ...errors import CheckpointError
from .architecture import Stacked

_MLP = "model.layers.{}.mlp"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

WEIGHT_NAMES: Mapping[str, str | Stacked] = {
    f"{_MLP}.gate": "blocks.{}.channel_mixer.router",
    **{f"{_MLP}.switch_mlp.{name}": f"blocks.{{}}.channel_mixer.{name}" for name in _PROJECTIONS},
    **{
        f"{_MLP}.experts.{{}}.{name}": Stacked(f"blocks.{{}}.channel_mixer.{name}")
        for name in _PROJECTIONS
    },
}
"""The names of routers and experts. The experts of a layer may be a tensor each, or one for all."""

GGUF_NAMES = {
    "blk.{}.ffn_gate_inp.weight": f"{_MLP}.gate.weight",
    "blk.{}.ffn_gate_exps.weight": f"{_MLP}.switch_mlp.gate_proj.weight",
    "blk.{}.ffn_up_exps.weight": f"{_MLP}.switch_mlp.up_proj.weight",
    "blk.{}.ffn_down_exps.weight": f"{_MLP}.switch_mlp.down_proj.weight",
}
"""Their names in a GGUF file, with those in a folder."""

GGUF_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of a GGUF file, without the architecture, with the keys of `config.json`."""

WHY_NO_BASE = "its feed-forward is a mixture of experts, which a hybrid has no names for"
"""For `Architecture.why_no_base`."""


def check_experts(config: Any) -> None:
    """Refuses a description whose tokens are given more experts than there are.

    Raises:
        CheckpointError: They are.
    """
    if config.num_experts_per_tok > config.num_experts:
        raise CheckpointError(
            "[config.json] 'num_experts_per_tok' must be at most 'num_experts' but got "
            f"{config.num_experts_per_tok} of {config.num_experts}."
        )


def read_gguf(given: Mapping[str, Any]) -> dict[str, Any]:
    """Like `GGUFFormat.read`, of the settings of experts."""
    return {name: given[key] for key, name in GGUF_KEYS.items()}


def write_gguf(config: Any) -> dict[str, Any]:
    """Like `GGUFFormat.write`, of the settings of experts."""
    return {key: getattr(config, name) for key, name in GGUF_KEYS.items()}
