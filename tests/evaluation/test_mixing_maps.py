"""The maps of a model are the weights that its mixers have for what they are given."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.evaluation.maps import CHANNEL_GROUPS, pair_maps, text_maps
from mlx_mmfree.models import EncoderDecoder, TokenModel, find
from mlx_mmfree.models.parts.architecture import known_model_types
from tests.tolerances import TOLERANCE, relative_error

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def _model(**options: Any) -> TokenModel:
    architecture = find("metaformer")
    mx.random.seed(4)
    config = {**architecture.tiny, "initializer_range": 0.3, **options}
    model: TokenModel = architecture.build(architecture.config.from_hub(config))
    return model.eval()


def test_each_layer_has_its_maps() -> None:
    model = _model()
    found = text_maps(model, TOKENS, [0, 2], None)
    assert [(each.name, each.mixer) for each in found] == [("layer 0", "MLGRU"), ("layer 2", "GQA")]
    assert model.run_block is None
    channels, attention = found
    assert channels.heads == len(channels.panels) == CHANNEL_GROUPS
    assert [panel.title for panel in attention.panels] == [f"head {n}" for n in range(4)]
    for panel in attention.panels:
        assert np.allclose(panel.weights.sum(axis=-1), 1.0, atol=1e-5)
        assert np.array_equal(panel.weights, np.tril(panel.weights))
    # the last layer once more: its norm and mixer, of the residual stream before it
    x = model.embed(mx.array([TOKENS]))
    for block in model.blocks[:2]:
        x, _ = block(x)
    block = model.blocks[2]
    weights = block.token_mixer.mixing_weights(block.token_norm(x))[0]
    for panel, want in zip(attention.panels, weights, strict=True):
        assert relative_error(mx.array(panel.weights), want) <= TOLERANCE[mx.float32]


def test_channels_are_grouped_by_how_far_they_reach() -> None:
    model = _model(token_mixer=["mlgru"], num_hidden_layers=1)
    (maps,) = text_maps(model, TOKENS, [0], None)
    block = model.blocks[0]
    x = block.token_norm(model.embed(mx.array([TOKENS])))
    weights = np.array(block.token_mixer.mixing_weights(x)[0])
    groups = np.stack([panel.weights for panel in maps.panels])
    assert np.allclose(groups.mean(axis=0), weights.mean(axis=0), atol=1e-6)
    reach = [float(panel.title.split()[3]) for panel in maps.panels]
    assert reach == sorted(reach) and reach[0] < reach[-1]


def test_some_heads() -> None:
    found = text_maps(_model(), TOKENS, [2], {1, 3, 9})
    assert [panel.title for panel in found[0].panels] == ["head 1", "head 3"]
    assert found[0].heads == 4


def test_bounds_of_the_gates_count() -> None:
    """They are arguments that a model gives each block."""
    architecture = find("hgrn_bit")
    model = architecture.build(architecture.config.from_hub(architecture.tiny)).eval()
    plain = text_maps(model, TOKENS, [1], None)[0].panels
    model.lower_bounds = mx.array([[-9.0], [9.0]]) + mx.zeros_like(model.lower_bounds)
    bounded = text_maps(model, TOKENS, [1], None)[0].panels
    # with a bound near 1, hardly anything new is let in
    assert max(panel.weights.max() for panel in bounded) < 1e-3
    assert max(panel.weights.max() for panel in plain) > 0.1


def test_a_mixer_without_weights_says_why() -> None:
    model = _model(task="masked_lm", token_mixer=["mlp_mixer", "fnet", "linformer"])
    mlp_mixer, fnet, linformer = text_maps(model, TOKENS, [0, 1, 2], None)
    assert not mlp_mixer.panels and mlp_mixer.reason.startswith("[MLPMixer] has no weights")
    assert len(fnet.panels) == 2 and fnet.columns == "text"
    assert linformer.columns is None


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
def test_reversible_blocks(task: str) -> None:
    gqa = {"name": "gqa", "num_heads": 4}
    model = _model(task=task, token_mixer=gqa, num_hidden_layers=2, block="reversible")
    found = text_maps(model, TOKENS, [0, 1], None)
    assert [each.name for each in found] == ["layer 0", "layer 1"]
    x = model.embed(mx.array([TOKENS]))
    block = model.blocks[0]
    want = block.token_mixer.mixing_weights(block.token_norm(x))[0, 0]
    assert relative_error(mx.array(found[0].panels[0].weights), want) <= TOLERANCE[mx.float32]


@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_an_encoder_decoder(norm_order: str) -> None:
    gqa = {"name": "gqa", "num_heads": 4}
    model = _model(
        task="encoder_decoder", token_mixer=gqa, num_hidden_layers=1, norm_order=norm_order
    )
    assert isinstance(model, EncoderDecoder)
    found = pair_maps(model, TOKENS, TOKENS[:3], [0], None)
    assert [each.name for each in found] == ["encoder 0", "decoder 0", "decoder 0, source"]
    assert [(each.rows, each.columns) for each in found] == [
        ("source", "source"),
        ("target", "target"),
        ("target", "source"),
    ]
    assert [each.panels[0].weights.shape for each in found] == [(8, 8), (3, 3), (3, 8)]
    for each in found:
        for panel in each.panels:
            assert np.allclose(panel.weights.sum(axis=-1), 1.0, atol=1e-5)
    assert [each.name for each in pair_maps(model, TOKENS, [], [0], None)] == ["encoder 0"]


def _tiny(name: str) -> object:
    architecture = find(name)
    return architecture.build(architecture.config.from_hub(architecture.tiny)).eval()


OF_TEXTS = [name for name in known_model_types() if isinstance(_tiny(name), TokenModel)]


@pytest.mark.parametrize("name", OF_TEXTS)
def test_every_architecture_of_texts_can_be_looked_at(name: str) -> None:
    model: Any = _tiny(name)
    layers = range(len(model.blocks))
    if isinstance(model, EncoderDecoder):
        found = pair_maps(model, TOKENS, TOKENS[:3], layers, None)
    else:
        found = text_maps(model, TOKENS, layers, None)
    assert len(found) >= len(layers)
    assert all(np.isfinite(panel.weights).all() for each in found for panel in each.panels)
    assert not [each.reason for each in found if not each.panels]
