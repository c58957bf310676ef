"""Channel mixers: modules that mix within one position. One file per mixer."""

from .swiglu import SwiGLU as SwiGLU
