"""`mmfree classify` with tiny classifiers of texts and of images, of random weights."""

import io
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlx_mmfree import demo, load
from mlx_mmfree.cli.classify import main
from mlx_mmfree.hub import save_model
from mlx_mmfree.models import find
from tests.hub.checkpoints import GOLDENS
from tests.hub.timm_models import write_backbone

Captured = pytest.CaptureFixture[str]
LABELS = ["good", "bad", "neither"]


def _folder(folder: Path, **values: object) -> str:
    architecture = find("metaformer")
    mx.random.seed(2)
    given = {
        **architecture.tiny,
        "token_mixer": {"name": "gqa", "num_heads": 4},
        "task": "classifier",
        "vocab_size": 518,
        "initializer_range": 0.5,
        **values,
    }
    model = architecture.build(architecture.config.from_hub(given))
    save_model(folder, model, GOLDENS / "tokenizer_bpe")
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _folder(tmp_path_factory.mktemp("classifier") / "model", labels=LABELS)


def test_each_text_gets_its_classes(model: str, tmp_path: Path, capsys: Captured) -> None:
    texts = ["The queen gave a robe.", "He wore it, and so on.", "No."]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts))
    assert main(["--model", model, "--data", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["texts"]
    assert [each["text"] for each in found] == texts
    own, tokenizer = load(model)
    for each in found:
        chances = mx.softmax(own(mx.array([tokenizer.encode(each["text"])]))[0]).tolist()
        want = sorted(zip(chances, LABELS, strict=True), reverse=True)
        assert [entry["label"] for entry in each["classes"]] == [label for _, label in want]
        shown = [entry["probability"] for entry in each["classes"]]
        assert shown == pytest.approx([chance for chance, _ in want], rel=1e-5)
    assert main(["--model", model, "--text", texts[0], "--top-k", "1"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["text", "class", "probability"]
    assert line.split()[1] == found[0]["classes"][0]["label"]


def test_classes_without_names_are_numbers(tmp_path: Path, capsys: Captured) -> None:
    model = _folder(tmp_path / "model", num_labels=2)
    assert main(["--model", model, "--text", "A text."]) == 0
    labels = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(labels) == ["0", "1"]


def test_mistakes(model: str, capsys: Captured) -> None:
    for flags, message in (
        (["--model", str(demo.path()), "--text", "a"], "--model must sort texts or images into"),
        (
            ["--model", model],
            "the input must be files of images, --text or --data but got none",
        ),
        (["--model", model, "--text", "a", "a.png"], "--text or --data but got both"),
        (["--model", model, "a.png"], "must be texts but"),
        (
            ["--model", model, "--text", "a", "--picture", "a.png"],
            "--picture must be left out without images",
        ),
        (["--model", model, "--text", "a", "--top-k", "0"], "--top-k"),
    ):
        assert main(flags) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three pictures of noise."""
    folder = tmp_path_factory.mktemp("images")
    files = [str(folder / name) for name in ("a.png", "b.png", "c.png")]
    for seed, file in enumerate(files):
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(file)
    return files


@pytest.fixture(scope="module")
def sight(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ViT with names of classes, one of which spans lines."""
    architecture = find("vit")
    mx.random.seed(3)
    named = {**architecture.tiny, "num_classes": 3, "label_names": ["good", "very\nbad", "neither"]}
    model = architecture.build(architecture.config.from_hub(named))
    model.head.weight = mx.random.normal(model.head.weight.shape)
    folder = tmp_path_factory.mktemp("sight") / "model"
    save_model(folder, model)
    return str(folder)


def test_each_image_gets_its_classes(sight: str, images: list[str], capsys: Captured) -> None:
    for size in ("1", "2", "8"):
        assert main(["--model", sight, *images, "--json", "--batch-size", size]) == 0
        found = json.loads(capsys.readouterr().out)["images"]
        assert [each["image"] for each in found] == images
        model, processor = load(sight)
        chances = mx.softmax(model(processor(images)), axis=-1).tolist()
        for each, want in zip(found, chances, strict=True):
            best = sorted(zip(want, ["good", "very\nbad", "neither"], strict=True), reverse=True)
            assert [entry["label"] for entry in each["classes"]] == [label for _, label in best]
            shown = [entry["probability"] for entry in each["classes"]]
            assert shown == pytest.approx([chance for chance, _ in best], rel=1e-4)


def test_table_of_images_has_bars(sight: str, images: list[str], capsys: Captured) -> None:
    assert main(["--model", sight, images[0]]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["image", "class", "probability"]
    assert len(lines) == 3
    for line in lines:
        text, _, bar = line.partition("█")
        assert text.startswith(images[0])
        assert len(bar) + ("█" in line) == round(30 * float(text.split()[-1]))
    assert sum("very bad" in line for line in lines) == 1


def test_names_of_classes_from_a_file(
    sight: str, images: list[str], tmp_path: Path, capsys: Captured
) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("\ufeffone\ntwo\nthree\n", encoding="utf-8")
    assert main(["--model", sight, images[0], "--labels", str(labels)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sorted(line.split()[1] for line in lines) == ["one", "three", "two"]
    for content, message in (
        (b"one\ntwo\n", "--labels must have a name for each of 3 classes but has 2"),
        (b"\xff", "--labels must be a UTF-8 text file but"),
    ):
        labels.write_bytes(content)
        assert main(["--model", sight, images[0], "--labels", str(labels)]) == 2
        assert message in capsys.readouterr().err
    assert main(["--model", sight, images[0], "--labels", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_mistakes_with_images(
    sight: str,
    images: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    damaged, folder = tmp_path / "damaged.png", tmp_path / "folder"
    damaged.write_bytes(Path(images[0]).read_bytes()[:400])
    folder.mkdir()
    monkeypatch.setattr("mlx_mmfree.cli.parts.picture_flag.find_spec", lambda name: name)
    for flags, message in (
        ([str(tmp_path / "absent.png")], "absent.png' cannot be read"),
        ([images[0], str(damaged)], "damaged.png' must be a sound JPEG"),
        (["--text", "a"], "must be images but"),
        ([images[0], "--top-k", "0"], "--top-k"),
        ([*images * 21, "--picture", "a.png"], "with more than 60 of them but there are 63"),
        ([images[0], "--picture", str(folder)], "--picture must be a file that can be written but"),
    ):
        assert main(["--model", sight, *flags]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.err.count("error:") == 1 and not captured.out


def test_a_model_without_classes_is_refused(
    images: list[str], tmp_path: Path, capsys: Captured
) -> None:
    write_backbone("vit", tmp_path / "backbone")
    assert main(["--model", str(tmp_path / "backbone"), images[0]]) == 2
    captured = capsys.readouterr()
    assert "the model must have classes but its 'num_classes' is 0. Train a head" in captured.err
    assert captured.err.count("error:") == 1 and not captured.out


def test_map_asks_for_matplotlib(
    sight: str, images: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("mlx_mmfree.cli.parts.picture_flag.find_spec", lambda name: None)
    assert main(["--model", sight, images[0], "--picture", "a.png"]) == 2
    assert "[classify] --picture needs the package matplotlib" in capsys.readouterr().err


@pytest.mark.plot
def test_map_is_drawn(sight: str, images: list[str], tmp_path: Path, capsys: Captured) -> None:
    picture = tmp_path / "map.png"
    assert main(["--model", sight, *images, "--picture", str(picture), "--top-k", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    with Image.open(io.BytesIO(picture.read_bytes())) as drawn:
        assert drawn.format == "PNG" and drawn.width > drawn.height > 300


@pytest.mark.interop
def test_classes_are_those_of_timm_from_the_file_on(
    images: list[str], tmp_path: Path, capsys: Captured
) -> None:
    timm = pytest.importorskip("timm")
    torch = pytest.importorskip("torch")
    categories = pytest.importorskip("torchvision.models").ResNet18_Weights.DEFAULT.meta[
        "categories"
    ]
    torch.manual_seed(0)
    model = timm.create_model("edgenext_xx_small.in1k").eval()
    with torch.no_grad():
        model.head.fc.weight.normal_()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad():
        batch = torch.stack([transform(Image.open(file).convert("RGB")) for file in images])
        best = model(batch).softmax(-1).topk(3)
    assert main(["--model", str(tmp_path), *images, "--json", "--top-k", "3"]) == 0
    found = json.loads(capsys.readouterr().out)["images"]
    for each, chances, numbers in zip(found, best.values, best.indices, strict=True):
        assert [entry["label"] for entry in each["classes"]] == [categories[n] for n in numbers]
        shown = [entry["probability"] for entry in each["classes"]]
        assert shown == pytest.approx(chances.tolist(), rel=1e-3)
