"""Notices about checkpoints on standard error."""

import sys

from ...errors import shown_path


def notify(text: str) -> None:
    """Prints one line on stderr, which names the user's files."""
    print(f"[load] {shown_path(text)}", file=sys.stderr)
