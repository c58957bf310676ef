"""Commands: one file each, which parses flags and calls the library."""

from .parts.console import main as main
