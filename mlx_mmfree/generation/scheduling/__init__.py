"""Several texts at once: requests join and leave between steps, each with a sampler of its own."""

from .request import Event as Event
from .request import Request as Request
from .request import TokenLogprobs as TokenLogprobs
from .scheduler import Scheduler as Scheduler
