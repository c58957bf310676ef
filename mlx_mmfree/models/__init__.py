"""Language models: blocks, the decoder, and one file per architecture of the Hub."""

from .parts.architecture import Architecture as Architecture
from .parts.architecture import architecture_of as architecture_of
from .parts.architecture import architectures as architectures
from .parts.architecture import find as find
from .parts.architecture import find_described as find_described
from .parts.architecture import known_model_types as known_model_types
from .parts.block import Block as Block
from .parts.block import set_dropout as set_dropout
from .parts.embedder import EmbeddingUse as EmbeddingUse
from .parts.embedder import TextEmbedder as TextEmbedder
from .parts.encoders import EncoderDecoder as EncoderDecoder
from .parts.encoders import MaskedLM as MaskedLM
from .parts.encoders import SequenceClassifier as SequenceClassifier
from .parts.image_classifier import ImageClassifier as ImageClassifier
from .parts.stack import Decoder as Decoder
from .parts.stack import Stack as Stack
from .parts.stack import TokenModel as TokenModel
from .parts.stack import check_causal as check_causal
