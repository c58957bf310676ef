"""`ternary_linear` as on Metal. It has not been run on a GPU."""

from .metal import run as run
