"""Channel mixers: modules that mix within one position. One file per mixer."""

from .feed_forward import FeedForward as FeedForward
from .gated_linear_unit import GatedLinearUnit as GatedLinearUnit
from .geglu import GeGLU as GeGLU
from .reglu import ReGLU as ReGLU
from .squared_relu_glu import SquaredReLUGLU as SquaredReLUGLU
from .swiglu import SwiGLU as SwiGLU
