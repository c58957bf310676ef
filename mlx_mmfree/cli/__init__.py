"""Commands: one file each, which parses flags and calls the library."""

from .console import main as main
