"""Runs on labelled images: every format of data, the bits of a resumed run, and clear refusals."""

import gzip
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree import load
from mlx_mmfree.errors import TrainingError, UnsupportedModelError
from mlx_mmfree.layers.matrix import matrices, parameters
from mlx_mmfree.layers.norms import BatchNorm, running_statistics
from mlx_mmfree.models import architectures, find
from mlx_mmfree.models.parts.architecture import WeightNames
from mlx_mmfree.training import Settings, train_model
from mlx_mmfree.training.corpus.mixture import Stage
from mlx_mmfree.training.data_parallel import DataParallel
from mlx_mmfree.training.first_model import FirstModel, with_classes
from mlx_mmfree.training.image_sets import digest_of, read_images
from mlx_mmfree.training.loop import plan_training
from mlx_mmfree.training.optimizer import build_optimizer
from mlx_mmfree.training.optimizer_step import BatchGradient, OptimizerStep
from mlx_mmfree.training.results import Callback, read_log
from mlx_mmfree.training.run_folder import learned
from mlx_mmfree.training.tasks.samples import ImageTask, mirrored, moved
from tests.hub.timm_models import CLASSIFIERS, FOLDERS, write_backbone

pytestmark = pytest.mark.usefixtures("without_curve")

NAMES = ("bright", "dark", "half")
Make = Callable[..., Settings]


