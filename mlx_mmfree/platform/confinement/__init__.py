"""Runs code on strangers' files in a process of its own, with limits on time and memory."""

from .process import Branch as Branch
from .process import ConfinedProcess as ConfinedProcess
from .process import LimitError as LimitError
from .process import TimeLimitError as TimeLimitError
