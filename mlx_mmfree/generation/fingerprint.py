"""Tells models apart by their architecture and weights."""

import hashlib
import json
from typing import Any, cast

import mlx.core as mx

from ..models import Decoder
from .trimmed_state import arrays_by_place

_WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def fingerprint(model: Decoder) -> str:
    """A digest of the architecture and of all weights; every bit is looked at.

    It tells models apart that differ by accident or training, not by intent.
    """
    parameters = sorted(arrays_by_place(model.parameters()).items(), key=lambda item: item[0])
    words = [array.reshape(-1).view(_WORDS[array.dtype.size]) for _, array in parameters]
    sums = cast(list[int], mx.stack([word.sum().astype(mx.uint32) for word in words]).tolist())
    config: dict[str, Any] = getattr(model.config, "to_hub", dict)()
    described = [
        [name, list(array.shape), str(array.dtype), total]
        for (name, array), total in zip(parameters, sums, strict=True)
    ]
    content = json.dumps([config, described], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
