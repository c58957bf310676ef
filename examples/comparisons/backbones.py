"""The backbones of images that `examples/image_table.py` compares: tiny, and of about equal size."""

from typing import Any

SIDE = 32
"""Height and width to which images are scaled: the smallest that every backbone takes."""

_BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": (
        "vit_tiny_patch16_224",
        {"patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3},
    ),
    "MLP-Mixer": ("mixer_s16_224", {"patch_size": 8, "embed_dim": 56, "num_blocks": 3}),
    "gMLP": ("gmlp_s16_224", {"patch_size": 8, "embed_dim": 48, "num_blocks": 4, "mlp_ratio": 5}),
    "Swin": (
        "swin_tiny_patch4_window7_224",
        {
            "patch_size": 4,
            "window_size": 4,
            "embed_dim": 32,
            "depths": [2, 1],
            "num_heads": [2, 4],
        },
    ),
    "EdgeNeXt": (
        "edgenext_xx_small",
        {"dims": [16, 24, 40, 64], "depths": [1, 2, 1, 1], "heads": [2, 2, 2, 2]},
    ),
    "EfficientViT": (
        "efficientvit_b0",
        {
            "widths": [8, 12, 16, 24, 32],
            "depths": [1, 1, 1, 1, 1],
            "head_dim": 8,
            "head_widths": [128, 160],
        },
    ),
    "SwiftFormer": (
        "swiftformer_xs",
        {"embed_dims": [16, 24, 32, 48], "layers": [1, 1, 2, 1], "mlp_ratios": 3},
    ),
    "PoolFormer": ("poolformer_s12", {"dims": [16, 24, 40, 64], "depths": [1, 1, 2, 1]}),
    "Conv2Former": (
        "conv2former_n",
        {
            "kernel_size": 5,
            "dims": [12, 16, 24, 32],
            "depths": [1, 1, 2, 1],
            "mlp_ratios": [3, 3, 3, 3],
        },
    ),
}

BACKBONES = tuple(_BACKBONES)


def described(name: str, linear_class: str) -> dict[str, Any]:
    """The description of a backbone for `mmfree train`, which adds the classes of the data."""
    architecture, sizes = _BACKBONES[name]
    return {
        "architecture": architecture,
        "linear_class": linear_class,
        "model_args": {"img_size": SIDE, "in_chans": 1, **sizes},
    }
