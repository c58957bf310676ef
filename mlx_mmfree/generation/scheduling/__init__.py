"""Several texts at once: requests join and leave between steps, each with a sampler of its own."""

from .scheduler import Scheduler as Scheduler
from .writing import Event as Event
from .writing import Request as Request
from .writing import TokenLogprobs as TokenLogprobs
