"""One residual block of a model of images: a mixer of places and a mixer of channels."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ...layers.maps import DropPath, LayerScale
from ...layers.mixer import SpatialMixer, TokenMixer


class ImageBlock(nn.Module):
    r"""Two residual branches, each behind a norm (MetaFormer, arXiv 2111.11418).

    .. math::
        u = x + \mathrm{drop}\big(\gamma_1 \odot \mathrm{Mixer}(\mathrm{norm}(x))\big), \quad
        y = u + \mathrm{drop}\big(\gamma_2 \odot \mathrm{ChannelMixer}(\mathrm{norm}(u))\big)

    Args:
        dims: Dims `D`.
        mixer: A spatial mixer, of maps; or a bidirectional token mixer, of sequences.
        channel_mixer: Mixes within a place; `None`: there is no second branch, as where the mixer has
            an expansion of the channels of its own.
        norm: Makes a norm, called as `norm(dims)`.
        layer_scale: What the factors :math:`\gamma` are at first; `None`: there are none.
        drop_path: Probability that training leaves a branch out for a sample.

    Shape:
        `x` and `y`: maps `(B, H, W, D)` with a spatial mixer, sequences `(B, N, D)` with a token mixer.

    Parameters:
        Of the parts `mixer_norm`, `mixer`, `mixer_scale`, and `channel_norm`, `channel_mixer`,
        `channel_scale`.
    """

    def __init__(
        self,
        dims: int,
        mixer: SpatialMixer | TokenMixer,
        channel_mixer: nn.Module | None,
        *,
        norm: Callable[[int], nn.Module],
        layer_scale: float | None = None,
        drop_path: float = 0.0,
    ):
        super().__init__()
        for name, branch in (("mixer", mixer), ("channel_mixer", channel_mixer)):
            if branch is not None:
                kind = name.partition("_")[0]
                self[f"{kind}_norm"] = norm(dims)
                self[name] = branch
                if layer_scale is not None:
                    self[f"{kind}_scale"] = LayerScale(dims, layer_scale)
        self.drop_path = DropPath(drop_path)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.mixer(self.mixer_norm(x))
        # a token mixer gives its state too
        return self.completed(x, y[0] if isinstance(y, tuple) else y)

    def completed(self, x: mx.array, branch: mx.array) -> mx.array:
        """The result for `x` where this is what the mixer gives."""
        x = self._added(x, branch, "mixer_scale")
        if "channel_mixer" not in self:
            return x
        return self._added(x, self.channel_mixer(self.channel_norm(x)), "channel_scale")

    def _added(self, x: mx.array, branch: mx.array, scale: str) -> mx.array:
        if scale in self:
            branch = self[scale](branch)
        return x + self.drop_path(branch).astype(x.dtype)
