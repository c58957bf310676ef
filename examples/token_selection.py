"""A ViT learns which tokens every second block needs (ToSA, arXiv 2406.08816), in the paper's stages.

First the blocks are trained alone. Then they are frozen, and selectors learn to tell from the scores
of a block what the next one will look at. Last the selectors are frozen, and the blocks learn to do
with the tokens that are left. For comparison, blocks also learn on with all tokens, and with those that
selectors choose that have learned nothing. `--quick` does it with a few drawn pictures.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlx_mmfree.models import find
from mlx_mmfree.models.vit import with_token_selection
from mlx_mmfree.training.image_sets import read_images

Pictures = tuple[np.ndarray, np.ndarray]
Loss = Callable[[Any, mx.array, mx.array], mx.array]
SIDE = 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--train", type=Path, help="IDX file of MNIST's images, its labels beside it"
    )
    parser.add_argument("--test", type=Path, help="the same for the test")
    parser.add_argument("--tested", type=int, default=2000, help="images of the test (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of the first stage (%(default)s)")
    parser.add_argument("--keep", type=float, default=0.5, help="share of tokens (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps with drawn pictures")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 6, 1
        train, test = drawn(64), drawn(32)
    elif args.train is None or args.test is None:
        parser.error("--train and --test must be given, or --quick")
    else:
        train, test = read(args.train), read(args.test)
        test = test[0][: args.tested], test[1][: args.tested]
    rows = [run(args, train, test, seed) for seed in range(args.seeds)]
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        print(f"{name:55s} {values.mean():7.3f}  (standard deviation {values.std():.3f})")


def run(args: argparse.Namespace, train: Pictures, test: Pictures, seed: int) -> dict[str, float]:
    """The accuracy that all stages reach."""
    mx.random.seed(seed)
    draw = np.random.default_rng(seed)
    vit = find("vit")
    sizes = {"patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
    described = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 10,
        "model_args": {"img_size": SIDE, "in_chans": 1, **sizes},
    }
    plain: Any = vit.build(vit.config.from_hub(described))
    learn(plain, cross_entropy, train, args.steps, draw)
    found = {"accuracy of the plain ViT": accuracy(plain, test)}
    models: dict[str, Any] = {
        name: with_token_selection(plain, keep=args.keep)
        for name in ("all", "untrained", "trained")
    }
    chosen = models["trained"].stages[0]
    found["divergence of fresh selectors"] = divergence(models["trained"], test)
    models["trained"].freeze()
    for selector in chosen.selectors:
        selector.unfreeze()
    learn(models["trained"], selector_loss, train, args.steps // 3, draw)
    found["divergence of trained selectors"] = divergence(models["trained"], test)
    found["accuracy with selection, blocks as before"] = accuracy(models["trained"], test)
    models["all"].stages[0].is_selecting = False
    words = {
        "all": "accuracy with all tokens, blocks trained on",
        "untrained": "accuracy with fresh selectors, blocks trained on",
        "trained": "accuracy with trained selectors, blocks trained on",
    }
    for name, model in models.items():
        model.unfreeze()
        for selector in model.stages[0].selectors:
            selector.freeze()
        learn(model, cross_entropy, train, args.steps // 3, draw)
        found[words[name]] = accuracy(model, test)
    return found


def learn(
    model: nn.Module, loss: Loss, pictures: Pictures, steps: int, draw: np.random.Generator
) -> None:
    """Trains what is not frozen."""
    model.train()
    warm_up = max(1, steps // 8)
    rate = optim.join_schedules(
        [
            optim.linear_schedule(1e-4, 1e-3, warm_up),
            optim.cosine_decay(1e-3, steps - warm_up, 1e-5),
        ],
        [warm_up],
    )
    optimizer = optim.AdamW(learning_rate=rate, weight_decay=0.05)
    gradient = nn.value_and_grad(model, loss)
    images, labels = pictures
    for _ in range(steps):
        batch = draw.integers(0, len(images), 64)
        _, change = gradient(model, mx.array(images[batch]), mx.array(labels[batch]))
        optimizer.update(model, change)
        mx.eval(model.parameters(), optimizer.state)
    model.eval()


def cross_entropy(model: Any, images: mx.array, labels: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(images), labels, reduction="mean")


def selector_loss(model: Any, images: mx.array, _: mx.array) -> mx.array:
    loss: mx.array = model.stages[0].selector_loss(model.embed(images))
    return loss


def accuracy(model: Any, pictures: Pictures) -> float:
    """The share of pictures whose class is found, in percent."""
    images, labels = pictures
    right = 0
    for start in range(0, len(images), 500):
        logits = model(mx.array(images[start : start + 500]))
        right += int((np.array(mx.argmax(logits, axis=1)) == labels[start : start + 500]).sum())
    return 100 * right / len(images)


def divergence(model: Any, pictures: Pictures) -> float:
    """How far the selectors are from the attention of the next blocks, in nats for a token."""
    images, labels = (mx.array(array[:500]) for array in pictures)
    value: Any = selector_loss(model, images, labels).item()
    return float(value)


def read(path: Path) -> Pictures:
    """Images as floats from -1 to 1, and their labels."""
    found = read_images(path, (), 10)
    pixels = np.stack([each.picture for each in found]).astype(np.float32)[..., None]
    return pixels / 127.5 - 1, np.array([each.label for each in found], np.int32)


def drawn(count: int) -> Pictures:
    """Pictures with a square, whose position is their class."""
    draw = np.random.default_rng(count)
    labels = draw.integers(0, 10, count).astype(np.int32)
    images = draw.normal(-1, 0.1, (count, SIDE, SIDE, 1)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[8 * row : 8 * row + 6, 7 * column : 7 * column + 6] = 1
    return images, labels


if __name__ == "__main__":
    main()
