"""Channel mixers: modules that mix within one position. One file per family."""

from .feed_forward import FeedForward as FeedForward
from .gated_linear_unit import GatedLinearUnit as GatedLinearUnit
from .gated_linear_unit import GeGLU as GeGLU
from .gated_linear_unit import ReGLU as ReGLU
from .gated_linear_unit import SquaredReLUGLU as SquaredReLUGLU
from .gated_linear_unit import SwiGLU as SwiGLU
from .mixture_of_experts import MixtureOfExperts as MixtureOfExperts