def _pixels(seed: int, count: int, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Images of three kinds, which a tiny model can tell apart."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = draw.integers(0, 60, (count, side, side), np.uint8)
    images[labels == 0] += 150
    images[labels == 2, : side // 2] += 150
    return images, labels


def _write(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """The same images in every format."""
    np.savez_compressed(f"{folder}.npz", images=images, labels=labels, label_names=NAMES)
    header = struct.pack(">HBBIII", 0, 8, 3, *images.shape)
    kind = folder.with_name(f"{folder.name}-images-idx3-ubyte")
    kind.write_bytes(header + images.tobytes())
    beside = folder.with_name(f"{folder.name}-labels-idx1-ubyte")
    beside.write_bytes(
        struct.pack(">HBBI", 0, 8, 1, len(labels)) + labels.astype(np.uint8).tobytes()
    )
    for file in (kind, beside):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    image = pytest.importorskip("PIL.Image")
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        (folder / NAMES[label]).mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels).save(folder / NAMES[label] / f"{number:03}.png")


@pytest.fixture
def settings_of(tmp_path: Path) -> Make:
    for name, seed, count in (("train", 0, 24), ("valid", 1, 9)):
        _write(tmp_path / name, *_pixels(seed, count))

    def make(architecture: str = "vit", **values: Any) -> Settings:
        tiny = architectures()[architecture].tiny
        size = {"img_size": 8, "patch_size": 4} if architecture == "vit" else {}
        arguments = {**tiny["model_args"], "in_chans": 1, "drop_path_rate": 0.2, **size}
        given: dict[str, Any] = {
            "output": "run",
            "model": {"architecture": tiny["architecture"], "model_args": arguments},
            "stages": (Stage(1, {"train.npz": 1}),),
            "valid": ("valid.npz",),
            "steps": 6,
            "batch_size": 4,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "steps_per_report": 1,
            "steps_per_eval": 3,
            "save_every": 2,
            "root": tmp_path,
        }
        return Settings(**(given | values))

    return make


class _Kill(Exception):
    pass


class _Killer(Callback):
    def on_train(self, record: Any) -> None:
        if record["step"] == 5:
            raise _Kill


def _result(settings: Settings, run: str) -> tuple[bytes, list[dict[str, float]]]:
    names = ("loss", "valid_loss", "valid_accuracy", "tokens", "gradient_norm")
    log = read_log(settings.root / run / "log.jsonl")
    records = [{name: record[name] for name in names if name in record} for record in log[1:]]
    return (settings.root / run / "best.safetensors").read_bytes(), records


# batch norms, stochastic depth; ternary linears; moved images, several batches in a step
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "kind", "values"),
    [
        ("swiftformer", "dense", {"accumulation_steps": 2, "label_smoothing": 0.1}),
        ("vit", "ternary", {"random_shift": 1, "random_flip": True, "order": "epochs"}),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(
    settings_of: Make, architecture: str, kind: str, values: dict[str, Any]
) -> None:
    settings = settings_of(architecture, **values)
    settings = replace(settings, model={**settings.model, "linear_class": kind})
    whole = replace(settings, output="whole")
    metrics = train_model(whole)["held_out"]
    with pytest.raises(_Kill):
        train_model(settings, callbacks=[_Killer()])
    train_model(settings)
    assert _result(settings, "run") == _result(settings, "whole")
    assert set(metrics) == {"valid/loss", "valid/accuracy"}
    model, processor = load(settings.root / "run/model")
    assert model.config.label_names == NAMES
    images, labels = _pixels(1, 9)
    right = np.array(mx.argmax(model(processor(list(images))), axis=-1)) == labels
    assert right.mean() == pytest.approx(metrics["valid/accuracy"])
    assert (settings.root / "run/masters").exists() == (kind == "ternary")
    if kind == "ternary":
        again = replace(settings, output="again", init_from="run/masters", model={}, steps=3)
        train_model(replace(again, quantization_warmup=2))


def test_a_run_learns(settings_of: Make) -> None:
    settings = settings_of(steps=40, steps_per_eval=40, batch_size=12, learning_rate=3e-3)
    model = {**settings.model, "model_args": {**settings.model["model_args"], "drop_path_rate": 0}}
    assert train_model(replace(settings, model=model))["held_out"]["valid/accuracy"] == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "architecture", [n for n, each in architectures().items() if each.variants]
)
def test_every_backbone_takes_a_step(settings_of: Make, architecture: str) -> None:
    """Losses and gradients are finite on maps that shrink to one position, and the update fits them."""
    settings = settings_of(architecture)
    settings = replace(settings, model={**settings.model, "linear_class": "ternary"})
    model = FirstModel(settings).load()
    model.train()
    task = ImageTask(settings, model, None, (0, 1))
    optimizer = build_optimizer(settings)
    optimizer.init(model.trainable_parameters())
    before = dict(tree_flatten(model.trainable_parameters()))
    step = OptimizerStep(
        model,
        settings.loop({}),
        optimizer,
        lambda _: mx.array(1e-3),
        task.batches,
        task.loss(settings),
        DataParallel(),
    )
    assert np.isfinite(step(0).gradient_norm)
    after = dict(tree_flatten(model.trainable_parameters()))
    assert after.keys() == before.keys()
    assert any(matrix.is_ternary for matrix in matrices(model).values())
    assert any(not mx.array_equal(after[name], array) for name, array in before.items())


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulation_steps", [1, 3])
@pytest.mark.parametrize(
    "architecture", [n for n, each in architectures().items() if each.variants]
)
def test_one_image_a_batch(settings_of: Make, architecture: str, accumulation_steps: int) -> None:
    """A batch norm over one position needs two images; all other models train on one."""
    settings = settings_of(
        architecture,
        batch_size=1,
        steps=1,
        warmup_steps=0,
        accumulation_steps=accumulation_steps,
    )
    if "img_size" not in settings.model["model_args"]:
        model = {
            **settings.model,
            "pretrained_cfg": {"input_size": [1, 32, 32], "mean": [0.5], "std": [0.5]},
        }
        settings = replace(settings, model=model)
    if architecture not in ("efficientvit", "swiftformer"):
        assert train_model(settings)["step"] == 1
        return
    with pytest.raises(TrainingError, match="Raise 'batch_size' so that each process gets more"):
        plan_training(settings, FirstModel(settings).load(), DataParallel())
    with pytest.raises(TrainingError, match="Raise 'batch_size' so that each process gets more"):
        train_model(settings)


def test_all_formats_hold_the_same_images(settings_of: Make) -> None:
    root = settings_of().root
    kinds = (".npz", "-images-idx3-ubyte", "-images-idx3-ubyte.gz", "")
    want, labels = _pixels(0, 24)
    for kind in kinds:
        path = root / f"train{kind}"
        found = read_images(path, NAMES, 3)
        assert len(digest_of(path)) >= 64
        order = np.argsort(labels, kind="stable") if path.is_dir() else range(24)
        assert [each.label for each in found] == [labels[n] for n in order]
        if not path.is_dir():
            assert all((a.picture == b).all() for a, b in zip(found, want, strict=True))
    from PIL import Image

    assert (np.asarray(Image.open(found[0].picture)) == want[0]).all()
    # a model may number its classes otherwise
    turned = read_images(root / "train", NAMES[::-1], 3)
    assert [each.label for each in turned] == [2 - each.label for each in found]


def test_statistics_follow_the_batches_of_compiled_and_plain_steps(settings_of: Make) -> None:
    """The running statistics of a step are those that the same forward pass gives without a gradient."""
    settings = settings_of("swiftformer")
    found = []
    for repeats in (False, True):
        model = FirstModel(settings).load()
        model.train()
        task = ImageTask(settings, model, None, (0, 1))
        gradient = BatchGradient(model, task.loss(settings), repeats)
        for step in range(3):
            mx.random.seed(step)
            mx.eval(gradient(task.batches(step)[0]))
        found.append(running_statistics(model))
    for name, array in found[0].items():
        assert mx.allclose(array, found[1][name], rtol=1e-5, atol=1e-6), name
        assert "num_batches" not in name or array.item() == 3
    fresh = running_statistics(FirstModel(settings).load())
    assert all(not mx.array_equal(fresh[name], array) for name, array in found[0].items())


def test_a_frozen_batch_norm_stays_as_in_evaluation() -> None:
    norm = BatchNorm(3)
    x = mx.random.normal((4, 2, 2, 3))
    want = norm.eval()(x)
    norm.train()
    assert not mx.allclose(norm(x), want)
    norm = BatchNorm(3).train()
    norm.freeze()
    assert mx.array_equal(norm(x), want) and not running_statistics(norm)
    norm.unfreeze()
    assert set(running_statistics(nn.Sequential(norm))) <= set(learned(nn.Sequential(norm)))
    assert norm.statistics["num_batches_tracked"].item() == 0


def test_a_new_head_keeps_all_other_weights(settings_of: Make) -> None:
    first = settings_of("swiftformer", steps=2, warmup_steps=1)
    described = {**first.model, "num_classes": 5, "label_names": list("abcde")}
    train_model(
        replace(
            first, model=described, stages=(Stage(1, {"train-images-idx3-ubyte": 1}),), valid=()
        )
    )
    again = replace(first, output="again", model={}, init_from="run/model", new_head=True)
    model = FirstModel(again).load()
    before = dict(tree_flatten(load(first.root / "run/model")[0].parameters()))
    after = dict(tree_flatten(model.parameters()))
    assert model.config.labels == NAMES and model.num_logits == 3
    for name, array in after.items():
        assert name.startswith("head.") or mx.array_equal(array, before[name]), name
    with pytest.raises(TrainingError, match=r"'bright' is not\. Give a model of these classes, or"):
        train_model(replace(again, new_head=False))
    train_model(again)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_new_head_is_what_timm_draws_anew(
    settings_of: Make, architecture: str, count: int
) -> None:
    """Also for as many classes as there were."""
    found = find(architecture)
    old = found.build(found.config.from_hub({**found.tiny, "num_classes": count}))
    for array in parameters(old).values():
        array += 9
    settings = settings_of(architecture, output="again", model={}, init_from="m", new_head=True)
    new = with_classes(old, settings)
    names = WeightNames(found.weight_names)
    before, after = parameters(old), parameters(new)
    assert new.num_logits == 3
    changed = {
        names.to_disk(name)
        for name, array in after.items()
        if array.shape != before[name].shape or not mx.array_equal(array, before[name])
    }
    assert changed == CLASSIFIERS[architecture]


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_model_without_classes_needs_a_new_head(
    settings_of: Make, architecture: str, tmp_path: Path
) -> None:
    write_backbone(architecture, tmp_path / "backbone")
    model: dict[str, Any] = {"model": {}, "init_from": "backbone", "steps": 2, "warmup_steps": 1}
    with pytest.raises(UnsupportedModelError, match=r"\[train\] the model must have classes"):
        train_model(settings_of(**model))
    train_model(settings_of(new_head=True, **model))
    trained = load(tmp_path / "run/model")[0]
    assert trained.config.labels == NAMES
    assert trained(mx.zeros((1, *FOLDERS[architecture][1], 3))).shape == (1, 3)


def test_the_plan_leaves_statistics_alone(settings_of: Make) -> None:
    settings = settings_of("swiftformer")
    first = FirstModel(settings)
    assert plan_training(settings, first.model, DataParallel()).total > 0
    assert all(
        "num_batches" not in name or array.item() == 0
        for name, array in running_statistics(first.model).items()
    )


def test_images_are_moved_and_mirrored() -> None:
    image = np.arange(6, dtype=np.float32).reshape(1, 2, 3, 1)
    both = np.concatenate([image, image])
    shifted = moved(both, np.array([[1, -1], [0, 0]]))[..., 0]
    assert shifted.tolist() == [[[1, 2, 2], [1, 2, 2]], [[0, 1, 2], [3, 4, 5]]]
    turned = mirrored(both, np.array([True, False]))[..., 0]
    assert turned.tolist() == [[[2, 1, 0], [5, 4, 3]], [[0, 1, 2], [3, 4, 5]]]


def test_chance_is_the_same_for_any_number_of_processes(settings_of: Make) -> None:
    settings = settings_of(random_shift=2, random_flip=True)
    model = FirstModel(settings).model
    whole, *parts = (
        ImageTask(settings, model, None, share).batches(3)[0] for share in ((0, 1), (0, 2), (1, 2))
    )
    for rank, part in enumerate(parts):
        assert (part.inputs == whole.inputs[rank::2]).all()
        assert (part.targets == whole.targets[rank::2]).all()


def _npz(root: Path, **arrays: Any) -> str:
    np.savez(root / "odd.npz", **arrays)
    return "odd.npz"


def _cut(root: Path, name: str, size: int) -> str:
    odd = root / f"odd-{name}"
    odd.write_bytes((root / name).read_bytes()[:size])
    return odd.name


def _false_header(root: Path) -> str:
    with zipfile.ZipFile(root / "odd.npz", "w") as file:
        head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999, 999, 999), }"
        head += b" " * (118 - len(head) % 118 - 1) + b"\n"
        file.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
        file.writestr("labels.npy", b"nothing")
    return "odd.npz"


