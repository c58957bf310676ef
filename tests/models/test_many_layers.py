"""Narrow models of 32 layers, as deep as published ones, against code that is not ours."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.hub import load_model
from tests.hub.checkpoints import random_checkpoint
from tests.models import published_hgrn_bit
from tests.models.forced_codes import force
from tests.tolerances import TOLERANCE, relative_error

LAYERS, DIMS, INNER, VOCABULARY, LENGTH = 32, 64, 96, 80, 24
TOKENS = np.random.default_rng(0).integers(VOCABULARY, size=LENGTH)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MMFREE_CACHE", "0")


def test_matmul_free_against_the_published_mathematics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shapes = published_hgrn_bit.checkpoint(DIMS, INNER, LAYERS, VOCABULARY)
    weights = random_checkpoint(tmp_path / "m", config, shapes)
    want, codes = published_hgrn_bit.logits(weights, TOKENS, LAYERS)
    ours = load_model(tmp_path / "m", dtype=mx.float32)
    # of 64 inputs, one code is up to 1 in 127 of the largest
    given = [codes[name] for name in published_hgrn_bit.linears(LAYERS)]
    force(monkeypatch, given, 1e-2)
    got = ours(mx.array(TOKENS)[None])[0]
    assert relative_error(got, mx.array(want.astype(np.float32))[None]) <= TOLERANCE[mx.float32]


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_llama_against_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIMS,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    theirs = LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "m")
    with torch.no_grad():
        # float64 but for the norms, which transformers computes in float32
        want = theirs.double()(torch.tensor(TOKENS)[None]).logits.float().numpy()
    got = load_model(tmp_path / "m", dtype=mx.float32)(mx.array(TOKENS)[None])[0]
    assert relative_error(got, mx.array(want)) <= TOLERANCE[mx.float32]
