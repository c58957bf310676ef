"""The commands of `mmfree`. Each file parses the flags of one command and calls the library."""

from .parts.commands import main as main
