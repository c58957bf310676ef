"""Certifies what one decoded token does, from the graph that was recorded of it."""

from .certificate import Certificate as Certificate
from .certificate import certify as certify
