from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.hub import save_model
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import hgrn_bit, llama
from mlx_mmfree.models.parts.ternary_linears import TernaryLinears

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random packed weights and a tokenizer with a chat template."""
    mx.random.seed(5)
    config = hgrn_bit.Config(
        vocab_size=518,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        initializer_range=0.3,
    )
    target = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_model(target, pack_linears(hgrn_bit.build(config)), GOLDENS / "tokenizer_bpe")
    return target


@pytest.fixture(scope="session")
def attention_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny ternary Llama with the same tokenizer."""
    mx.random.seed(6)
    config = llama.Config(
        vocab_size=518,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linears=TernaryLinears(),
        initializer_range=0.3,
    )
    target = tmp_path_factory.mktemp("checkpoint") / "attention"
    save_model(target, pack_linears(llama.build(config)), GOLDENS / "tokenizer_bpe")
    return target
