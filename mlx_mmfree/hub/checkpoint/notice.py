"""Notices about checkpoints on standard error."""

import sys


def notify(text: str) -> None:
    """Prints one line on stderr."""
    print(f"[load] {text}", file=sys.stderr)
