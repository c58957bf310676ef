"""An engine that writes given texts, after the server as it is: no model here could call a tool.

`python -m tests.server.stand_in SCRIPT serve --model FOLDER …` runs `mmfree serve`. The script is a JSON
list of pairs: an answer is the second text of the pair whose first text stands last in the conversation.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_mmfree.generation.scheduling import Request
from mlx_mmfree.server import chat
from tests.generation.models import Dictation


@contextmanager
def dictate(answer: Callable[[str], str], model: str | None = None) -> Iterator[None]:
    """Inside the block, the model of a name, or each, answers conversations as `answer` does.

    Args:
        answer: Takes a conversation as the model reads it, and returns a text with special tokens.
        model: The name.
    """
    make = chat.text_requests

    def requests(served: Any, *args: Any, **options: Any) -> list[Request]:
        written = make(served, *args, **options)
        if model not in (None, served.name):
            return written
        reply = answer(served.tokenizer.decode(written[0].tokens))
        ids = served.tokenizer.encode(reply, add_special_tokens=False, parse_special=True)
        reported = Dictation((*ids,))
        return [replace(text, processors=[*text.processors, reported]) for text in written]

    chat.text_requests = requests
    try:
        yield
    finally:
        chat.text_requests = make


def scripted(pairs: Sequence[tuple[str, str]]) -> Callable[[str], str]:
    """Answers with the second text of the pair whose first text stands last."""

    def answer(conversation: str) -> str:
        _, number = max((conversation.rfind(cue), number) for number, (cue, _) in enumerate(pairs))
        return pairs[number][1]

    return answer


def main(argv: list[str]) -> int:
    from mlx_mmfree.cli import main as mmfree

    with dictate(scripted(json.loads(Path(argv[0]).read_text()))):
        return mmfree(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
