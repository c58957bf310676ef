"""The part of a model card that says how the model is used."""

import json
import re
import shlex

from ...models.parts.architecture import Pipeline
from .runtimes import MLX_LM, Opening, opening
from .tables import rows

_PYTHON: dict[Pipeline, str] = {
    "text-generation": "from mlx_mmfree import generate, load\n\n"
    "model, tokenizer = load({0})\n"
    'print(generate(model, tokenizer, "Once upon a time"))',
    "image-classification": "from mlx_mmfree import load\n\n"
    "model, processor = load({0})\n"
    'print(model(processor(["picture.jpg"])).argmax(axis=-1))',
}
_COMMANDS: dict[Pipeline, str] = {
    "fill-mask": 'mmfree fill --model {0} --text "A text with the tokenizer\'s mask token in it."',
    "text-classification": 'mmfree classify --model {0} --text "A text to classify."',
    "translation": 'mmfree translate --model {0} --text "A text to translate."',
}
_SECTION = re.compile(r"^## Usage$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^Made from .+ with mlx_mmfree \S+:$", re.MULTILINE)
# a text of Python, or a word of the shell
_NAME = re.compile(
    r"""(?<=\bload\()"(?:[^"\\\n]|\\.)*"(?=\))"""
    r"""|(?<=--model )(?:'[^'\n]*'|"[^"\n]*"|[^\s'"`])+"""
)


def usage(name: str, pipeline: Pipeline, openings: tuple[Opening, ...]) -> str:
    """How a model is used, with this library and with others.

    Args:
        name: The repository `owner/name` or the folder under which a user loads the model.
        pipeline: What the model does.
        openings: Which programs open the folder; empty if that is not known.
    """
    if pipeline in _PYTHON:
        language, code = "python", _PYTHON[pipeline].format(json.dumps(name))
    else:
        language, code = "bash", _COMMANDS[pipeline].format(shlex.quote(name))
    text = (
        "## Usage\n\nWith mlx_mmfree, which computes as the model was trained, with 8-bit "
        f"activations where it has them:\n\n```{language}\n{code}\n```"
    )
    if not openings:
        return text
    text += f"\n\nOther programs:\n\n{rows({o.runtime: str(o) for o in openings})}"
    mlx_lm = opening(openings, MLX_LM)
    if mlx_lm is None or not mlx_lm.opens:
        return text
    flag = " --trust-remote-code" if "--trust-remote-code" in mlx_lm.note else ""
    text += (
        "\n\nWith mlx-lm:\n\n"
        f"```bash\nmlx_lm.generate --model {shlex.quote(name)}{flag} "
        '--prompt "Once upon a time"\n```'
    )
    if flag:
        text += (
            "\n\nmlx-lm has no such architecture of its own: the flag lets it run the model's Python "
            "file that lies in this repository."
        )
    return text


def adapter_usage(name: str, pipeline: Pipeline) -> str:
    """How a base model is used with the adapter that lies beside it."""
    return usage(name, pipeline, ()) + (
        "\n\nThe adapter lies beside the base model, and mlx_mmfree puts it on. Other programs see the "
        "base model alone."
    )


def with_name(card: str, name: str) -> str:
    """A model card of this library whose heading and commands name another place; others stay.

    Args:
        card: The text of the card.
        name: The repository `owner/name` or the folder under which a user loads the model.
    """
    mark, section = _MARK.search(card), _SECTION.search(card)
    if mark is None or section is None or mark.start() > section.start():
        return card
    found = _NAME.search(section[0])
    if found is None:
        return card
    try:
        old = json.loads(found[0]) if found[0].startswith('"') else shlex.split(found[0])[0]
    except ValueError:
        return card
    heading, new_heading = (f"\n# {last_part(each)}\n" for each in (old, name))
    head = card[: section.start()].replace(heading, new_heading, 1)
    named = _NAME.sub(
        lambda each: json.dumps(name) if each[0].startswith('"') else shlex.quote(name), section[0]
    )
    return head + named + card[section.end() :]


def last_part(name: str) -> str:
    """The last part of a repository's name or of a path."""
    return name.rstrip("/").rpartition("/")[2]
