"""ViT (Dosovitskiy et al., arXiv 2010.11929) and DeiT (Touvron et al., arXiv 2012.12877), as in timm.

Two keys in `config.json` are our own. `token_mixer` puts any bidirectional token mixer in place of
softmax attention; `mmfree mixers` lists them. `token_selection`, an object with `keep` and
`hidden_dims`, lets every second block see a share of the tokens (`SelectingStage`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import mlx.core as mx
import mlx.nn as nn

from ..channel_mixers.feed_forward import FeedForward
from ..errors import CheckpointError, UnsupportedModelError
from ..files.declared import declare
from ..layers.arguments import check_sizes
from ..layers.attention.mixer import SelfAttention
from ..layers.dense import Linear
from ..layers.linear import merge_heads, split_heads
from ..layers.norms import LayerNorm
from ..ops.activations import relu
from ..ops.long_sums import log_softmax, long_mean, long_sum
from .parts.architecture import Architecture, Published, draw_weights
from .parts.fields import HubConfig, integer, key, number, refuse_unless, section
from .parts.image_classifier import ImageBlock, ImageClassifier, ImageConfig, Stage, drop_rates
from .parts.mixers import MixerChoice
from .parts.patch_model import PatchTokens


class TokenSelector(nn.Module):
    r"""From the scores of a layer, the weights of attention in the next one.

    .. math::
        P_{ij} = \mathrm{log\,softmax}_j\big(W_2\,\mathrm{relu}(W_1\,[q_{ih} \cdot k_{jh}]_h + b_1) + b_2
        \big), \quad
        w_j = \frac{1}{H} \sum_{h,i} \exp P_{hij}

    Args:
        num_heads: Heads `H`.
        hidden_dims: Rows of :math:`W_1`.

    Shape:
        `scores`: raw products `(B, H, L, L)`, neither scaled nor normed; the result: logarithms of
        weights, float32 `(B, H, L, L)`.

    Example:
        >>> TokenSelector(2, hidden_dims=4)(mx.zeros((1, 2, 3, 3))).shape
        (1, 2, 3, 3)
    """

    def __init__(self, num_heads: int, *, hidden_dims: int):
        super().__init__()
        check_sizes("TokenSelector", num_heads=num_heads, hidden_dims=hidden_dims)
        self.up_proj = Linear(num_heads, hidden_dims)
        self.down_proj = Linear(hidden_dims, num_heads)

    def __call__(self, scores: mx.array) -> mx.array:
        by_pair = mx.moveaxis(scores, 1, -1).astype(self.up_proj.weight.dtype)
        predicted = self.down_proj(relu(self.up_proj(by_pair)))
        return log_softmax(mx.moveaxis(predicted, -1, 1))

    @staticmethod
    def importance(log_weights: mx.array) -> mx.array:
        """How much all tokens look at each, `(B, L)`: the mean of heads of sums of weights."""
        return mx.mean(long_sum(mx.exp(log_weights), axis=-2), axis=1)


def chosen_first(importance: mx.array, count: int, prefix: int = 0) -> tuple[mx.array, mx.array]:
    """The indices of the `count` most important tokens, and of the others, each in their order.

    Args:
        importance: `(B, L)`.
        count: How many are chosen. Of equal ones, the earlier come first.
        prefix: How many first tokens are chosen in any case, as a class token is.
    """
    index = mx.arange(importance.shape[1])
    # indices have no gradient
    ranks = mx.where(index < prefix, -mx.inf, -mx.stop_gradient(importance))
    ranked = mx.argsort(ranks, axis=1)
    return mx.sort(ranked[:, :count], axis=1), mx.sort(ranked[:, count:], axis=1)


class SelectingStage(Stage):
    r"""Pairs of blocks: of the tokens that the first gives, the second changes the important ones.

    .. math::
        y = \mathrm{block}_1(x), \quad z_S = \mathrm{block}_2(y_S), \quad z_j = y_j \;(j \notin S)

    with the tokens `S` that a `TokenSelector` finds important by the scores of the first block. A last
    block without a partner sees all.

    A transcription, since no code of the paper is public. It is trained in stages:

    1. Train the blocks alone, `stage.is_selecting = False`, or load a published model.
    2. Freeze them, and train the selectors by `selector_loss`: what they predict of a block's attention
       shall be what that block does.
    3. Freeze the selectors, `stage.is_selecting = True`, and train the blocks on.

    Args:
        blocks: Blocks with bidirectional softmax attention, and neither positions nor norms inside it.
        keep: The share of tokens that a second block sees.
        hidden_dims: Width of the selectors.
        prefix: The first tokens, which every block sees.

    Attributes:
        is_selecting: Whether tokens are left out; otherwise this is a plain `Stage`.

    Shape:
        `x` and `y`: `(B, L, D)`.
    """

    def __init__(
        self, blocks: Sequence[ImageBlock], *, keep: float, hidden_dims: int, prefix: int = 0
    ):
        super().__init__(blocks)
        self.selectors = [
            TokenSelector(block.mixer.num_heads, hidden_dims=hidden_dims)
            for block in blocks[: len(blocks) // 2 * 2 : 2]
        ]
        self.is_selecting = True
        self._keep = keep
        self._prefix = prefix

    def until_last(self, x: mx.array) -> mx.array:
        """The input of the last pair, or of the last block if that has no partner."""
        if not self.is_selecting:
            return super().until_last(x)
        whole = len(self._pairs) - (len(self.blocks) + 1) % 2
        return self._through_pairs(x, slice(whole))

    def from_last(self, x: mx.array) -> mx.array:
        if not self.is_selecting:
            return super().from_last(x)
        if len(self.blocks) % 2:
            y: mx.array = self.blocks[-1](x)
            return y
        return self._through_pairs(x, slice(-1, None))

    def selector_loss(self, x: mx.array) -> mx.array:
        r"""How far the selectors are from the attention of the second blocks, which see all tokens.

        .. math::
            \frac{1}{N B H L} \sum_{n,b,h,i}
            \mathrm{KL}\big(A^{(2n)}_{bhi} \,\|\, \exp P^{(n)}_{bhi}\big)
        """
        losses = []
        for selector, (first, second) in zip(self.selectors, self._pairs, strict=True):
            x, scores = with_scores(first, x)
            predicted = selector(mx.stop_gradient(scores))
            x, scores = with_scores(second, x)
            true = mx.stop_gradient(log_softmax(scores * second.mixer.head_dim**-0.5))
            losses.append(long_mean(long_sum(mx.exp(true) * (true - predicted), axis=-1)))
        return mx.mean(mx.stack(losses))

    def chosen_count(self, length: int) -> int:
        """How many of so many tokens a second block sees."""
        return max(self._prefix + 1, min(length, round(self._keep * length)))

    @property
    def _pairs(self) -> list[tuple[ImageBlock, ImageBlock]]:
        blocks = cast("list[ImageBlock]", self.blocks)
        return list(zip(blocks[:-1:2], blocks[1::2], strict=True))

    def _through_pairs(self, x: mx.array, which: slice) -> mx.array:
        pairs = list(zip(self.selectors, self._pairs, strict=True))
        for selector, (first, second) in pairs[which]:
            x, scores = with_scores(first, x)
            x = self._selected(second, x, selector.importance(selector(scores)))
        return x

    def _selected(self, block: ImageBlock, x: mx.array, importance: mx.array) -> mx.array:
        length = x.shape[1]
        count = self.chosen_count(length)
        if count == length:
            return block(x)
        chosen, others = chosen_first(importance, count, self._prefix)
        parts = [mx.take_along_axis(x, indices[..., None], axis=1) for indices in (chosen, others)]
        tokens = mx.concatenate([block(parts[0]), parts[1]], axis=1)
        back = mx.argsort(mx.concatenate([chosen, others], axis=1), axis=1)
        return mx.take_along_axis(tokens, back[..., None], axis=1)


def with_scores(block: ImageBlock, x: mx.array) -> tuple[mx.array, mx.array]:
    """The result of a block with softmax attention, and its products of queries and keys, float32."""
    mixer: SelfAttention = block.mixer
    parts = mixer.apart(mixer.project(block.mixer_norm(x)))
    q, k, v = (split_heads(part, mixer.num_heads) for part in parts)
    scores = q.astype(mx.float32) @ k.astype(mx.float32).swapaxes(-1, -2)
    weights = mx.exp(log_softmax(scores * mixer.head_dim**-0.5))
    y = merge_heads(weights @ v.astype(mx.float32)).astype(x.dtype)
    return block.completed(x, mixer.finish(y, x.dtype)), scores


_TINY = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
_SMALL = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
_ATTENTION = MixerChoice("multi_head_attention")
_NORM = partial(LayerNorm, eps=1e-6)


@dataclass(frozen=True)
class TokenSelection(HubConfig):
    """Which tokens the second block of each pair sees."""

    keep: float = key("The share of tokens.", number, low=1e-3, high=1.0)
    hidden_dims: int = key("Width of the selectors.", integer, 16, high=2**12)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "TokenSelection | None":
        """Reads the key `token_selection`; `None` if there is none."""
        described = section(config, "token_selection")
        if not described:
            return None
        refuse_unless(described, dict.fromkeys(described.keys() - {"keep", "hidden_dims"}))
        return cls.from_hub(described)


@dataclass(frozen=True)
class Config(ImageConfig):
    """The description of one ViT."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "vit_tiny_patch16_224": _TINY,
        "vit_small_patch16_224": _SMALL,
        "deit_tiny_patch16_224": _TINY,
        "deit_small_patch16_224": _SMALL,
    }
    pool: ClassVar[str] = "token"
    usual: ClassVar[Mapping[str, Any]] = {
        "qkv_bias": True,
        "qk_norm": False,
        "scale_attn_norm": False,
        "scale_mlp_norm": False,
        "proj_bias": True,
        "init_values": None,
        "class_token": True,
        "pos_embed": "learn",
        "no_embed_class": False,
        "reg_tokens": 0,
        "pre_norm": False,
        "final_norm": True,
        "fc_norm": None,
        "pool_include_prefix": False,
        "dynamic_img_size": False,
        "dynamic_img_pad": False,
        "embed_norm_layer": None,
        "norm_layer": None,
        "act_layer": None,
    }

    patch_size: int = key("Side of a patch.", integer, 16, high=2**10)
    embed_dim: int = key("Dims of a token.", integer, 192, high=2**14)
    depth: int = key("Blocks.", integer, 12, high=1024)
    num_heads: int = key("Heads of attention.", integer, 3, high=2**10)
    mlp_ratio: float = key("Width of the channel mixer, in dims.", number, 4.0, low=1e-3, high=64.0)
    token_mixer: MixerChoice = declare("What mixes tokens.", _ATTENTION)
    token_selection: TokenSelection | None = declare(
        "Which tokens the second block of each pair sees; `None`: all.", None
    )

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise CheckpointError(
                f"[config.json] 'num_heads' must divide 'embed_dim', {self.embed_dim}, but got "
                f"{self.num_heads}."
            )

    @classmethod
    def read_own(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {"token_selection": TokenSelection.read(config)}
        if config.get("token_mixer") is not None:
            given["token_mixer"] = MixerChoice.read("token_mixer", config["token_mixer"])
            if given["token_selection"] and given["token_mixer"] != _ATTENTION:
                raise UnsupportedModelError(
                    "[config.json] 'token_selection' must be left out with another 'token_mixer' than "
                    f"{_ATTENTION.name}, whose scores it reads, but was given."
                )
        return given

    @property
    def num_features(self) -> int:
        return self.embed_dim

    def to_hub(self) -> dict[str, Any]:
        own: dict[str, Any] = {}
        if self.token_mixer != _ATTENTION:
            own["token_mixer"] = self.token_mixer.plain()
        if self.token_selection is not None:
            own["token_selection"] = self.token_selection.write_keys()
        return {**super().to_hub(), **own}


def build(config: Config) -> ImageClassifier:
    """A model with fresh weights, in its training variant.

    Raises:
        CheckpointError: An option of the mixer does not fit.
        UnsupportedModelError: The mixer is unknown, or cannot see a whole sequence.
    """
    embed = PatchTokens(
        config.input_channels,
        config.embed_dim,
        patch_size=config.patch_size,
        image_size=config.image_size,
        has_class_token=True,
        has_positions=True,
    )
    rates = drop_rates(config.drop_path_rate, [config.depth])[0]
    blocks = [_block(config, embed.length, rate) for rate in rates]
    stage = draw_weights(_stage(config, blocks, embed.prefix), 0.02)
    head = config.class_head(config.embed_dim)
    neck = _NORM(config.embed_dim)
    return ImageClassifier(embed, [stage], head, neck=neck, pool="first", config=config)


def with_token_selection(
    model: ImageClassifier, *, keep: float, hidden_dims: int = 16
) -> ImageClassifier:
    """A ViT with fresh token selectors and its other weights.

    Args:
        model: A ViT with softmax attention, loaded with `packed=False`.
        keep: The share of tokens that every second block sees.
        hidden_dims: Width of the selectors.
    """
    selection = TokenSelection(keep, hidden_dims)
    new = build(replace(model.config, token_selection=selection))
    new.update(model.parameters(), strict=False)
    return new


def _stage(config: Config, blocks: list[ImageBlock], prefix: int) -> Stage:
    selection = config.token_selection
    if selection is None:
        return Stage(blocks)
    if len(blocks) < 2:
        raise CheckpointError("[config.json] 'depth' must be at least 2 with 'token_selection'.")
    return SelectingStage(
        blocks, keep=selection.keep, hidden_dims=selection.hidden_dims, prefix=prefix
    )


def _block(config: Config, length: int, drop_path: float) -> ImageBlock:
    dims = config.embed_dim
    choice = config.token_mixer
    if choice == _ATTENTION:
        options = {"num_heads": config.num_heads, "bias": True, "is_stacked": True}
        choice = MixerChoice(choice.name, options)
    mixer = choice.token_mixer(
        dims, linear=config.linear("blocks.attn"), is_causal=False, max_length=length
    )
    channel_mixer = FeedForward(
        dims,
        hidden_dims=int(dims * config.mlp_ratio),
        linear=config.linear("blocks.mlp"),
        activation="gelu",
    )
    return ImageBlock(dims, mixer, channel_mixer, norm=_NORM, drop_path=drop_path)


ARCHITECTURE = Architecture(
    name="vit",
    config=Config,
    build=build,
    weight_names={
        "cls_token": "embed.class_token",
        "pos_embed": "embed.positions",
        "patch_embed.proj": "embed.patches.linear",
        "blocks.{}.norm1": "stages.0.blocks.{}.mixer_norm",
        "blocks.{}.attn": "stages.0.blocks.{}.mixer",
        "blocks.{}.attn.qkv": "stages.0.blocks.{}.mixer.qkv_proj",
        "blocks.{}.attn.proj": "stages.0.blocks.{}.mixer.output_proj",
        "blocks.{}.norm2": "stages.0.blocks.{}.channel_norm",
        "blocks.{}.mlp.fc1": "stages.0.blocks.{}.channel_mixer.up_proj",
        "blocks.{}.mlp.fc2": "stages.0.blocks.{}.channel_mixer.down_proj",
        "selectors.{}.fc1": "stages.0.selectors.{}.up_proj",
        "selectors.{}.fc2": "stages.0.selectors.{}.down_proj",
        "norm": "neck",
        "head": "head",
    },
    tiny={
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 5,
        "model_args": {
            "img_size": [32, 32],
            "patch_size": 8,
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
        },
    },
    published={f"timm/{name}.*": Published("floats", "timm") for name in Config.variants},
)
