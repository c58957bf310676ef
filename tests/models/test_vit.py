"""ViT with other token mixers, and with tokens left out."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

from mlx_mmfree import load_model, save_model
from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.models import ImageClassifier, find
from mlx_mmfree.models.vit import SelectingStage, chosen_first, with_token_selection

VIT = find("vit")
IMAGES = mx.random.normal((2, 32, 32, 3), key=mx.random.key(0))


def made(**keys: object) -> ImageClassifier:
    mx.random.seed(0)
    model: ImageClassifier = VIT.build(VIT.config.from_hub({**VIT.tiny, **keys}))
    return cast(ImageClassifier, model.eval())


@pytest.mark.parametrize(
    "mixer",
    [
        "hydra",
        "sima",
        "linear_attention",
        "cosformer",
        "fnet",
        {"name": "relu_attention", "num_heads": 2},
        {"name": "synthesizer", "num_heads": 2},
    ],
    ids=str,
)
def test_any_bidirectional_mixer(mixer: Any, tmp_path: Path) -> None:
    model = made(token_mixer=mixer)
    logits = model(IMAGES)
    assert logits.shape == (2, 5)
    save_model(tmp_path / "model", model)
    again = load_model(tmp_path / "model")
    assert again.config == model.config
    assert mx.allclose(again(IMAGES), logits, atol=1e-5)
    # every patch is seen by the class token
    moved = model(mx.concatenate([IMAGES[:, :24], IMAGES[:, 24:] + 1.0], axis=1))
    assert not mx.allclose(moved, logits, atol=1e-6)


def selecting(keep: float, **keys: object) -> tuple[ImageClassifier, SelectingStage]:
    arguments = {**VIT.tiny["model_args"], "depth": 3}
    model = made(model_args=arguments, token_selection={"keep": keep, "hidden_dims": 4}, **keys)
    return model, cast(SelectingStage, model.stages[0])


def test_selection_of_all_tokens_is_a_plain_model() -> None:
    model, stage = selecting(1.0)
    every = model(IMAGES)
    stage.is_selecting = False
    assert mx.allclose(every, model(IMAGES), atol=1e-5)


def test_a_second_block_sees_a_share_of_the_tokens() -> None:
    model, stage = selecting(0.5)
    seen: list[tuple[int, ...]] = []

    class Watched(nn.Module):
        def __init__(self, block: nn.Module):
            super().__init__()
            self.block = block

        def __call__(self, x: mx.array) -> mx.array:
            seen.append(x.shape)
            y: mx.array = self.block(x)
            return y

    stage.blocks[1] = Watched(stage.blocks[1])
    model(IMAGES)
    # 16 patches and the class token
    assert seen == [(2, 8, 32)]


def test_the_first_tokens_and_the_earlier_of_equals_are_chosen() -> None:
    importance = mx.array([[0.0, 1.0, 3.0, 1.0, 2.0]])
    chosen, others = chosen_first(importance, 3, prefix=1)
    assert chosen.tolist() == [[0, 2, 4]]
    assert others.tolist() == [[1, 3]]
    assert chosen_first(mx.zeros((1, 5)), 2)[0].tolist() == [[0, 1]]


def test_selection_is_written_and_read(tmp_path: Path) -> None:
    model, _ = selecting(0.5)
    save_model(tmp_path / "model", model)
    again = load_model(tmp_path / "model")
    assert again.config == model.config
    assert mx.allclose(again(IMAGES), model(IMAGES), atol=1e-5)


def test_selectors_learn_what_the_next_block_does() -> None:
    plain = made()
    first, second = plain.stages[0].blocks
    # far from even, and alike, so that there is something to predict
    first.mixer.qkv_proj.weight = first.mixer.qkv_proj.weight * 20
    second.update(first.parameters())
    model = with_token_selection(plain, keep=0.5, hidden_dims=8)
    stage = cast(SelectingStage, model.stages[0])
    stage.is_selecting = False
    assert mx.allclose(model.eval()(IMAGES), plain(IMAGES), atol=1e-6)
    model.freeze()
    for selector in stage.selectors:
        selector.unfreeze()
    optimizer = optim.Adam(learning_rate=0.03)

    def loss(model: ImageClassifier, images: mx.array) -> mx.array:
        return cast(SelectingStage, model.stages[0]).selector_loss(model.embed(images))

    step = nn.value_and_grad(model, loss)
    losses = []
    for _ in range(30):
        value, gradient = step(model, IMAGES)
        assert all("selectors" in name for name, _ in nn.utils.tree_flatten(gradient))
        optimizer.update(model, gradient)
        losses.append(value.item())
    assert losses[-1] < 0.8 * losses[0]
    assert losses[-1] > 0
    stage.is_selecting = True
    assert not mx.allclose(model(IMAGES), plain(IMAGES), atol=1e-6)


def test_gradients_pass_through_the_chosen_tokens_and_the_others() -> None:
    model, stage = selecting(0.5)
    for selector in stage.selectors:
        selector.freeze()

    def loss(model: ImageClassifier) -> mx.array:
        return mx.sum(model(IMAGES).square())

    _, gradient = nn.value_and_grad(model, loss)(model)
    flat = dict(nn.utils.tree_flatten(gradient))
    assert not any("selectors" in name for name in flat)
    assert all(mx.any(array != 0).item() for name, array in flat.items() if "key" not in name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"token_selection": {"keep": 2}}, "'keep' must be a number from 0.001 to 1"),
        ({"token_selection": {"keep": 0.5, "kind": 1}}, "'kind' must be None"),
        (
            {"token_selection": {"keep": 0.5}, "token_mixer": "sima"},
            "'token_selection' must be left out",
        ),
        (
            {
                "token_selection": {"keep": 0.5},
                "model_args": {**VIT.tiny["model_args"], "depth": 1},
            },
            "'depth' must be at least 2",
        ),
        ({"token_mixer": {"name": "hydra", "size": 3}}, "the options of hydra must be among"),
    ],
    ids=["share", "key", "mixer", "depth", "option"],
)
def test_wrong_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        made(**keys)


def test_images_of_another_size() -> None:
    model = made()
    assert model(mx.zeros((1, 48, 24, 3))).shape == (1, 5)
    with pytest.raises(
        ValueError, match=r"multiples of its patches, 8, but got shape \(1, 33, 32, 3\)"
    ):
        model(mx.zeros((1, 33, 32, 3)))
    mixer = find("mlp_mixer")
    fixed = mixer.build(mixer.config.from_hub(mixer.tiny))
    with pytest.raises(
        ValueError, match=r"must have the height and width of the model, \(16, 24\)"
    ):
        fixed(mx.zeros((1, 24, 16, 3)))
