"""Downloads, loads, converts, saves and uploads checkpoints."""

from ..files.plugins import load_plugin as load_plugin
from ..tokenizer.tokenizer import Tokenizer as Tokenizer
from .checkpoint.checkpoint import Checkpoint as Checkpoint
from .checkpoint.checkpoint import open_checkpoint as open_checkpoint
from .checkpoint.load import load as load
from .checkpoint.load import load_model as load_model
from .checkpoint.load import load_tokenizer as load_tokenizer
from .checkpoint.load import needed_bytes as needed_bytes
from .checkpoint.save import save_model as save_model
from .conversion.convert import convert as convert
from .conversion.fuse import fuse as fuse
from .conversion.verify import Report as Report
