"""Arithmetic: pure functions on arrays. Each is defined once and run by the backend that fits.

Letters used in every shape: B batch, L length, D model dims, H heads, G key/value heads,
K key dims, V value dims, N output dims, W window.
"""

from ..platform import blas as _blas
from .activations import ACTIVATIONS as ACTIVATIONS
from .activations import activate as activate
from .activations import gated as gated
from .activations import gated_activation as gated_activation
from .activations import relative_weights as relative_weights
from .adamw import adamw as adamw
from .attention import attention as attention
from .attention_step import attention_step as attention_step
from .backend.dispatch import BACKENDS as BACKENDS
from .backend.dispatch import backend_report as backend_report
from .backend.dispatch import use_backend as use_backend
from .bit_linear import Projection as Projection
from .bit_linear import bit_linear as bit_linear
from .cross_entropy import cross_entropy as cross_entropy
from .dense_matmul import AffineFormat as AffineFormat
from .dense_matmul import dense_matmul as dense_matmul
from .depthwise_convolution import depthwise_convolution as depthwise_convolution
from .gated_delta_rule import gated_delta_rule as gated_delta_rule
from .gated_linear_attention import gated_linear_attention as gated_linear_attention
from .gather_affine_matmul import gather_affine_matmul as gather_affine_matmul
from .gather_ternary_matmul import gather_ternary_matmul as gather_ternary_matmul
from .hadamard import hadamard as hadamard
from .linear_product import linear_product as linear_product
from .linear_scan import linear_scan as linear_scan
from .long_sums import log_softmax as log_softmax
from .long_sums import logsumexp as logsumexp
from .long_sums import long_cumsum as long_cumsum
from .long_sums import long_mean as long_mean
from .long_sums import long_sum as long_sum
from .mlgru_step import mlgru_step as mlgru_step
from .norms import gated_rms_norm as gated_rms_norm
from .norms import layer_norm as layer_norm
from .norms import rms_norm as rms_norm
from .rms_norm_quantize import rms_norm_quantize as rms_norm_quantize
from .rotated_heads import Rotation as Rotation
from .rotated_heads import rotated_heads as rotated_heads
from .ternary import pack_ternary as pack_ternary
from .ternary import packed_columns as packed_columns
from .ternary import packed_width as packed_width
from .ternary import straight_through as straight_through
from .ternary import ternarize as ternarize
from .ternary import ternarize_packed as ternarize_packed
from .ternary import unpack_ternary as unpack_ternary
from .ternary_linear import Quantization as Quantization
from .ternary_linear import ternary_linear as ternary_linear
from .ternary_matmul import ternary_matmul as ternary_matmul

# the BLAS of MLX on Linux is slow
_blas.bind()
