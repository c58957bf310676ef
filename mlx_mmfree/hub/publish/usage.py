"""The part of a model card that says how the model is used."""

import json

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
_GENERATE = 'generate --model {0} --adapter-path {0} --prompt "Once upon a time"'
_CLASSIFY = "classify --model {0} --adapter-path {0} picture.jpg"


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
        language, code = "bash", _COMMANDS[pipeline].format(name)
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
        f'```bash\nmlx_lm.generate --model {name}{flag} --prompt "Once upon a time"\n```'
    )
    if flag:
        text += (
            "\n\nmlx-lm has no such architecture of its own: the flag lets it run the model's Python "
            "file that lies in this repository."
        )
    return text


def adapter_usage(name: str, pipeline: Pipeline) -> str:
    """How an adapter is used whose base lies beside it."""
    folder = name.rstrip("/").rpartition("/")[2]
    command = _CLASSIFY if pipeline == "image-classification" else _GENERATE
    return (
        "## Usage\n\nThe adapter lies beside its base and is put on it when it is asked for:\n\n"
        f"```bash\nhf download {name} --local-dir {folder}\nmmfree {command.format(folder)}\n```"
    )
