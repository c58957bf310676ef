"""Turns the vocabulary in the metadata of GGUF files into the tokenizer files of a checkpoint.

The protobuf message of a `tokenizer.model` is written by hand, since `sentencepiece` cannot build one.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError
from .special_tokens import ENDS_OF_TURN

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# how text is split before merging, by `tokenizer.ggml.pre`
_PATTERNS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon_e", "falcon-e"), LLAMA3_PATTERN
    ),
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "mpt"), _GPT2),
    "qwen2": _QWEN2,
}
TEMPLATE_KEY = "tokenizer.chat_template"
"""Templates with names have keys below it, such as `tokenizer.chat_template.tool_use`."""

BYTE_LEVEL_PATTERNS = {LLAMA3_PATTERN: "llama-bpe", _QWEN2: "qwen2", _GPT2: "gpt-2"}
"""The names of the patterns that can be written."""


class TokenType(IntEnum):
    """The types of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


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
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, [TokenType.NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(
            f"[GGUF] 'tokenizer.ggml.token_type' must have one entry for each of {len(tokens)} "
            f"tokens but has {len(types)}. Fetch the file again."
        )
    pattern = _pattern(metadata, tokens) if kind == "gpt2" else ""
    if kind == "gpt2":
        files = {"tokenizer.json": _byte_level(metadata, tokens, types, pattern)}
    else:
        files = {"tokenizer.model": _sentencepiece(metadata, tokens, types)}
    ends = {_token_id(metadata, name, tokens) for name in ("eos", "eot", "eom")} - {None}
    ends |= {
        number
        for number, token in enumerate(tokens)
        if token in ENDS_OF_TURN and types[number] == TokenType.CONTROL
    }
    files["generation_config.json"] = json.dumps({"eos_token_id": sorted(ends)}).encode()
    adds_bos = kind == "llama" or pattern == LLAMA3_PATTERN
    files["tokenizer_config.json"] = json.dumps(_settings(metadata, tokens, adds_bos)).encode()
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


def _token_id(metadata: Mapping[str, Any], role: str, tokens: Sequence[str]) -> int | None:
    """The id of the token with a role; `None` if the file names no token that exists."""
    number = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return number if type(number) is int and 0 <= number < len(tokens) else None


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CheckpointError(
            f"[GGUF] 'tokenizer.ggml.{name}' must be true or false but got {value!r:.60}. Fetch the "
            "file again."
        )
    return value


def _settings(metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "add_bos_token": _flag(metadata, "add_bos_token", adds_bos),
        "add_eos_token": _flag(metadata, "add_eos_token", False),
    }
    for name in ("bos", "eos"):
        number = _token_id(metadata, name, tokens)
        if number is not None:
            settings[f"{name}_token"] = tokens[number]
    templates = {
        key.removeprefix(TEMPLATE_KEY).removeprefix(".") or "default": template
        for key, template in metadata.items()
        if key == TEMPLATE_KEY or key.startswith(f"{TEMPLATE_KEY}.")
    }
    settings["chat_template"] = [
        {"name": name, "template": template} for name, template in templates.items()
    ]
    return settings


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
        "normalizer": {"type": "NFC"} if pattern == _QWEN2 else None,
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


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> bytes:
    """The content of a `tokenizer.model`, a protobuf message, with byte-pair merges by score."""
    scores = _list(metadata, "scores", (int, float))
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"[GGUF] 'tokenizer.ggml.scores' must have one entry for each of {len(tokens)} tokens "
            f"but has {len(scores)}. Fetch the file again."
        )
    message = b"".join(
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    roles = b"".join(
        _field(field, tokens[number].encode())
        for name, field in _ROLES.items()
        if (number := _token_id(metadata, name, tokens)) is not None
    )
    trainer = _number(3, 2) + _number(35, int(TokenType.BYTE in types)) + roles
    normalizer = (
        _field(1, b"identity")
        + _number(3, int(_flag(metadata, "add_space_prefix", True)))
        + _number(4, int(_flag(metadata, "remove_extra_whitespaces", False)))
        + _number(5, 1)
    )
    return message + _field(2, trainer) + _field(3, normalizer)


# the fields of the message's `trainer_spec` that hold the text of the token with each role
_ROLES = {"unknown": 45, "bos": 46, "eos": 47}


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
