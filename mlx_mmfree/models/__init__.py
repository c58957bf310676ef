"""Language models: blocks, the decoder, and one file per architecture of the Hub."""

from .architectures import find as find
from .architectures import known_model_types as known_model_types
from .block import Block as Block
from .decoder import Decoder as Decoder
