"""Turns the vocabulary in the metadata of GGUF files into the tokenizer files of a checkpoint.

Converters left out many ends of texts, or typed them as ordinary tokens, so that some are known by
their names, which come from `src/llama-vocab.cpp` in llama.cpp, as of llama-cpp-python 0.3.36.

The protobuf message of a `tokenizer.model` is written by hand, since `sentencepiece` cannot build one.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import IntEnum
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .vocabulary import GGUF_MARK


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


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# how text is split before merging, by `tokenizer.ggml.pre`
_PATTERNS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon_e", "falcon-e"), LLAMA3_PATTERN
    ),
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "mpt"), _GPT2),
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
}
# where a SentencePiece vocabulary names no token for a role
_SENTENCEPIECE_ROLES = {"unknown": 0, "bos": 1, "eos": 2}
TEMPLATE_KEY = "tokenizer.chat_template"
"""Templates with names have keys below it, such as `tokenizer.chat_template.tool_use`."""

BYTE_LEVEL_PATTERNS = {
    LLAMA3_PATTERN: "llama-bpe",
    _QWEN2: "qwen2",
    _QWEN35: "qwen35",
    _GPT2: "gpt-2",
}
"""The names of the patterns that can be written."""


def files_of_metadata(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """The content of the tokenizer files by name; empty if the GGUF file has no vocabulary.

    Raises:
        CheckpointError: The vocabulary is damaged.
        UnsupportedModelError: The vocabulary is of a kind that is not read.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"[GGUF] 'tokenizer.ggml.model' must be gpt2 or llama but got {kind!r:.80}. Put the "
            "tokenizer.json of the model into the folder of the file and give the folder."
        )
    tokens = [
        token or f"[EMPTY_{number}]" for number, token in enumerate(_list(metadata, "tokens", str))
    ]
    types = _each(metadata, "token_type", int, TokenType.NORMAL, tokens)
    usual = _SENTENCEPIECE_ROLES if kind == "llama" else {}
    roles = {
        name: number
        for name in ("unknown", "bos", *ROLES)
        if (number := _token_id(metadata, name, tokens, usual.get(name))) is not None
    }
    ends = end_tokens(tokens, roles)
    types = known_types(tokens, types, ends)
    pattern = _pattern(metadata, tokens) if kind == "gpt2" else ""
    settings = _settings(metadata, tokens, kind == "llama" or pattern == LLAMA3_PATTERN)
    settings |= {f"{name}_token": tokens[roles[name]] for name in ("bos", "eos") if name in roles}
    if kind == "gpt2":
        files = {"tokenizer.json": _byte_level(metadata, tokens, types, pattern)}
    else:
        files = {"tokenizer.model": _sentencepiece(metadata, tokens, types, roles)}
        settings["added_tokens_decoder"] = {
            token["id"]: token for token in _added_tokens(tokens, types)
        }
    files["generation_config.json"] = json.dumps({"eos_token_id": sorted(ends)}).encode()
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    return files


def _list(
    metadata: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None
) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise CheckpointError(
            f"[GGUF] 'tokenizer.ggml.{name}' must be a list of its kind but got {value!r:.60}. "
            "Fetch the file again."
        )
    return value


def _each(
    metadata: Mapping[str, Any],
    name: str,
    kind: type | tuple[type, ...],
    usual: Any,
    tokens: list[str],
) -> list[Any]:
    """A value for each token, of a list that may be longer; the usual one if the file has no list."""
    values = _list(metadata, name, kind, [usual] * len(tokens))
    if not tokens or len(values) < len(tokens):
        raise CheckpointError(
            f"[GGUF] 'tokenizer.ggml.{name}' must have one entry for each of {len(tokens)} tokens but "
            f"has {len(values)}. Fetch the file again."
        )
    return values[: len(tokens)]


def _token_id(
    metadata: Mapping[str, Any], role: str, tokens: Sequence[str], default: int | None
) -> int | None:
    """The id of the token with a role; the usual one if the file names no token that exists."""
    numbers = (metadata.get(f"tokenizer.ggml.{role}_token_id"), default)
    return next((n for n in numbers if type(n) is int and 0 <= n < len(tokens)), None)


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"[GGUF] 'tokenizer.ggml.{name}' must be true or false but got {value!r:.60}. Fetch the "
            "file again."
        )
    return value


