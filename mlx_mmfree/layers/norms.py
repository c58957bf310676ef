"""Norms, by the operations of this library where they are the same."""

from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..errors import TrainingError
from ..ops import layer_norm, linear_product, long_sum
from ..ops.norms import rms_operation
from .arguments import check_features, check_sizes
from .matrix import StoredLayout, matrix_of


class LayerNorm(nn.LayerNorm):
    """MLX's norm; on a CPU, the operations that MLX makes it of take several times as long.

    Args:
        dims: Dims `D`.
        eps: Is added to the variance.
        affine: Whether there is a scale and a bias.
        bias: Whether there is a bias beside the scale.

    Shape:
        `x` and `y`: `(..., D)`.

    Example:
        >>> LayerNorm(8)(mx.zeros((2, 8))).shape
        (2, 8)
    """

    def __call__(self, x: mx.array) -> mx.array:
        return layer_norm(x, self.get("weight"), self.get("bias"), eps=self.eps)


class RMSNorm(nn.RMSNorm):
    r"""`nn.RMSNorm`, in a quarter of the time on a CPU.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \odot w

    The gain may be float32 beside activations of 16 bits.

    Source: Zhang and Sennrich, arXiv 1910.07467.

    Args:
        dims: Size of the last axis.
        eps: :math:`\epsilon`.

    Attributes:
        is_rms: A call is this formula and nothing else, so that it may be computed with the linears
            after it. A subclass with a call of its own has to say so of itself.

    Shape:
        `x` and `y`: `(..., D)`, of one dtype.

    Example:
        >>> [round(n, 4) for n in RMSNorm(2)(mx.array([3.0, 4.0])).tolist()]
        [0.8485, 1.1314]
    """

    is_rms: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        if "__call__" in vars(cls):
            cls.is_rms = vars(cls).get("is_rms", False)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array
        if x.size and self["weight"].dtype in (x.dtype, mx.float32):
            # the operation itself, because each token comes here often
            y = rms_operation(x, self["weight"], eps=self.eps)
        else:
            y = super().__call__(x)
        return y


def is_rms_norm(norm: nn.Module | None) -> bool:
    """Returns whether it is an RMSNorm of this library: a gain and an epsilon, and nothing else."""
    return getattr(norm, "is_rms", False)


