"""Language models: blocks, the decoder, and one file per architecture of the Hub."""

from .parts.architecture import Architecture as Architecture
from .parts.architectures import architecture_of as architecture_of
from .parts.architectures import architectures as architectures
from .parts.architectures import find as find
from .parts.architectures import known_model_types as known_model_types
from .parts.block import Block as Block
from .parts.decoder import Decoder as Decoder
