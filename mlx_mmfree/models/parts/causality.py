"""Whether a model can go on with a text."""

from ...errors import UnsupportedModelError
from .decoder import Decoder
from .token_model import TokenModel


def check_causal(model: TokenModel) -> None:
    """Refuses a model that cannot continue a text.

    Args:
        model: The model.

    Raises:
        UnsupportedModelError: It is made for something else, or a token mixer sees what comes after.

    Example:
        >>> from mlx_mmfree import demo, load
        >>> model, tokenizer = load(demo.path())
        >>> check_causal(model)
    """
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(
            f"[model] the model must continue texts but {type(model).__name__} is for {model.purpose}. "
            f"Use 'mmfree {model.command}' for it, or load it in Python with mlx_mmfree.load_model."
        )
    for number, mixer in enumerate(model.token_mixers):
        if not mixer.is_causal:
            raise UnsupportedModelError(
                "[model] every token mixer must be causal, so that a text can go on, but "
                f"{type(mixer).__name__} of block {number} sees the whole text."
            )
