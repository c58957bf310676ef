"""Blocks of image models against the code that they were published with, under its names."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_mmfree.channel_mixers import FeedForward
from mlx_mmfree.layers.maps import DepthwiseBlock, DepthwiseConvolution, LayerScale, pointwise
from mlx_mmfree.layers.matrix import parameters, stored_layouts
from mlx_mmfree.models import find
from mlx_mmfree.models.conv2former import conv2former_block
from mlx_mmfree.models.edgenext import SplitTransposeBlock
from mlx_mmfree.models.efficientvit import EfficientViTBlock
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.models.parts.image_classifier import ImageBlock
from mlx_mmfree.models.poolformer import MapNorm
from mlx_mmfree.models.swiftformer import SwiftFormerBlock
from mlx_mmfree.spatial_mixers import CrossCovarianceAttention, SpatialPooling
from tests.goldens.mixers.files import GoldenFile, assert_close, golden


def assert_block(block: nn.Module, architecture: str, file: GoldenFile, at: str) -> None:
    """Reads the weights of a file as a checkpoint holds them at this path, and compares the outputs."""
    names, layouts = WeightNames(find(architecture).weight_names), stored_layouts(block)
    given = {}
    for theirs, array in file.weights.items():
        name = f"{names.to_memory(f'{at}.{theirs}')}".removeprefix("stages.0.blocks.0.")
        if name in layouts:
            assert array.shape == layouts[name].shape
            array = layouts[name].read(array)
        given[name] = array
    # the files do not say how many batches a norm has seen
    counts = {name for name in parameters(block) if name.endswith("num_batches_tracked")}
    assert given.keys() == parameters(block).keys() - counts
    block.load_weights(list(given.items()), strict=False)
    y = block.eval()(mx.moveaxis(file.inputs["x"], 1, -1))
    assert_close(mx.moveaxis(y, -1, 1), file.out["y"])


in_stage = partial(assert_block, at="stages.0.blocks.0")


@golden("conv2former__block")
def test_conv2former_block(file: GoldenFile) -> None:
    sizes = file.hyper
    block = conv2former_block(
        sizes["dim"], kernel_size=sizes["kernel"], mlp_ratio=sizes["mlp_ratio"]
    )
    assert_block(block, "conv2former", file, "stages.0.0")


@golden("edgenext__conv_block")
def test_edgenext_convolutional_block(file: GoldenFile) -> None:
    dims, ratio = file.hyper["dim"], file.hyper["expand_ratio"]
    block = DepthwiseBlock(
        DepthwiseConvolution(dims, file.hyper["kernel"]),
        FeedForward(dims, hidden_dims=ratio * dims, activation="gelu"),
        norm=nn.LayerNorm(dims, eps=file.hyper["ln_eps"]),
        scale=LayerScale(dims),
    )
    in_stage(block, "edgenext", file)


@golden("edgenext__sdta_block")
def test_edgenext_split_transpose_block(file: GoldenFile) -> None:
    dims = file.hyper["dim"]
    block = SplitTransposeBlock(
        dims,
        CrossCovarianceAttention(dims, num_heads=file.hyper["heads"], is_stacked=True),
        FeedForward(dims, hidden_dims=file.weights["mlp.fc1.weight"].shape[0], activation="gelu"),
        num_convolutions=file.hyper["convs"],
        has_positions=True,
    )
    in_stage(block, "edgenext", file)


@golden("efficientvit__block")
def test_efficientvit_block(file: GoldenFile) -> None:
    dims, ratio = file.hyper["channels"], file.hyper["expand_ratio"]
    block = EfficientViTBlock(dims, head_dim=file.hyper["head_dim"], hidden_dims=ratio * dims)
    in_stage(block, "efficientvit", file)


@golden("swiftformer__block")
def test_swiftformer_block(file: GoldenFile) -> None:
    dims, ratio = file.hyper["dim"], file.hyper["mlp_ratio"]
    in_stage(SwiftFormerBlock(dims, hidden_dims=ratio * dims), "swiftformer", file)


@golden("metaformer__poolformer_block")
def test_poolformer_block(file: GoldenFile) -> None:
    dims, ratio = file.hyper["dim"], file.hyper["mlp_ratio"]
    block = ImageBlock(
        dims,
        SpatialPooling(dims),
        FeedForward(
            dims,
            hidden_dims=ratio * dims,
            linear=pointwise(nn.Linear),
            activation="gelu",
            bias=False,
        ),
        norm=MapNorm,
        layer_scale=1.0,
    )
    in_stage(block, "poolformer", file)
