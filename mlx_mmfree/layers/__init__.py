"""Parts that mixers and models are built from."""

from .attention.positions import DynamicRoPE as DynamicRoPE
from .attention.positions import RoPE as RoPE
from .dense import Linear as Linear
from .dense import QuantizedLinear as QuantizedLinear
from .embedding import apply_head as apply_head
from .fusing import plain_definitions as plain_definitions
from .linear import BitLinear as BitLinear
from .linear import PackedBitLinear as PackedBitLinear
from .linear import PackedLinear as PackedLinear
from .linear import TiedBitLinear as TiedBitLinear
from .linear import pack_linears as pack_linears
from .linear import packable as packable
from .linear import set_quantization_strength as set_quantization_strength
from .mixer import ChannelMixer as ChannelMixer
from .norms import RMSNorm as RMSNorm
from .short_convolution import ShortConvolution as ShortConvolution
