"""Token mixers: modules that mix along the sequence and carry state. One file per mixer."""

from .gqa import GQA as GQA
from .mlgru import MLGRU as MLGRU
from .mlgru import MLGRUState as MLGRUState
