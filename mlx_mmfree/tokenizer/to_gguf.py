"""Turns the tokenizer of a checkpoint into metadata of a GGUF file, the inverse of `from_gguf`."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedModelError
from .from_gguf import BYTE_LEVEL_PATTERNS, TEMPLATE_KEY, TokenType
from .sentencepiece_model import load_processor, user_defined_tokens
from .tokenizer import Tokenizer
from .tokenizer_json import parse_document
from .vocabulary import ENDS_OF_TURN, MAX_VOCABULARY_BYTES, SPACE, read_limited

_SAMPLES = (
    "Hello world",
    " two  spaces and a\ttab\n\nnew lines\n",
    "It's 12345 times 0.5, isn't it? YES!!",
    "Größe, naïve, 東京, привет, 🙂",
    "def f(x):\n    return x[0] + {'a': 1}",
)


def vocabulary_metadata(folder: Path, rows: int) -> dict[str, Any]:
    """The metadata `tokenizer.*` for the tokenizer files of a folder.

    Args:
        folder: The folder.
        rows: The number of rows of the embedding. The vocabulary is filled up with unused tokens.

    Raises:
        CheckpointError: A file is missing or damaged, or there are more tokens than rows.
        UnsupportedModelError: GGUF has no name for this kind of tokenizer.
    """
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"[convert] the tokenizer in '{folder}' must have at most as many tokens as the "
            f"embedding has rows, {rows}, but has {tokenizer.vocab_size}. Use the tokenizer that "
            "belongs to the model."
        )
    if (folder / "tokenizer.model").exists():
        entries = _sentencepiece(folder / "tokenizer.model", tokenizer)
    else:
        entries = _byte_level(folder / "tokenizer.json")
    _fill_up(entries, tokenizer, rows)
    entries |= _special_ids(folder, tokenizer)
    framed = tokenizer.encode("a")
    entries["add_bos_token"] = framed[0] == tokenizer.bos_token_id
    entries["add_eos_token"] = framed[-1] == tokenizer.eos_token_id
    entries["token_type"] = [np.int32(kind) for kind in entries["token_type"]]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    return metadata | _chat_templates(tokenizer)


def compare_tokenizers(source: Path, target: Path) -> None:
    """Refuses a written tokenizer that splits a few texts in another way than its source.

    Raises:
        CheckpointError: The two split a text differently.
    """
    theirs, ours = Tokenizer.from_folder(source), Tokenizer.from_folder(target)
    for text in _SAMPLES:
        for framed in (True, False):
            want, got = (t.encode(text, add_special_tokens=framed) for t in (theirs, ours))
            if want != got:
                raise CheckpointError(
                    f"[verify] the written tokenizer must split {text!r} as its source does but "
                    "splits it differently. The conversion is thrown away; please report this."
                )


def _sentencepiece(file: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    model = read_limited(file, MAX_VOCABULARY_BYTES)
    processor = load_processor(model, file)
    numbers = range(processor.get_piece_size())
    kinds = [
        (TokenType.UNKNOWN, processor.is_unknown),
        (TokenType.CONTROL, processor.is_control),
        (TokenType.BYTE, processor.is_byte),
        (TokenType.UNUSED, processor.is_unused),
    ]
    types = [next((kind for kind, holds in kinds if holds(n)), TokenType.NORMAL) for n in numbers]
    for token in user_defined_tokens(model):
        types[token.id] = TokenType.USER_DEFINED
    starts = list(map(tokenizer.id_to_piece, tokenizer.encode("a", add_special_tokens=False)[:1]))
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [processor.id_to_piece(n) for n in numbers],
        "scores": [float(processor.get_score(n)) for n in numbers],
        "token_type": types,
        "unknown_token_id": processor.unk_id(),
        "add_space_prefix": bool(starts) and starts[0].startswith(SPACE),
    }


def _byte_level(file: Path) -> dict[str, Any]:
    content = parse_document(read_limited(file, MAX_VOCABULARY_BYTES), file)
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedModelError(
            f"[convert] '{file}' must be byte-level BPE for GGUF, or come with its tokenizer.model, "
            f"but is {model.get('type')!r:.40}. Put the tokenizer.model beside it."
        )
    if not model["merges"]:
        raise UnsupportedModelError(
            f"[convert] '{file}' must have merges of tokens for GGUF but has none. Write another format."
        )
    vocabulary = dict(model["vocab"])
    types = dict.fromkeys(vocabulary.values(), TokenType.NORMAL)
    for token in content.get("added_tokens") or ():
        vocabulary[token["content"]] = token["id"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    texts = {number: text for text, number in vocabulary.items()}
    count = max(texts) + 1
    return {
        "model": "gpt2",
        "pre": _pattern_name(content.get("pre_tokenizer") or {}, file),
        "tokens": [texts.get(n, f"[PAD{n}]") for n in range(count)],
        "token_type": [types.get(n, TokenType.UNUSED) for n in range(count)],
        "merges": [m if isinstance(m, str) else " ".join(m) for m in model["merges"]],
    }


def _pattern_name(pre_tokenizer: dict[str, Any], file: Path) -> str:
    """GGUF's name of the way in which text is split before merging."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    patterns = [part["pattern"].get("Regex") for part in parts if part.get("type") == "Split"]
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    known = len(parts) == len(patterns) + len(byte_level) and len(byte_level) == 1
    if known and byte_level[0].get("use_regex", True) and not patterns:
        return "gpt-2"
    if known and len(patterns) == 1 and patterns[0] in BYTE_LEVEL_PATTERNS:
        return BYTE_LEVEL_PATTERNS[patterns[0]]
    raise UnsupportedModelError(
        f"[convert] '{file}' must split text before merging as Llama 3, Qwen2 or GPT-2 do, which GGUF "
        "has names for, but splits it in another way, as vocabularies do that older versions of "
        "mlx-mmfree trained. Write another format."
    )