class PlacedRMSNorm(nn.Module):
    r"""RMSNorm whose gain depends on the position in the sequence.

    .. math::
        y_{t,d} = \frac{x_{t,d}}{\sqrt{\mathrm{mean}_e\,x_{t,e}^2 + \epsilon}}\,g_{t,d}

    Keras-MML's norm has such a gain wherever its input is a sequence. It is made for a longest
    sequence, and knows only whole ones: a model with it cannot go on from a state.

    Args:
        dims: Size `D` of the last axis.
        max_length: Number of positions.
        eps: :math:`\epsilon`. By default as good as none, as in Keras-MML.

    Shape:
        `x` and `y`: `(..., L, D)`.

    Raises:
        ValueError: A sequence is longer than `max_length`.

    Example:
        >>> PlacedRMSNorm(8, max_length=5)(mx.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

    def __init__(self, dims: int, *, max_length: int, eps: float = 1e-24):
        super().__init__()
        check_sizes("PlacedRMSNorm", dims=dims, max_length=max_length)
        self.eps = eps
        self.weight = mx.ones((max_length, dims))

    def __call__(self, x: mx.array) -> mx.array:
        max_length, dims = self.weight.shape
        check_features("PlacedRMSNorm", x, dims)
        length = x.shape[-2] if x.ndim > 1 else 0
        if not 0 < length <= max_length:
            raise ValueError(
                f"[PlacedRMSNorm] 'x' must be a sequence of 1 to {max_length} positions but got shape "
                f"{x.shape}."
            )
        return mx.fast.rms_norm(x, None, self.eps) * self.weight[:length].astype(x.dtype)


def store_less_one(norm: nn.Module) -> None:
    r"""Says of an RMSNorm that files hold its gain less 1, as files of Gemma and Qwen3.5 do.

    .. math::
        y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}}\,(1 + w)

    The layer holds :math:`1 + w` in float32: in 16 bits, the sum would lose what a small w says.
    """
    layout = StoredLayout(norm.weight.shape, _plus_one, _minus_one, changes=True)
    # an ordinary attribute, since items of a module are parameters
    object.__setattr__(norm, "stored_layouts", {"weight": layout})


def _plus_one(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) + 1.0


def _minus_one(weight: mx.array) -> mx.array:
    return weight.astype(mx.float32) - 1.0


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class SingleNumberError(TrainingError, ValueError):
    """In training, a norm gets one number of each channel, which has no variance."""


class BatchNorm(nn.Module):
    r"""Every channel gets the mean 0 and the variance 1 over a batch, then a scale and a shift.

    .. math::
        y_c = \frac{x_c - \mu_c}{\sqrt{\sigma_c^2 + \epsilon}}\,\gamma_c + \beta_c

    In training, :math:`\mu` and :math:`\sigma^2` are the batch's, and the running ones follow
    them. In evaluation they are the running ones: the norm is one product and one sum for a channel,
    which `of_linear` joins with the matrix before it. A frozen norm, as under an adapter, keeps to the
    running ones in training too. Unlike MLX's own, it adds long sums block by block, and it counts
    batches as PyTorch does.

    Args:
        dims: Channels `D`.
        eps: :math:`\epsilon`.
        momentum: Share of a batch in the running statistics.

    Shape:
        `x` and `y`: `(..., D)`.

    Raises:
        SingleNumberError: A `ValueError` in training, where there is one number of a channel.

    Example:
        >>> BatchNorm(8)(mx.zeros((2, 5, 4, 8))).shape
        (2, 5, 4, 8)
    """

    def __init__(self, dims: int, *, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        check_sizes("BatchNorm", dims=dims)
        self._eps = eps
        self._momentum = momentum
        self.weight = mx.ones((dims,))
        self.bias = mx.zeros((dims,))
        self.running_mean = mx.zeros((dims,))
        self.running_var = mx.ones((dims,))
        self.num_batches_tracked = mx.array(0, mx.int64)
        self.freeze(keys=list(_STATISTICS), recurse=False)

    def unfreeze(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Like `nn.Module.unfreeze`, but statistics are never trained."""
        super().unfreeze(*args, **kwargs)
        self.freeze(keys=list(_STATISTICS), recurse=False)
        return self

    @property
    def counts(self) -> bool:
        """True if a call takes the statistics of its batch, which the running ones follow."""
        return bool(self.training) and "weight" not in self._no_grad

    @property
    def statistics(self) -> dict[str, mx.array]:
        """The running statistics and the number of batches in them."""
        return {name: self[name] for name in _STATISTICS}

    def __call__(self, x: mx.array) -> mx.array:
        check_features("BatchNorm", x, self.weight.shape[0])
        if not self.counts:
            scale, shift = self.scale_and_shift()
            return (x * scale + shift).astype(x.dtype)
        centred, var = self._of_batch(x.astype(mx.float32))
        # not as in evaluation: the gradient of the scale would be a difference of large sums
        y = centred * self._scale(var) + self.bias.astype(mx.float32)
        return y.astype(x.dtype)

    def scale_and_shift(self) -> tuple[mx.array, mx.array]:
        """The factor of a channel in evaluation, and the term that is then added: float32 `(D,)`."""
        mean, var, bias = (
            self[name].astype(mx.float32) for name in ("running_mean", "running_var", "bias")
        )
        scale = self._scale(var)
        return scale, bias - mean * scale

    def of_linear(self, linear: nn.Module, x: mx.array) -> mx.array:
        """`norm(linear(x))`; in evaluation, the matrix is multiplied if it is the smaller one."""
        matrix = matrix_of(linear)
        is_plain = matrix is not None and matrix.is_plain
        if self.counts or not is_plain or x.size <= x.shape[-1] ** 2:
            y = self(linear(x))
        else:
            scale, shift = self.scale_and_shift()
            y = linear_product(x, (linear.weight * scale[:, None]).astype(x.dtype))
            y = y + (shift + linear.bias * scale if "bias" in linear else shift)
        return y.astype(x.dtype)

    def _of_batch(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The numbers less the mean of their channel, and the variances, which are remembered."""
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        if count < 2:
            raise SingleNumberError(
                "[BatchNorm] 'x' must have more than one number of each channel in training but got "
                f"shape {x.shape}. Raise 'batch_size' so that each process gets more than one image, or "
                "call eval() first."
            )
        mean = long_sum(rows, axis=-2) / count
        centred = rows - mean
        var = long_sum(centred.square(), axis=-2) / count
        # as in PyTorch, the running variance is the unbiased one
        for name, value in (("running_mean", mean), ("running_var", var * (count / (count - 1)))):
            step = self._momentum * (mx.stop_gradient(value) - self[name])
            self[name] = (self[name] + step).astype(self[name].dtype)
        self.num_batches_tracked = self.num_batches_tracked + 1
        return centred.reshape(x.shape), var

    def _scale(self, var: mx.array) -> mx.array:
        return self.weight.astype(mx.float32) * mx.rsqrt(var + self._eps)


def running_statistics(model: nn.Module) -> dict[str, mx.array]:
    """The arrays that training steps change in a model without a gradient, by names in memory."""
    return {
        f"{path}.{name}": array
        for path, module in model.named_modules()
        if isinstance(module, BatchNorm) and "weight" not in module._no_grad
        for name, array in module.statistics.items()
    }
