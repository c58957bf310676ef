from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.hub import Tokenizer, load_tokenizer
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.models import Decoder, hgrn_bit

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(GOLDENS / "tokenizer_bpe")


@pytest.fixture(scope="session", params=["plain", "convolution"])
def model(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Decoder:
    """A packed random model that belongs to the tokenizer."""
    mx.random.seed(5)
    config = hgrn_bit.Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=48,
        num_hidden_layers=2,
        intermediate_size=80,
        conv_size=4 if request.param == "convolution" else 0,
        share_conv_kernel=False,
        initializer_range=0.3,
    )
    return pack_linears(hgrn_bit.build(config))
