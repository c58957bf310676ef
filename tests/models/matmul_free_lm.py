"""The MatMul-free language model in NumPy and float64, for finite differences."""

from collections.abc import Callable

import numpy as np

from tests.models.published_hgrn_bit import sigmoid, silu

Array = np.ndarray
EPS = 1e-6


class MatMulFreeLM:
    """The loss as a smooth function of the parameters.

    Straight-through quantisers and stopped gradients are constants of the point that it is made at:
    what a quantiser adds to its input there, it adds everywhere. Its finite differences are then
    what the gradient of the model should be.

    Args:
        point: The parameters, by name; parameters of adapters stand beside their layer's.
        tokens: Integers `(B, L)`.
        adapter_scale: The factor of the adapters.

    Attributes:
        margin: The smallest distance of an activation from a rounding boundary, in steps.
    """

    def __init__(self, point: dict[str, Array], tokens: Array, *, adapter_scale: float):
        self.point = {name: value.astype(np.float64) for name, value in point.items()}
        self.tokens, self.adapter_scale = tokens, adapter_scale
        self.margin = np.inf
        self._constants: list[Array] = []
        self._next: int | None = None
        self.at_point = self.loss(self.point)

    def derivative(self, name: str, direction: Array, step: float = 1e-6) -> float:
        """The slope of the loss along a direction of one parameter, from points on both sides."""
        value = self.point[name]
        ahead, after = (
            self.loss({**self.point, name: value + sign * step * direction}) for sign in (1, -1)
        )
        return (ahead - after) / (2 * step)

    def loss(self, parameters: dict[str, Array]) -> float:
        """Mean cross-entropy of each token given those before it."""
        self._parameters = parameters
        logits = self._logits()[:, :-1]
        self._next = 0
        shifted = logits - logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(shifted, self.tokens[:, 1:, None], -1)[..., 0]
        return float((np.log(np.exp(shifted).sum(-1)) - chosen).mean())

    def _constant(self, compute: Callable[[], Array]) -> Array:
        if self._next is None:
            self._constants.append(compute())
            return self._constants[-1]
        self._next += 1
        return self._constants[self._next - 1]

    def _logits(self) -> Array:
        p = self._parameters
        x = self._embedding_rows(self.tokens)
        blocks = {name.split(".")[1] for name in p if name.startswith("blocks.")}
        for n in range(len(blocks)):
            at = f"blocks.{n}."
            x = x + self._mlgru(at + "token_mixer.", rms_norm(x, p[at + "token_norm.weight"]), n)
            x = x + self._swiglu(at + "channel_mixer.", rms_norm(x, p[at + "channel_norm.weight"]))
        x = rms_norm(x, p["norm.weight"])
        if "head.weight" in p or "head.norm.weight" in p:
            return self._linear("head", x)
        y = x @ p["embed.weight"].T
        if "embed.lora_a" in p:
            y = y + self.adapter_scale * (x @ p["embed.lora_b"].T) @ p["embed.lora_a"].T
        return y * self._embedding_factors() if "embed.m" in p else y

    def _embedding_rows(self, tokens: Array) -> Array:
        p = self._parameters
        rows = p["embed.weight"][tokens]
        if "embed.lora_a" in p:
            rows = rows + self.adapter_scale * p["embed.lora_a"][tokens] @ p["embed.lora_b"]
        return rows * self._embedding_factors()[tokens][..., None] if "embed.m" in p else rows

    def _embedding_factors(self) -> Array:
        p = self._parameters
        change = self.adapter_scale * p["embed.lora_a"] @ p["embed.lora_b"]
        lengths = self._constant(lambda: np.linalg.norm(p["embed.weight"] + change, axis=1))
        return p["embed.m"] / lengths

    def _linear(self, name: str, x: Array) -> Array:
        p = self._parameters
        weight = p[f"{name}.weight"] if f"{name}.weight" in p else p["embed.weight"]
        codes = x
        if f"{name}.norm.weight" in p:
            x = rms_norm(x, p[f"{name}.norm.weight"])
            inner, master = x, weight
            codes = x + self._constant(lambda: self._quantized(inner) - inner)
            weight = weight + self._constant(lambda: ternarized(master) - master)
        y = codes @ weight.T
        if f"{name}.lora_a" in p:
            a, b = p[f"{name}.lora_a"], p[f"{name}.lora_b"]
            y = y + self.adapter_scale * (x @ a) @ b
            if f"{name}.m" in p:
                adapted = weight + self.adapter_scale * (a @ b).T
                y = y * p[f"{name}.m"] / self._constant(lambda: np.linalg.norm(adapted, axis=1))
        return y

    def _quantized(self, x: Array) -> Array:
        scale = 127 / np.maximum(np.abs(x).max(-1, keepdims=True), 1e-5)
        self.margin = min(self.margin, np.abs(np.abs(x * scale) % 1 - 0.5).min())
        return np.rint(x * scale) / scale

    def _mlgru(self, at: str, x: Array, n: int) -> Array:
        p = self._parameters
        if f"{at}shared_conv.weight" in p:
            x = convolution(x, p[f"{at}shared_conv.weight"])
        i, f, g = (self._linear(f"{at}{name}_proj", x) for name in ("input", "forget", "gate"))
        if f"{at}input_conv.weight" in p:
            i = convolution(i, p[f"{at}input_conv.weight"])
            f = convolution(f, p[f"{at}forget_conv.weight"])
        f = sigmoid(f)
        if n and "lower_bounds" in p:
            shares = np.exp(p["lower_bounds"]) / np.exp(p["lower_bounds"]).sum(0)
            bound = shares[1 : n + 1].sum(0)
            f = bound + (1 - bound) * f
        i = silu(i) * (1 - f)
        h, states = np.zeros_like(i[:, 0]), []
        for t in range(i.shape[1]):
            h = f[:, t] * h + i[:, t]
            states.append(h)
        gate = rms_norm(g, p[f"{at}gate_norm.weight"])
        return self._linear(f"{at}output_proj", gate * silu(np.stack(states, axis=1)))

    def _swiglu(self, at: str, x: Array) -> Array:
        gate, up = np.split(self._linear(f"{at}gate_up_proj", x), 2, axis=-1)
        return self._linear(f"{at}down_proj", silu(gate) * up)


def ternarized(weight: Array) -> Array:
    mean = np.maximum(np.abs(weight).mean(), 1e-5)
    return np.clip(np.rint(weight / mean), -1, 1) * mean


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def convolution(x: Array, weight: Array) -> Array:
    taps = weight.shape[-1]
    padded = np.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return silu(sum(weight[:, 0, k] * padded[:, k : k + x.shape[1]] for k in range(taps)))
