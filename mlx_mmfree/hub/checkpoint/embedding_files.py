"""The files beside the weights of a model that embeds texts, as sentence-transformers writes them.

`modules.json` lists what is done one after the other: the transformer, a pooling, whose own file has one
true `pooling_mode_*`, and perhaps the scaling to length 1, which embeddings have in any case.
`config_sentence_transformers.json` has the prompts, `sentence_bert_config.json` the longest text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ...files.checkpoint_files import MODULES_FILE, POOLING_FILE, PROMPTS_FILE, SENTENCES_FILE
from ...files.reading import MAX_BYTES, UNREADABLE, parse_json, read_file, read_json_object
from ...models import EmbeddingUse, architectures
from ...models.parts.encoders import Pooling
from ...models.parts.fields import boolean, integer
from ...models.parts.ternary_linears import TernaryLinears

INNER_NORMS = TernaryLinears(norm_eps=1e-6)
"""The ternary linears of BitNet's embedding models, each with a norm of its own."""

_NORMS = {key: INNER_NORMS.to_hub()[key] for key in ("use_rms_norm", "rms_norm_eps")}
_MODE = "pooling_mode_"
_MODES: Mapping[str, Pooling] = {
    f"{_MODE}cls_token": "first",
    f"{_MODE}lasttoken": "last",
    f"{_MODE}mean_tokens": "mean",
}
_LIBRARY = "sentence_transformers.models"
_STEPS = ("Transformer", "Pooling", "Normalize")


def with_embedding(config: Mapping[str, Any], has_norms: bool, is_embedder: bool) -> dict[str, Any]:
    """The configuration with what other files say: that a model embeds texts, and what is ternary.

    Args:
        config: The content of `config.json`.
        has_norms: Whether there are norms inside projections, which say that these are ternary linears
            of BitNet, with masters as their weights unless the configuration says more.
        is_embedder: Whether the model embeds texts: files beside the weights say so, or there are such
            norms and no head.
    """
    known = architectures().get(str(config.get("model_type")))
    name = getattr(known and known.config, "embedder_class", "")
    found = dict(config)
    if name and is_embedder:
        found["architectures"] = [name]
    if name and has_norms:
        quantization = config.get("quantization_config")
        found["quantization_config"] = (
            INNER_NORMS.to_hub() if quantization is None else {**_NORMS, **quantization}
        )
    return found


def read_embedding_use(folder: Path) -> EmbeddingUse:
    """How a model embeds texts. Without files that say it, the last token speaks for its text.

    Raises:
        CheckpointError: A file is damaged.
        UnsupportedModelError: A step is not implemented.
    """
    use: dict[str, Any] = {}
    for name in (PROMPTS_FILE, SENTENCES_FILE):
        use |= read_json_object(folder / name, is_optional=True)
    prompts = use.get("prompts") or {}
    default = use.get("default_prompt_name")
    is_text = isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())
    if not is_text or not (default is None or (isinstance(default, str) and default in prompts)):
        raise CheckpointError(
            f"[load] '{folder / PROMPTS_FILE}' must hold texts under 'prompts', and the name of one of "
            f"them or null under 'default_prompt_name', but got {prompts!r:.80} and {default!r:.80}. "
            "Fetch the file again."
        )
    longest = use.get("max_seq_length")
    return EmbeddingUse(
        _pooling(folder, bool(prompts)),
        prompts,
        default,
        None if longest is None else integer(use, "max_seq_length", high=2**31 - 1),
    )


def _pooling(folder: Path, has_prompts: bool) -> Pooling:
    if not (folder / MODULES_FILE).exists():
        return "last"
    steps = _steps(folder / MODULES_FILE)
    if "Pooling" not in steps:
        return "last"
    pooling_config = read_json_object(folder / POOLING_FILE)
    chosen = [
        key for key, value in pooling_config.items() if key.startswith(_MODE) and value is True
    ]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise UnsupportedModelError(
            f"[load] '{folder / POOLING_FILE}' must set one of {', '.join(_MODES)} but sets "
            f"{', '.join(chosen) or 'none'}. Other poolings are not implemented."
        )
    pooling = _MODES[chosen[0]]
    if has_prompts and pooling != "last" and not boolean(pooling_config, "include_prompt", True):
        raise UnsupportedModelError(
            f"[load] 'include_prompt' of '{folder / POOLING_FILE}' must be true but is false. A pooling "
            "that leaves prompts out is not implemented."
        )
    return pooling


def _steps(file: Path) -> list[str]:
    """The steps one after the other, by the names of their classes."""
    try:
        listed = parse_json(read_file(file, MAX_BYTES, is_member=True))
    except (OSError, ValueError) as error:
        what = error if isinstance(error, OSError) else f"it {error}"
        raise CheckpointError(f"[load] '{file}' cannot be read: {what}. {UNREADABLE}") from error
    kinds = [step.get("type") for step in listed] if _are_objects(listed) else [None]
    names = [kind.rpartition(".")[2] for kind in kinds if isinstance(kind, str)]
    if len(names) != len(kinds) or not set(names) <= set(_STEPS):
        raise UnsupportedModelError(
            f"[load] '{file}' must list no other steps than {', '.join(_STEPS)} but lists "
            f"{kinds!r:.200}. Other steps are not implemented."
        )
    return names


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


_GGUF_POOLINGS: Mapping[int, Pooling] = {1: "mean", 2: "first", 3: "last"}


def files_of_pooling(number: Any) -> dict[str, bytes]:
    """The files that say what `pooling_type` of a GGUF file does; none for a model that writes texts.

    Raises:
        UnsupportedModelError: It is another one.
    """
    if number in (None, 0):
        return {}
    if type(number) is not int or number not in _GGUF_POOLINGS:
        raise UnsupportedModelError(
            f"[GGUF] 'pooling_type' must be one of 0, {', '.join(map(str, _GGUF_POOLINGS))} but got "
            f"{number!r:.40}. Other poolings are not implemented."
        )
    modes = {key: pooling == _GGUF_POOLINGS[number] for key, pooling in _MODES.items()}
    steps = [
        {"idx": n, "name": str(n), "path": path, "type": f"{_LIBRARY}.{kind}"}
        for n, (kind, path) in enumerate(zip(_STEPS, ("", "1_Pooling", "2_Normalize"), strict=True))
    ]
    return {
        name: json.dumps(value).encode()
        for name, value in ((MODULES_FILE, steps), (POOLING_FILE, modes))
    }


def pooling_of_files(folder: Path) -> int:
    """The `pooling_type` of a GGUF file that does what the files of a model say.

    Raises:
        CheckpointError, UnsupportedModelError: As for `read_embedding_use`.
    """
    chosen = read_embedding_use(folder).pooling
    return next(number for number, pooling in _GGUF_POOLINGS.items() if pooling == chosen)
