"""Token mixers: modules that mix along the sequence and carry state. One file per mixer."""

from ..layers.attention_options import AttentionNorms as AttentionNorms
from ..layers.attention_options import KeyValueCache as KeyValueCache
from .attention_sink import AttentionSink as AttentionSink
from .cosformer import CosFormer as CosFormer
from .cosformer import CosFormerState as CosFormerState
from .gla import GLA as GLA
from .gla import GLAState as GLAState
from .gqa import GQA as GQA
from .hgrn import HGRN as HGRN
from .hgrn import HGRNState as HGRNState
from .hgrn2 import HGRN2 as HGRN2
from .hgrn2 import HGRN2State as HGRN2State
from .hydra import Hydra as Hydra
from .hydra import HydraState as HydraState
from .linear_attention import LinearAttention as LinearAttention
from .linear_attention import LinearAttentionState as LinearAttentionState
from .local_attention import LocalAttention as LocalAttention
from .mlgru import MLGRU as MLGRU
from .mlgru import MLGRUState as MLGRUState
from .multi_head_attention import MemoryState as MemoryState
from .multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .relu_attention import ReLUAttention as ReLUAttention
from .retnet import RetNet as RetNet
from .retnet import RetNetState as RetNetState
from .sima import SimA as SimA
from .sliding_window_attention import SlidingWindowAttention as SlidingWindowAttention
