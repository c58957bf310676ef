"""Reads the settings in the files beside a vocabulary: special tokens, chat templates, ends of text."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files.checkpoint_files import TEMPLATE_FILE, TEMPLATES_FOLDER, tokenizer_files
from ..files.json_file import read_json_object
from ..files.opening import decode_text, read_member
from .special_tokens import SpecialToken

MAX_VOCABULARY_BYTES = 64_000_000
MAX_TEMPLATE_BYTES = 128_000
MAX_TOKEN_ID = 2**31 - 1
GGUF_MARK = {"mlx_mmfree": {"source": "gguf"}}
"""What tells in `tokenizer_config.json` that the files were made of a GGUF file."""

_MOST_TEMPLATES = 64
# of BitNet b1.58 2B4T: its publishers' program puts the first token before what the template writes
_BEGUN_MODELS = ("bitnet",)
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerSettings:
    """The settings of one folder.

    Attributes:
        folder: The folder they were read from.
        named: The texts of the tokens with a role, such as `bos_token`.
        add_bos: Whether the ids of a text begin with the first token; `None` if no file says so.
        add_eos: Whether they end with the last token; `None` if no file says so.
        tokens: The tokens that the files list in addition to the vocabulary.
        special_texts: The texts of all tokens that some file calls special.
        add_prefix_space: Whether a space is put before a text; `None` if no file says so.
        is_legacy: Whether a space is put before a text after a special token too.
        is_gguf: Whether the files were made of a GGUF file, so that llama.cpp's rules hold.
        begins_chats: Whether a conversation begins with the first token of texts though its template
            does not write it.
        chat_templates: The templates by name.
        bos_token_id: The first token, of the generation settings or the model's configuration.
        eos_token_ids: The last tokens, of the generation settings and the model's configuration.
    """

    folder: Path
    named: dict[str, str]
    add_bos: bool | None
    add_eos: bool | None
    tokens: tuple[SpecialToken, ...]
    special_texts: frozenset[str]
    add_prefix_space: bool | None
    is_legacy: bool
    is_gguf: bool
    begins_chats: bool
    chat_templates: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: frozenset[int]


def read_settings(folder: Path) -> TokenizerSettings:
    """Reads every settings file that the folder holds; all of them are optional.

    Raises:
        CheckpointError: A file is damaged or an entry has the wrong type.
    """
    config_file = folder / "tokenizer_config.json"
    config = _read_optional(config_file)
    named_file = folder / "special_tokens_map.json"
    extra = _read_optional(named_file)
    named = _named_tokens(extra, named_file) | _named_tokens(config, config_file)
    model_file = folder / "config.json"
    generation_file = folder / "generation_config.json"
    model, generation = _read_optional(model_file), _read_optional(generation_file)
    tokens = _listed_tokens(config, config_file, folder / "added_tokens.json")
    special_texts = {*named.values(), *(token.content for token in tokens if token.special)}
    for settings, file in ((config, config_file), (extra, named_file)):
        special_texts.update(_additional_tokens(settings, file))
    bos = _ids(generation, "bos_token_id", generation_file) or _ids(
        model, "bos_token_id", model_file
    )
    is_gguf = all(config.get(key) == value for key, value in GGUF_MARK.items())
    return TokenizerSettings(
        folder=folder,
        named=named,
        add_bos=_flag(config, "add_bos_token", config_file),
        add_eos=_flag(config, "add_eos_token", config_file),
        tokens=tokens,
        special_texts=frozenset(special_texts),
        add_prefix_space=_flag(config, "add_prefix_space", config_file),
        is_legacy=bool(_flag(config, "legacy", config_file)),
        is_gguf=is_gguf,
        begins_chats=is_gguf or model.get("model_type") in _BEGUN_MODELS,
        chat_templates=_chat_templates(config, config_file),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=frozenset(
            _ids(generation, "eos_token_id", generation_file)
            + _ids(model, "eos_token_id", model_file)
        ),
    )


def read_limited(file: Path, limit_bytes: int) -> bytes:
    """The bytes of a file of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read, is a link out of its folder, or has more than
            `limit_bytes`.
    """
    try:
        return read_member(file, limit_bytes)
    except OSError as error:
        raise CheckpointError(
            f"[tokenizer] '{file}' cannot be read: {error}. Download the checkpoint again."
        ) from error


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.exists() else {}


def _wrong(file: Path, key: str, rule: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"[tokenizer] '{file}': '{key}' must {rule} but got {value!r:.60}. "
        "Correct the entry, or download the file again."
    )


def _flag(config: Mapping[str, Any], key: str, file: Path, place: str = "") -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(file, place + key, "be true or false", value)
    return value


def _text(value: Any, key: str, file: Path) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise _wrong(file, key, "be a text or an object with a text 'content'", value)
    return text


def _named_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    return {key: _text(config[key], key, file) for key in _NAMED if config.get(key) is not None}


def _additional_tokens(config: Mapping[str, Any], file: Path) -> list[str]:
    texts = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        if not isinstance(value, (list, dict)):
            raise _wrong(file, key, "be a list or an object", value)
        entries = value.values() if isinstance(value, dict) else value
        texts += [_text(entry, key, file) for entry in entries]
    return texts


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _ids(config: Mapping[str, Any], key: str, file: Path) -> list[int]:
    value = config.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(map(_is_token_id, ids)):
        raise _wrong(file, key, "be a token id or a list of token ids", value)
    return ids


def _listed_tokens(
    config: Mapping[str, Any], config_file: Path, added_file: Path
) -> tuple[SpecialToken, ...]:
    tokens: dict[int, SpecialToken] = {}
    for content, number in _read_optional(added_file).items():
        if not _is_token_id(number):
            raise _wrong(added_file, content, "be a token id", number)
        tokens[number] = SpecialToken(content, number)
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, Mapping):
        raise _wrong(config_file, "added_tokens_decoder", "be an object", listed)
    for key, entry in listed.items():
        number = int(key) if key.isascii() and key.isdigit() and len(key) < 11 else -1
        if not _is_token_id(number):
            raise _wrong(config_file, "added_tokens_decoder", "have token ids as keys", key)
        place = f"added_tokens_decoder.{key}"
        flags = entry if isinstance(entry, Mapping) else {}
        lstrip, rstrip, single_word, special = (
            bool(_flag(flags, name, config_file, f"{place}."))
            for name in ("lstrip", "rstrip", "single_word", "special")
        )
        text = _text(entry, place, config_file)
        tokens[number] = SpecialToken(text, number, special, lstrip, rstrip, single_word)
    return tuple(tokens.values())


def _chat_templates(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The templates by name. Files go before the configuration, and empty ones do not count."""
    listed = tokenizer_files(file.parent)
    own = {"default": listed[TEMPLATE_FILE]} if TEMPLATE_FILE in listed else {}
    folder = [path for name, path in listed.items() if name.startswith(f"{TEMPLATES_FOLDER}/")]
    if len(folder) > _MOST_TEMPLATES:
        raise CheckpointError(
            f"[tokenizer] '{file.parent / TEMPLATES_FOLDER}' must hold at most {_MOST_TEMPLATES} chat "
            f"templates but holds {len(folder)}. Remove those that are not used."
        )
    files = {path.stem: path for path in folder} | own
    texts = _without_empty({name: _template_text(path) for name, path in files.items()})
    written = _without_empty(_written_templates(config, file))
    return texts if "default" in texts else written | texts


def _without_empty(templates: dict[str, str]) -> dict[str, str]:
    """Templates without those that write nothing of a conversation, which stand for none."""
    return {name: text for name, text in templates.items() if text.strip()}


def _template_text(file: Path) -> str:
    try:
        return decode_text(read_limited(file, MAX_TEMPLATE_BYTES))
    except ValueError as error:
        raise CheckpointError(
            f"[tokenizer] '{file}' {error}. Save it as UTF-8, or download it again."
        ) from error


def _written_templates(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The templates of `tokenizer_config.json`."""
    value = config.get("chat_template")
    if value is None:
        return {}
    named = value if isinstance(value, Mapping) else {"default": value}
    entries = [{"name": name, "template": template} for name, template in named.items()]
    templates = {}
    for entry in value if isinstance(value, list) else entries:
        name, text = (
            (entry.get("name"), entry.get("template"))
            if isinstance(entry, Mapping)
            else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            rule = "be a text or a list of objects with the texts 'name' and 'template'"
            raise _wrong(file, "chat_template", rule, value)
        if len(text.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise _wrong(file, "chat_template", f"have at most {MAX_TEMPLATE_BYTES} bytes", text)
        templates[name] = text
    return templates
