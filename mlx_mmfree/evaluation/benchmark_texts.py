"""How many of the library's kernel texts Metal compiles for a chat. Counting them takes no Metal."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..generation.states import fixed_state
from ..models import Decoder
from ..ops import use_backend
from ..ops.backend.launch import FEW_ROWS, MAX_GROUP_ROWS, recording

LONG_PROMPT = 2 * FEW_ROWS
"""The length of a prompt that is longer than those with kernels of their own."""


@dataclass(frozen=True)
class KernelTexts:
    """Numbers of texts. Metal compiles each once, and keeps what it has compiled.

    Attributes:
        decode: Texts that decode a token.
        prompt: Texts that read a prompt of more tokens than a kernel for few rows takes.
        chat: Texts of a chat with such prompts: those of both.
        every_length: Texts of chats with prompts of every length.
    """

    decode: int
    prompt: int
    chat: int
    every_length: int


def kernel_texts(model: Decoder) -> KernelTexts:
    """Counts the texts of a model that computes with the kernels that are chosen where none was timed.

    The checks at the first use of a kernel are included. MLX's own kernels are not.
    """
    with recording() as found, use_backend("metal"):
        each = model.block_arguments()

        def read(length: int, state: Any) -> Any:
            hidden, state = model.hidden(
                mx.ones((1, length), mx.int32), state, block_arguments=each
            )
            mx.eval(model.logits(hidden[:, -1:]), state)
            return state

        # the first prompt of a chat and a later one
        state = read(LONG_PROMPT, read(LONG_PROMPT, None))
        prompt = set(found)
        found.clear()
        read(1, fixed_state(model, state)[0])
        decode = set(found)
        # as many rows as a group can have
        for length in range(1, MAX_GROUP_ROWS + 1):
            read(length, read(length, None))
    return KernelTexts(len(decode), len(prompt), len(decode | prompt), len(prompt.union(found)))
