"""Several texts at once: requests join and leave between steps, each with a sampler of its own."""

from .requests import Event as Event
from .requests import Request as Request
from .requests import TokenLogprobs as TokenLogprobs
from .scheduler import Scheduler as Scheduler
