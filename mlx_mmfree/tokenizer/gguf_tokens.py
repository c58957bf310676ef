"""The types of tokens in GGUF files, and tokens that llama.cpp knows by their names.

Converters left out many ends of texts, or typed them as ordinary tokens. The names are those of
`src/llama-vocab.cpp` in llama.cpp, as of llama-cpp-python 0.3.36.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from enum import IntEnum


class TokenType(IntEnum):
    """The types of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "[e~[",
    )
)
# of each kind one token counts, and ends a text where the file names none for the role
_FILLING_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_FILLING = (
    ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),  # noqa: RUF001
    ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),  # noqa: RUF001
    ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),  # noqa: RUF001
)
# tokens of channels, which are shown
_SHOWN = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))
ROLES = ("eos", "eot", "eom", *_FILLING_ENDS)
"""The roles of tokens that end a text."""


def end_tokens(tokens: Sequence[str], roles: Mapping[str, int]) -> set[int]:
    """The tokens that end a text: those that the file names, and those that have a known name.

    Args:
        tokens: The vocabulary.
        roles: The tokens that the file names, by role.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    ends = {numbers[name] for name in _ENDS & numbers.keys()}
    ends |= {roles[name] for name in ROLES if name in roles}
    for role, names in _FILLING_ENDS.items():
        if role not in roles:
            ends |= _first(names, numbers)
    found = {tokens[number] for number in ends}
    if {"<|call|>", "<|calls|>"} & found and {"<|return|>", "<|flush|>"} & found:
        # there it ends a message, which others follow
        ends.discard(numbers.get("<|end|>", -1))
    if "<|tool_response>" in found:
        ends.discard(numbers.get("</s>", -1))
    return ends


def known_types(tokens: Sequence[str], types: Sequence[int], ends: Set[int]) -> list[int]:
    """The types of tokens, in which those with a known name have the type that their role asks for."""
    numbers = {token: number for number, token in enumerate(tokens)}
    known = dict.fromkeys(ends, TokenType.CONTROL)
    known |= {number: TokenType.CONTROL for names in _FILLING for number in _first(names, numbers)}
    known |= {numbers[name]: TokenType.USER_DEFINED for name in _SHOWN & numbers.keys()}
    if "<|end|>" in numbers and numbers["<|end|>"] not in ends:
        known[numbers["<|end|>"]] = TokenType.USER_DEFINED
    return [known.get(number, kind) for number, kind in enumerate(types)]


def _first(names: Iterable[str], numbers: Mapping[str, int]) -> set[int]:
    """The first of the tokens with some names, if there is one."""
    return set(sorted(numbers[name] for name in names if name in numbers)[:1])
