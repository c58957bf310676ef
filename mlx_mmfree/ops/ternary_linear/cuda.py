"""`ternary_linear` as on Metal."""

from .metal import run as run
