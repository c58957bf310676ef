"""Decoding: token loop, samplers, penalties, stop rules, text, conversations and memory."""

from .batch import BatchResponse as BatchResponse
from .batch import BatchStats as BatchStats
from .batch import batch_generate as batch_generate
from .chat import Chat as Chat
from .decode import generate_tokens as generate_tokens
from .decode import prefill as prefill
from .memory import MemoryNeed as MemoryNeed
from .memory import check_memory as check_memory
from .memory import memory_limits as memory_limits
from .memory import memory_need as memory_need
from .penalties import CountPenalty as CountPenalty
from .penalties import LogitsProcessor as LogitsProcessor
from .penalties import RepetitionPenalty as RepetitionPenalty
from .penalties import make_processors as make_processors
from .samplers import Sampler as Sampler
from .samplers import chain as chain
from .samplers import greedy as greedy
from .samplers import make_sampler as make_sampler
from .samplers import temperature as temperature
from .stop import StopStrings as StopStrings
from .text import GenerationResponse as GenerationResponse
from .text import generate as generate
from .text import stream_generate as stream_generate
