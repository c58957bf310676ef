"""What is said on the way about a checkpoint."""

import sys


def notify(text: str) -> None:
    """One line on stderr."""
    print(f"[load] {text}", file=sys.stderr)
