"""`rms_norm` by the operations that it is made of."""

from .reference import run as run
