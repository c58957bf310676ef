"""The packaged demo model: a small MatMul-free language model for stories, with its tokenizer."""

from pathlib import Path

from ..errors import CheckpointError

_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def path() -> Path:
    """The folder of the demo model, to be given to `load`.

    Raises:
        CheckpointError: The package was installed without the model's files.
    """
    folder = Path(__file__).parent
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"[demo] '{folder}' must hold the packaged model but lacks {', '.join(missing)}. "
            "Install the package again, or give another model."
        )
    return folder
