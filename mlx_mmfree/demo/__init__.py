"""The bundled demo model: a small MatMul-free language model for stories, with its tokenizer."""

from pathlib import Path

from ..errors import CheckpointError

_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def path() -> Path:
    """The folder of the demo model, to be given to `load`.

    Returns:
        Where its files lie.

    Raises:
        CheckpointError: The package was installed without the model's files.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> model.vocab_size, tokenizer.decode(tokenizer.encode("Once upon a time"))
        (2048, 'Once upon a time')
    """
    folder = Path(__file__).parent
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"[demo] '{folder}' must hold the bundled model but lacks {', '.join(missing)}. "
            "Install the package again, or give another model."
        )
    return folder
