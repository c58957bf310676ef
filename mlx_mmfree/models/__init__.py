"""Language models: blocks, the decoder, and one file per architecture of the Hub."""

from .parts.architecture import Architecture as Architecture
from .parts.architectures import architecture_of as architecture_of
from .parts.architectures import architectures as architectures
from .parts.architectures import find as find
from .parts.architectures import find_described as find_described
from .parts.architectures import known_model_types as known_model_types
from .parts.block import Block as Block
from .parts.block import set_dropout as set_dropout
from .parts.causality import check_causal as check_causal
from .parts.decoder import Decoder as Decoder
from .parts.encoder_decoder import EncoderDecoder as EncoderDecoder
from .parts.image_classifier import ImageClassifier as ImageClassifier
from .parts.masked_lm import MaskedLM as MaskedLM
from .parts.sequence_classifier import SequenceClassifier as SequenceClassifier
from .parts.stack import Stack as Stack
from .parts.token_model import TokenModel as TokenModel
