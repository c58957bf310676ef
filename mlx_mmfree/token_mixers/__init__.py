"""Token mixers: modules that mix along the sequence and carry state. One file per mixer."""

from ..layers.attention_options import AttentionNorms as AttentionNorms
from ..layers.attention_options import KeyValueCache as KeyValueCache
from .gqa import GQA as GQA
from .linear_attention import LinearAttention as LinearAttention
from .linear_attention import LinearAttentionState as LinearAttentionState
from .mlgru import MLGRU as MLGRU
from .mlgru import MLGRUState as MLGRUState
