"""Parts that mixers and models are built from."""

from .attention.positions import DynamicRoPE as DynamicRoPE
from .attention.positions import RoPE as RoPE
from .bit_linear import BitLinear as BitLinear
from .bit_linear import PackedBitLinear as PackedBitLinear
from .bit_linear import PackedLinear as PackedLinear
from .bit_linear import TiedBitLinear as TiedBitLinear
from .bit_linear import pack_linears as pack_linears
from .bit_linear import packable as packable
from .bit_linear import set_quantization_strength as set_quantization_strength
from .embedding import apply_head as apply_head
from .mixer import ChannelMixer as ChannelMixer
from .norms import apply_norm as apply_norm
from .projection import project as project
from .projection import project_apart as project_apart
from .projection import project_gated as project_gated
from .short_convolution import ShortConvolution as ShortConvolution
