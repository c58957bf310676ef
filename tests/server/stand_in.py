"""An engine that writes given texts, behind the server as it is: no model here could call a tool.

`python -m tests.server.stand_in SCRIPT serve --model FOLDER …` runs `mmfree serve`. The script is a JSON
list of texts with their special tokens. Each answer is the next one; after the last, the first again.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from mlx_mmfree.generation.scheduling import Request
from mlx_mmfree.server import chat
from tests.generation.models import Dictation


@contextmanager
def dictate(texts: Iterator[str], model: str | None = None) -> Iterator[None]:
    """Inside the block, the model of a name, or each, writes these texts as its answers in chats."""
    make = chat.text_requests

    def requests(served: Any, *args: Any, **options: Any) -> list[Request]:
        written = make(served, *args, **options)
        if model not in (None, served.name):
            return written
        ids = served.tokenizer.encode(next(texts), add_special_tokens=False, parse_special=True)
        said = Dictation((*ids,))
        return [replace(text, processors=[*text.processors, said]) for text in written]

    chat.text_requests = requests
    try:
        yield
    finally:
        chat.text_requests = make


def main(argv: list[str]) -> int:
    from mlx_mmfree.cli import main as mmfree

    with dictate(cycle(json.loads(Path(argv[0]).read_text()))):
        return mmfree(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