def _fill_up(entries: dict[str, Any], tokenizer: Tokenizer, rows: int) -> None:
    """Adds the tokens of other files and the unused rows of the embedding."""
    tokens, types = entries["tokens"], entries["token_type"]
    for number in range(len(tokens), rows):
        tokens.append(f"[PAD{number}]")
        types.append(TokenType.UNUSED)
        if "scores" in entries:
            entries["scores"].append(0.0)
    for text, number in tokenizer.special_tokens.items():
        if types[number] != TokenType.UNKNOWN:
            tokens[number], types[number] = text, TokenType.CONTROL
    for token in tokenizer.listed_tokens:
        token_id = tokenizer.token_id(token.content)
        if token_id is not None and token_id not in tokenizer.special_tokens.values():
            # llama.cpp finds it in the text as it is
            is_spelled = "scores" in entries
            tokens[token_id] = token.content.replace(SPACE, " ") if is_spelled else token.content
            types[token_id] = TokenType.USER_DEFINED


def _special_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    ids: dict[str, int] = {}
    if tokenizer.bos_token_id is not None:
        ids["bos_token_id"] = tokenizer.bos_token_id
    texts = {number: text for text, number in tokenizer.special_tokens.items()}
    ends = sorted(
        tokenizer.eos_token_ids, key=lambda number: (texts.get(number) in ENDS_OF_TURN, number)
    )
    if ends:
        ids["eos_token_id"] = ends[0]
    if len(ends) > 1:
        ids["eot_token_id"] = next(
            (number for number in ends[1:] if texts.get(number) in ENDS_OF_TURN), ends[1]
        )
    return ids


def _chat_templates(tokenizer: Tokenizer) -> dict[str, Any]:
    """The templates. Names become letters and digits, as in llama.cpp's converter."""
    metadata: dict[str, Any] = {}
    for name, template in tokenizer.chat_templates.items():
        if name == "default":
            metadata[TEMPLATE_KEY] = template
        else:
            plain = re.sub(r"[^A-Za-z0-9]", "_", name)
            metadata[f"{TEMPLATE_KEY}.{plain}"] = template
    names = [key.removeprefix(f"{TEMPLATE_KEY}.") for key in metadata if key != TEMPLATE_KEY]
    return metadata | ({f"{TEMPLATE_KEY}s": names} if names else {})
