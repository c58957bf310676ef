"""Spatial mixers: modules that mix the positions of a map. One file per mixer."""

from .additive_attention import AdditiveAttention as AdditiveAttention
from .convolutional_modulation import ConvolutionalModulation as ConvolutionalModulation
from .cross_covariance_attention import CrossCovarianceAttention as CrossCovarianceAttention
from .multi_scale_attention import MultiScaleAttention as MultiScaleAttention
from .spatial_pooling import SpatialPooling as SpatialPooling
from .window_attention import WindowAttention as WindowAttention