def _settings(metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool) -> dict[str, Any]:
    templates = {
        key.removeprefix(TEMPLATE_KEY).removeprefix(".") or "default": template
        for key, template in metadata.items()
        if key == TEMPLATE_KEY or key.startswith(f"{TEMPLATE_KEY}.")
    }
    return {
        **GGUF_MARK,
        "add_bos_token": _flag(metadata, "add_bos_token", adds_bos),
        "add_eos_token": _flag(metadata, "add_eos_token", False),
        "chat_template": [{"name": n, "template": text} for n, text in templates.items()],
    }


def _pattern(metadata: Mapping[str, Any], tokens: list[str]) -> str:
    kind = metadata.get("tokenizer.ggml.pre")
    if kind is None and {"<|begin_of_text|>", "<|eot_id|>"} <= set(tokens):
        # BitNet's files do not name it, but have the tokens of Llama 3
        kind = "llama-bpe"
    if not isinstance(kind, str) or kind not in _PATTERNS:
        raise UnsupportedModelError(
            f"[GGUF] 'tokenizer.ggml.pre' must be one of {', '.join(_PATTERNS)} but got "
            f"{kind!r:.80}. Put the tokenizer.json of the model into the folder of the file and "
            "give the folder."
        )
    return _PATTERNS[kind]


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], pattern: str
) -> bytes:
    """The content of a `tokenizer.json` with byte-level BPE."""
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pieces = (part for merge in merges for part in (*merge, "".join(merge)))
    if len(vocabulary) < len(tokens) or not all(piece in vocabulary for piece in pieces):
        raise CheckpointError(
            "[GGUF] 'tokenizer.ggml.merges' must join pairs of tokens, each listed once, to tokens "
            "but does not. Fetch the file again."
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    value = {
        "version": "1.0",
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "NFC"} if pattern in (_QWEN2, _QWEN35) else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, byte_level | {"use_regex": False}],
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pattern == LLAMA3_PATTERN,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return json.dumps(value).encode()


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that merging does not make."""
    return [
        {
            "id": number,
            "content": token,
            "special": kind != TokenType.USER_DEFINED,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    ]


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: list[str],
    types: list[int],
    roles: Mapping[str, int],
) -> bytes:
    """The content of a `tokenizer.model`, a protobuf message, with byte-pair merges by score."""
    scores = _each(metadata, "scores", (int, float), 0.0, tokens)
    kinds = [_PIECE_TYPES.get(kind, TokenType.NORMAL) for kind in types]
    if TokenType.BYTE not in types and set(_BYTES) <= set(tokens):
        # llama.cpp finds them by their names
        kinds = [
            TokenType.BYTE if token in _BYTES else k for token, k in zip(tokens, kinds, strict=True)
        ]
    # the package wants one unknown piece; with bytes, no text becomes it
    unknown = [n for n, kind in enumerate(types) if kind == TokenType.UNKNOWN]
    named = roles.get("unknown", 0)
    kinds[named if named in unknown or not unknown else unknown[0]] = TokenType.UNKNOWN
    message = b"".join(
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    )
    names = b"".join(
        _field(field, tokens[roles[name]].encode())
        for name, field in _ROLE_FIELDS.items()
        if name in roles
    )
    trainer = _number(3, 2) + _number(35, int(TokenType.BYTE in kinds)) + names
    normalizer = (
        _field(1, b"identity")
        + _number(3, int(_flag(metadata, "add_space_prefix", True)))
        + _number(4, int(_flag(metadata, "remove_extra_whitespaces", False)))
        + _number(5, 1)
    )
    return message + _field(2, trainer) + _field(3, normalizer)


# how pieces are typed there. Texts are split at user-defined tokens and unknown ones before, as
# llama.cpp splits them, so that the package meets neither
_PIECE_TYPES: dict[int, TokenType] = {
    TokenType.CONTROL: TokenType.CONTROL,
    TokenType.UNKNOWN: TokenType.CONTROL,
    TokenType.UNUSED: TokenType.UNUSED,
    TokenType.BYTE: TokenType.BYTE,
}
_BYTES = dict.fromkeys(f"<0x{byte:02X}>" for byte in range(256))
# the fields of the message's `trainer_spec` that hold the text of the token with each role
_ROLE_FIELDS = {"unknown": 45, "bos": 46, "eos": 47}


def _varint(value: int) -> bytes:
    digits = []
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & 2**64 - 1)


def _field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
