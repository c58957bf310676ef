"""Parts that mixers and models are built from."""

from .apply_norm import apply_norm as apply_norm
from .bit_linear import BitLinear as BitLinear
from .bit_linear import PackedBitLinear as PackedBitLinear
from .bit_linear import TiedBitLinear as TiedBitLinear
from .bit_linear import pack_linears as pack_linears
from .bit_linear import packable as packable
from .bit_linear import set_quantization_strength as set_quantization_strength
from .channel_mixer import ChannelMixer as ChannelMixer
from .dense_head import apply_head as apply_head
from .packed_linear import PackedLinear as PackedLinear
from .projection import project as project
from .projection import project_apart as project_apart
from .projection import project_gated as project_gated
from .rope import DynamicRoPE as DynamicRoPE
from .rope import RoPE as RoPE
from .short_convolution import ShortConvolution as ShortConvolution