_IMAGES = np.zeros((2, 4, 4), np.uint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda root: _npz(root, labels=np.arange(2)),
            "'images' of .* must be uint8, .* is missing",
        ),
        (lambda root: _npz(root, images=_IMAGES), "'labels' of .* is missing"),
        (
            lambda root: _npz(root, images=_IMAGES.astype(float), labels=np.arange(2)),
            "'images' of .* is float64",
        ),
        (lambda root: _npz(root, images=_IMAGES, labels=np.arange(3)), "2 images and 3 labels"),
        (lambda root: _npz(root, images=_IMAGES, labels=np.array([0, 7])), "from 0 to 2"),
        (lambda root: _npz(root, images=_IMAGES, labels=np.array([0, -1])), "whole numbers from 0"),
        (
            lambda root: _npz(root, images=np.array([{}, {}]), labels=np.arange(2)),
            "cannot be read: the header speaks of object",
        ),
        (lambda root: _npz(root, images=_IMAGES[:0], labels=np.arange(0)), "0 images and 0 labels"),
        (_false_header, "cannot be read"),
        (lambda root: _cut(root, "valid.npz", 300), "must be a sound .npz file"),
        (lambda root: _cut(root, "valid-images-idx3-ubyte", 100), "speaks of the shape"),
        (lambda root: _cut(root, "valid-images-idx3-ubyte", 3), "sound IDX file"),
        (lambda root: "valid-labels-idx1-ubyte", "images-idx3-ubyte' in it"),
        (lambda root: "run-away", "'stages' must name files that can be read but"),
        (lambda root: "train/dark", "holds no folder"),
    ],
)
def test_what_is_no_image_file_is_refused(
    settings_of: Make, make: Callable[[Path], str], message: str
) -> None:
    settings = settings_of()
    for file in settings.root.glob("valid-labels-*"):
        file.with_name(f"odd-{file.name}").write_bytes(file.read_bytes())
    name = make(settings.root)
    model = {**settings.model, "label_names": list(NAMES)}
    with pytest.raises(TrainingError, match=message):
        train_model(replace(settings, model=model, stages=(Stage(1, {name: 1}),)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"grad_checkpoint": True}, "'grad_checkpoint' must be left out for an image model"),
        ({"embedding_std": 0.5}, "'embedding_std' must be left out for an image model"),
        ({"tokenizer": "run"}, "'tokenizer' must be left out for an image model"),
        ({"new_head": True}, "'new_head' must be left out without 'init_from'"),
        ({"random_shift": -1}, "'random_shift' must be at least 0"),
        ({"dropout": 0.1}, "'dropout' must be 0 for a model without blocks"),
        ({"quantization_warmup": 2}, "'quantization_warmup' must be 0"),
    ],
)
def test_settings_of_other_models_are_refused(
    settings_of: Make, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        train_model(settings_of(**values))


def test_files_that_do_not_agree_are_refused(settings_of: Make) -> None:
    files = {"train.npz": 1, "train-images-idx3-ubyte": 1}
    with pytest.raises(TrainingError, match="must say what its classes are called"):
        train_model(settings_of(stages=(Stage(1, files),)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["valid.npz", "valid-images-idx3-ubyte", "valid-images-idx3-ubyte.gz"]
)
def test_damaged_files_are_refused_in_one_line(settings_of: Make, name: str) -> None:
    file = settings_of().root / name
    whole = file.read_bytes()
    draw = np.random.default_rng(7)
    refused = 0
    for _ in range(300):
        changed = np.frombuffer(whole, np.uint8).copy()
        # headers lie at both ends
        ends = np.concatenate([np.arange(200), np.arange(len(whole) - 200, len(whole))])
        offsets = draw.choice(ends % len(whole), 3)
        changed[offsets] = draw.integers(0, 256, 3)
        file.write_bytes(
            changed[: draw.integers(1, len(whole))] if draw.random() < 0.2 else changed
        )
        try:
            read_images(file, NAMES, 3)
        except TrainingError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 30


def test_statistics_of_processes_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"mean": mx.array([3.0, 5.0]), "count": mx.array(4, mx.int64)}
    processes = DataParallel()
    monkeypatch.setattr(DataParallel, "size", 2)
    monkeypatch.setattr(
        processes,
        "_summed",
        lambda own: [
            a + b.astype(mx.float32) / 2 for a, b in zip(own, others.values(), strict=True)
        ],
    )
    found = processes.means({"mean": mx.array([1.0, 2.0]), "count": mx.array(4, mx.int64)})
    assert found["mean"].tolist() == [2.0, 3.5]
    assert (found["count"].dtype, found["count"].item()) == (mx.int64, 4)
