"""Chat templates: Jinja programs that come with a checkpoint and write out a conversation."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, MMFreeError, UsageError
from ...platform.confinement import ConfinedProcess, LimitError

CPU_SECONDS = 2.0
MEMORY_BYTES = 256 * 2**20
MAX_CHARACTERS = 8 * 2**20
_PROBE = "words of a part"
_LISTED = re.compile(f"""['"]{_PROBE}['"]""")

_renderer = ConfinedProcess(
    "mlx_mmfree.tokenizer.chat.template_server", ("jinja2", "markupsafe"), MEMORY_BYTES
)


class ChatTemplate:
    """One chat template.

    Args:
        source: The Jinja source.
        folder: The folder it was read from, for messages.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.source = source
        self._folder = folder
        self._reads_parts: bool | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Args:
            variables: `messages`, `add_generation_prompt` and whatever else the template reads.

        Raises:
            UsageError: The template refuses the messages.
            CheckpointError: The template is faulty, takes too long or writes too much.
        """
        names = {"tools": None, "documents": None} | dict(variables)
        try:
            answer = _renderer.ask((self.source, names, MAX_CHARACTERS), CPU_SECONDS)
        except LimitError as error:
            raise self._fault(str(error)) from error
        if "refused" in answer:
            raise UsageError(
                f"[chat template] the chat template refuses the messages: {answer['refused']}"
            )
        if "text" not in answer:
            raise self._fault(answer["fault"], answer.get("line"))
        return str(answer["text"])

    def reads_parts(self, named: Mapping[str, Any]) -> bool:
        """Whether the template writes the text of a message that comes as a list of parts.

        Args:
            named: The special tokens by the names under which the template reads them.
        """
        if self._reads_parts is None:
            message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
            names = {**named, "messages": [message], "add_generation_prompt": False}
            try:
                text = self.render(names)
            except MMFreeError:
                text = ""
            # a template that knows texts alone writes the list itself
            self._reads_parts = _PROBE in text and not _LISTED.search(text)
        return self._reads_parts

    def _fault(self, reason: str, line: int | None = None) -> CheckpointError:
        place = "" if line is None else f" in line {line}"
        return CheckpointError(
            f"[chat template] the chat template of '{self._folder}' cannot be used{place} ({reason}). "
            "Correct it, or encode a plain prompt instead."
        )
