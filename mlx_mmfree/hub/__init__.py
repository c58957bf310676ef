"""Checkpoints and tokenizers: download, read, convert, save."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import open_checkpoint as open_checkpoint
from .convert import convert as convert
from .load import load as load
from .load import load_model as load_model
from .load import load_tokenizer as load_tokenizer
from .load import needed_bytes as needed_bytes
from .save import save_model as save_model
from .tokenizer import Tokenizer as Tokenizer
from .verify import Report as Report
