"""Encoders beside transformers: the same logits from the same checkpoint."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import load_model
from mlx_mmfree.models import MaskedLM
from tests.tolerances import TOLERANCE, relative_error

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fnet": ("FNet", {"tpu_short_seq_length": 64}),
    "fnet-gelu": ("FNet", {"hidden_act": "gelu", "type_vocab_size": 4}),
    "big_bird": ("BigBird", {"block_size": 4, "num_random_blocks": 1}),
    "big_bird-full": ("BigBird", {"attention_type": "original_full"}),
    "big_bird-scaled": ("BigBird", {"block_size": 2, "rescale_embeddings": True}),
    "longformer": ("Longformer", {"attention_window": [4, 8, 4], "pad_token_id": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [7, 36, 57])
def test_logits(tmp_path: Path, kind: str, length: int) -> None:
    import torch
    import transformers

    name, options = KINDS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = getattr(transformers, f"{name}ForMaskedLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # norms and biases too
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(length).integers(3, 50, (2, length))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    own = load_model(tmp_path, dtype=mx.float32)
    assert isinstance(own, MaskedLM)
    assert relative_error(own(mx.array(tokens)), mx.array(want)) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("kind", ["big_bird", "longformer"])
def test_padding(tmp_path: Path, kind: str) -> None:
    import torch
    import transformers

    name, options = KINDS[kind]
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = getattr(transformers, f"{name}ForMaskedLM")(config).eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 50, (2, 40))
    valid = np.arange(40) < np.array([[40], [29]])
    tokens[~valid] = config.pad_token_id
    with torch.no_grad():
        want = model(torch.tensor(tokens), attention_mask=torch.tensor(valid).long()).logits.numpy()
    got = load_model(tmp_path, dtype=mx.float32)(mx.array(tokens), mx.array(valid))
    seen = mx.array(valid)[..., None]
    want = mx.where(seen, mx.array(want), 0.0)
    assert relative_error(mx.where(seen, got, 0.0), want) <= TOLERANCE[mx.float32]
