"""Models of four formats of calls that hold one conversation, whoever asks, and note what they are
asked.

The conversation has a system's instruction, tools, reasoning where the format has it, two calls at
once, a call that was broken, a picture in a tool's result, and a second turn.
"""

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_mmfree.hub import save_model
from tests.server.conftest import with_template
from tests.server.process import ServerProcess
from tests.server.stand_in import dictate, scripted

DATA = Path(__file__).parents[2] / "data"

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class CallingModel:
    """A model of one format of calls.

    Attributes:
        template: The name of its chat template.
        end: The token that ends its turns.
        own: Its further tokens, each with whether it is special.
        opens: What stands before its reasoning; `None` where it has none.
        writes: Writes some calls.
    """

    template: str
    end: str
    own: dict[str, bool]
    opens: str | None
    writes: Callable[[Sequence[Call]], str]

    def answer_text(self, text: str = "", calls: Sequence[Call] = (), reasoning: str = "") -> str:
        """An answer as the model writes it."""
        written = [text] if text else []
        if calls:
            written.append(self.writes(calls))
        # a prompt that opens the reasoning has it closed
        if self.opens == "" or (self.opens and reasoning):
            written.insert(0, f"{self.opens}{reasoning}\n</think>\n\n")
        return "".join(written) + self.end


def _hermes(calls: Sequence[Call]) -> str:
    objects = (json.dumps({"name": name, "arguments": given}) for name, given in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def _tags(calls: Sequence[Call]) -> str:
    def arguments(given: dict[str, Any]) -> str:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()}
        return "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in texts.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{arguments(given)}</function>\n</tool_call>"
        for name, given in calls
    )


def _bare(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": given}) for name, given in calls)


def _list(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": given} for n, given in calls])


_TURNS = {"<|im_start|>": True, "<|im_end|>": True}
_TAGS = {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}
MODELS = {
    "qwen3": CallingModel("qwen3", "<|im_end|>", _TURNS | _TAGS, "<think>\n", _hermes),
    "qwen35": CallingModel("qwen35", "<|im_end|>", _TURNS | _TAGS, "", _tags),
    "llama3": CallingModel("llama3", "<|eot_id|>", {"<|python_tag|>": True}, None, _bare),
    "mistral": CallingModel("mistral", "</s>", {"</s>": True, "[TOOL_CALLS]": True}, None, _list),
}
"""Each by the name under which it is served."""

SYSTEM = "Be brief."
FIRST, LATER, ANIMALS = "Look a fox up.", "Compare it with an owl.", "Which of them flies?"
WORDS = {"fox": "red and quick", "owl": "quiet, with wide eyes"}
REASONING, FOX_ANSWER, OWL_ANSWER = (
    "I look both up.",
    "The fox is quick, the owl is quiet.",
    "The owl.",
)
BROKEN, REFUSED, AGAIN = '{"word": "fo', "The arguments are no JSON.", "I try it once more."
CALLS: list[Call] = [("look_up", {"word": "fox"}), ("look_up", {"word": "owl"})]
DESCRIPTION = "Looks a word up."
PARAMETERS = {
    "type": "object",
    "properties": {"word": {"type": "string", "description": "The word."}},
    "required": ["word"],
    "additionalProperties": False,
}
PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""A PNG of one pixel, in base64."""


def without_ids(prompt: str) -> str:
    """A prompt whose ids of calls are counted, in the order in which they occur."""
    ids = dict.fromkeys(re.findall(r'"(?:id|call_id)": "(\w{9})"', prompt))
    for number, id in enumerate(ids):
        prompt = prompt.replace(f'"{id}"', f'"{number}"')
    return prompt


CLAUDE, CODEX = "Look at both files.", "Look at the two files."
"""The questions for Claude Code and Codex: they have other tools, and the same files."""


def script(model: CallingModel, files: Path) -> list[tuple[str, str]]:
    """The answers by their cues: the cue that stands last in the conversation counts."""
    fox, owl = (str(files / name) for name in ("fox.txt", "owl.png"))
    reads: list[Call] = [("Read", {"file_path": fox}), ("Read", {"file_path": owl})]
    views: list[Call] = [("exec_command", {"cmd": f"cat {fox}"}), ("view_image", {"path": owl})]
    return [
        (LATER, model.answer_text(calls=CALLS, reasoning=REASONING)),
        (WORDS["owl"], model.answer_text(FOX_ANSWER)),
        (ANIMALS, model.answer_text(OWL_ANSWER)),
        # first a call without its argument, which the agent refuses in these words
        (CLAUDE, model.answer_text(calls=[("Read", {})])),
        ("parameter `file_path` is missing", model.answer_text(calls=reads, reasoning=REASONING)),
        (CODEX, model.answer_text(calls=[("exec_command", {})])),
        ("missing field `cmd`", model.answer_text(calls=views, reasoning=REASONING)),
        (WORDS["fox"], model.answer_text(FOX_ANSWER)),
    ]


def _noted(name: str, answer: Callable[[str], str], log: Path) -> Callable[[str], str]:
    def noted(prompt: str) -> str:
        with log.open("a") as file:
            print(json.dumps([name, prompt]), file=file)
        return answer(prompt)

    return noted


@contextmanager
def reported(log: Path) -> Iterator[None]:
    """Inside the block, the models follow their scripts, and a file notes each prompt."""
    with ExitStack() as stack:
        for name, model in MODELS.items():
            answer = scripted(script(model, log.parent / "files"))
            stack.enter_context(dictate(_noted(name, answer, log), name))
        yield


class Server(ServerProcess):
    """A server of all models.

    Args:
        folder: An empty folder, which gets the models, the prompts and stored responses.

    Attributes:
        files: A folder with a text about a fox and a picture of an owl.
    """

    def __init__(self, folder: Path):
        self._log_file = folder / "prompts.jsonl"
        self._log_file.touch()
        self.files = folder / "files"
        self.files.mkdir()
        (self.files / "fox.txt").write_text(WORDS["fox"])
        (self.files / "owl.png").write_bytes(b64decode(PICTURE))
        models = []
        for name, each in MODELS.items():
            template = (DATA / f"{each.template}.jinja").read_text()
            model, _ = with_template(
                folder / f"{name}-tokenizer", template, tokens=each.own, end=each.end
            )
            save_model(folder / name, model, folder / f"{name}-tokenizer")
            models += ["--model", folder / name]
        first = (
            "from pathlib import Path\n"
            "from tests.server.agents.models import reported\n"
            f"scripts = reported(Path({str(self._log_file)!r}))\n"
            "scripts.__enter__()"
        )
        # the instructions of Claude Code take 47,000 tokens
        limits = ("--max-context", "131072", "--session-dir", folder / "sessions")
        super().__init__(*models, *limits, first=first)

    def prompts(self) -> list[tuple[str, str]]:
        """The prompts so far, each after the name of its model."""
        return [tuple(json.loads(line)) for line in self._log_file.read_text().splitlines()]
