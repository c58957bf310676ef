"""Loading a folder: formats, dtypes, and what is refused."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, UnsupportedModelError
from mlx_mmfree.evaluation import score_continuations
from mlx_mmfree.generation import batch_generate, generate
from mlx_mmfree.hub import convert, load, load_model, needed_bytes, open_checkpoint, save_model
from mlx_mmfree.hub.checkpoint.checkpoint import described_checkpoint
from mlx_mmfree.hub.conversion.to_folder import FloatFormats
from mlx_mmfree.hub.remote.source import find_source
from mlx_mmfree.layers import BitLinear, PackedBitLinear, pack_linears
from tests.files.torch_files import write_torch
from tests.hub.checkpoints import (
    GOLDENS,
    edit_json,
    edit_tensors,
    golden_checkpoint,
    logits,
    nbytes,
    refused,
    tiny_checkpoint,
    tiny_model,
    tiny_transformer,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": True}, {"conv_size": 3}, {"linear_class": "dense"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [None, mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("file_dtype", [mx.float32, mx.bfloat16], ids=str)
def test_formats_and_dtypes(
    tmp_path: Path, options: dict[str, Any], dtype: mx.Dtype | None, file_dtype: mx.Dtype
) -> None:
    source = tiny_model(**options)
    source.set_dtype(file_dtype)
    save_model(tmp_path / "m", source)
    want = logits(source)
    wide = load_model(tmp_path / "m", dtype=dtype, packed=False)
    packed = load_model(tmp_path / "m", dtype=dtype)
    is_ternary = "linear_class" not in options
    linears = [m for m in packed.modules() if isinstance(m, PackedBitLinear)]
    assert len(linears) == (13 if is_ternary else 0)
    assert not any(isinstance(module, PackedBitLinear) for module in wide.modules())
    assert not any(isinstance(module, BitLinear) for module in packed.modules())
    assert packed.dtype == wide.dtype == (dtype or file_dtype)
    assert all(linear.scale.dtype == mx.float32 for linear in linears)
    if dtype is None or dtype == file_dtype:
        assert mx.array_equal(logits(wide), want)
        # packed linears compute their norms and sums in one float32 operation
        assert mx.array_equal(logits(packed), logits(pack_linears(source)))
    checkpoint = open_checkpoint(tmp_path / "m")
    assert needed_bytes(checkpoint, dtype, packed=True) == nbytes(packed)
    assert needed_bytes(checkpoint, dtype, packed=False) == nbytes(wide)


def test_trits_come_from_the_file_and_not_from_the_wanted_dtype(folder: Path) -> None:
    exact, rounded = load_model(folder), load_model(folder, dtype=mx.bfloat16)
    assert mx.array_equal(exact.head.weight, rounded.head.weight)
    assert mx.array_equal(exact.head.scale, rounded.head.scale)


def test_takes_an_opened_checkpoint(folder: Path) -> None:
    assert mx.array_equal(logits(load_model(open_checkpoint(folder))), logits(load_model(folder)))


def test_float_format_trains(folder: Path) -> None:
    model = load_model(folder, packed=False)
    gradients = nn.value_and_grad(model, lambda m: logits(m).square().mean())(model)[1]
    trained = dict(tree_flatten(model.trainable_parameters()))
    assert set(dict(tree_flatten(gradients))) == set(trained)
    assert "head.weight" in trained


def test_peak_memory_stays_far_below_the_float_weights(tmp_path: Path) -> None:
    save_model(
        tmp_path / "m",
        tiny_model(hidden_size=128, intermediate_size=128, num_hidden_layers=24),
    )
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load_model(tmp_path / "m")
    assert mx.get_peak_memory() - before < 0.25 * open_checkpoint(tmp_path / "m").nbytes
    assert mx.get_active_memory() - before < 1.1 * nbytes(model) + 4096


@pytest.mark.parametrize("dtype", [mx.int32, mx.float64, "float32", 1], ids=str)
def test_refuses_a_dtype_that_is_no_float_of_models(folder: Path, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"'dtype' must be mx\.float32"):
        load_model(folder, dtype=dtype)


class TestFolder:
    def test_missing_config(self, tmp_path: Path) -> None:
        refused(tmp_path, r"has no config\.json\. Give the folder that holds it")

    def test_the_folder_of_a_run(self, folder: Path, tmp_path: Path) -> None:
        inner = re.escape(str(tmp_path / "model"))
        refused(tmp_path, rf"has no config\.json\. It is the folder of a run.*'{inner}'")

    def test_config_that_is_no_object(self, folder: Path) -> None:
        (folder / "config.json").write_text("[]")
        refused(folder, "must be an object")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rms_norm_eps", 0),
            ("hidden_size", -1),
            ("hidden_size", "24"),
            ("vocab_size", 2**40),
            ("num_hidden_layers", 10**30),
            ("use_lower_bound", 1),
        ],
    )
    def test_settings_out_of_bounds(self, folder: Path, key: str, value: Any) -> None:
        edit_json(folder / "config.json", **{key: value})
        refused(folder, rf"\[config\.json\] '{key}' must")

    def test_unknown_architecture_lists_the_known(self, folder: Path) -> None:
        edit_json(folder / "config.json", model_type="bert")
        with pytest.raises(UnsupportedModelError, match=r"hgrn_bit.*'bert'"):
            load_model(folder)
        edit_json(folder / "config.json", model_type=...)
        with pytest.raises(UnsupportedModelError, match="None"):
            load_model(folder)

    @pytest.mark.parametrize(
        "changes",
        [
            {"quantization_config": {"quant_method": "bitnet"}},
            {"quantization_config": {"quant_method": "mmfree", "bits": 2, "format_version": 2}},
            {"quantization_config": "mmfree"},
        ],
        ids=str,
    )
    def test_other_quantisations(self, folder: Path, changes: dict[str, Any]) -> None:
        edit_json(folder / "config.json", **changes)
        with pytest.raises(UnsupportedModelError, match="quantization"):
            load_model(folder)

    def test_missing_weights(self, folder: Path) -> None:
        weights(folder).unlink()
        refused(folder, r"must hold model\.safetensors")
        (folder / "pytorch_model.bin").touch()
        refused(folder, "too short for a zip file")

    def test_truncated_weights(self, folder: Path) -> None:
        content = weights(folder).read_bytes()
        for size in (0, 7, 100, len(content) // 2, len(content) - 1):
            weights(folder).write_bytes(content[:size])
            refused(folder, "damaged")

    @pytest.mark.exhaustive
    def test_absurd_sizes_are_refused_before_memory_is_taken(self, folder: Path) -> None:
        edit_json(folder / "config.json", hidden_size=2**17, vocab_size=2**24)
        edit_json(folder / "config.json", num_hidden_layers=1024, intermediate_size=2**20)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        refused(folder, "lacks tensors")
        assert mx.get_peak_memory() - before < 2**20


class TestTensors:
    def test_missing(self, folder: Path) -> None:
        edit_tensors(weights(folder), model__norm__weight=None)
        refused(folder, r"lacks tensors .*: 1, namely 'model\.norm\.weight'")

    def test_many_missing(self, folder: Path) -> None:
        edit_json(folder / "config.json", num_hidden_layers=4)
        refused(folder, r"lacks tensors .*: 30, namely .* and 25 more")

    def test_unexpected(self, folder: Path) -> None:
        edit_tensors(weights(folder), model__layers__0__attn__x_proj__weight=mx.zeros(3))
        refused(
            folder, r"unexpected tensors .*: 1, namely 'model\.layers\.0\.attn\.x_proj\.weight'"
        )

    def test_unused(self, folder: Path) -> None:
        want = logits(load_model(folder))
        edit_tensors(weights(folder), model__layers__0__attn__q_conv1d__weight=mx.zeros(3))
        assert mx.array_equal(logits(load_model(folder)), want)

    def test_mis_shaped(self, folder: Path) -> None:
        edit_tensors(weights(folder), model__norm__weight=mx.ones(25))
        refused(folder, r"must have shape \(24,\), as config\.json says, but has \(25,\)")

    def test_wrong_dtype(self, folder: Path) -> None:
        edit_tensors(weights(folder), model__norm__weight=mx.ones(24, mx.int32))
        refused(folder, "must be float32, float16, bfloat16 but is int32")

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize(
        "name", ["lm_head.weight", "model.norm.weight", "model.embeddings.weight"]
    )
    def test_not_finite(self, folder: Path, packed: bool, value: float, name: str) -> None:
        array = mx.load(str(weights(folder)))[name]
        array = mx.where(mx.arange(array.size).reshape(array.shape) == 5, value, array)
        mx.eval(array)
        edit_tensors(weights(folder), **{name: array})
        refused(folder, f"'{name}' .*must be finite", packed=packed)


class TestTiedHead:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tiny_checkpoint(tmp_path / "model", tie_word_embeddings=True)

    @pytest.mark.parametrize("packed", [True, False])
    def test_copy_of_the_embedding_is_left_out(self, folder: Path, packed: bool) -> None:
        want = logits(load_model(folder, packed=packed))
        embedding = mx.load(str(weights(folder)))["model.embeddings.weight"]
        edit_tensors(weights(folder), lm_head__weight=embedding)
        assert mx.array_equal(logits(load_model(folder, packed=packed)), want)

    def test_another_matrix_is_refused(self, folder: Path) -> None:
        embedding = mx.load(str(weights(folder)))["model.embeddings.weight"]
        for other in (embedding * 2, embedding.astype(mx.float16), mx.zeros(3)):
            edit_tensors(weights(folder), lm_head__weight=other)
            refused(folder, "tie_word_embeddings")


class TestPacked:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        save_model(tmp_path / "packed", load_model(tiny_checkpoint(tmp_path / "model")))
        return tmp_path / "packed"

    def test_has_no_master_weights(self, folder: Path) -> None:
        refused(
            folder, "must hold float master weights to be trained but holds packed", packed=False
        )
        with pytest.raises(CheckpointError, match="must hold float master weights to be trained"):
            needed_bytes(open_checkpoint(folder), packed=False)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_scale(self, folder: Path, value: float) -> None:
        edit_tensors(weights(folder), lm_head__weight_scale=mx.array([value]))
        refused(folder, r"'lm_head\.weight_scale' .*must be")

    def test_scale_of_another_size(self, folder: Path) -> None:
        edit_tensors(weights(folder), lm_head__weight_scale=mx.ones(40))
        refused(folder, r"must have shape \(1,\)")

    def test_scale_of_another_type(self, folder: Path) -> None:
        edit_tensors(weights(folder), lm_head__weight_scale=mx.ones(1, mx.float16))
        refused(folder, r"'lm_head\.weight_scale' .*must be float32 but is float16")

    # 24 inputs: codes 0 to 23 of the two words of a row are weights, the rest is padding
    @pytest.mark.parametrize("word, bits", [(0, 0x55555557), (1, 0x55555557), (1, 0x45555555)])
    def test_codes(self, folder: Path, word: int, bits: int) -> None:
        packed = np.array(mx.load(str(weights(folder)))["lm_head.weight"])
        assert packed.shape == (40, 2)
        packed[7, word] = bits
        edit_tensors(weights(folder), lm_head__weight=mx.array(packed))
        refused(folder, r"'lm_head\.weight' .*must hold ternary codes")

    def test_float_weight_beside_a_scale(self, folder: Path) -> None:
        edit_tensors(weights(folder), lm_head__weight=mx.zeros((40, 2)))
        refused(folder, "must be uint32 but is float32")

    def test_needed_bytes(self, folder: Path) -> None:
        assert needed_bytes(open_checkpoint(folder)) == nbytes(load_model(folder))


class TestShards:
    INDEX = "model.safetensors.index.json"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return golden_checkpoint("hgrn_heads_sharded", tmp_path / "model")

    def edit_map(self, folder: Path, file: Any, name: str = "model.norm.weight") -> None:
        index = json.loads((folder / self.INDEX).read_text())
        index["weight_map"][name] = file
        (folder / self.INDEX).write_text(json.dumps(index))

    def test_loads(self, folder: Path) -> None:
        assert load_model(folder).vocab_size == 288

    @pytest.mark.parametrize(
        "file",
        [
            "../other/model.safetensors",
            "/etc/passwd",
            "sub/model.safetensors",
            "..",
            "",
            "model.bin",
            "a\n.safetensors",
            "\\\\host\\share.safetensors",
            3,
            None,
        ],
    )
    def test_index_must_stay_in_the_folder(self, folder: Path, file: Any) -> None:
        self.edit_map(folder, file)
        refused(folder, "must name .safetensors files of its own folder")

    def test_absent_shard(self, folder: Path) -> None:
        self.edit_map(folder, "model-00003-of-00003.safetensors")
        refused(folder, "model-00003-of-00003.safetensors' must be a file but is missing")

    def test_tensor_in_another_shard(self, folder: Path) -> None:
        self.edit_map(folder, "model-00001-of-00002.safetensors")
        refused(folder, r"must hold tensor 'model\.norm\.weight', as the index says")

    def test_tensor_in_two_shards(self, folder: Path) -> None:
        first, second = sorted(folder.glob("model-*.safetensors"))
        name = next(iter(mx.load(str(first))))
        edit_tensors(second, **{name: mx.zeros(1)})
        refused(folder, "once but both")

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "3", "{"])
    def test_damaged_index(self, folder: Path, text: str) -> None:
        (folder / self.INDEX).write_text(text)
        refused(folder, "weight_map|JSON")

    def test_without_an_index(self, folder: Path) -> None:
        want = logits(load_model(folder))
        (folder / self.INDEX).unlink()
        # none of these is a part of the model
        for name in (
            "._model-00001-of-00002.safetensors",
            "._config.json",
            "consolidated.safetensors",
        ):
            (folder / name).write_bytes(b"\0\5\26\7")
        shutil.copyfile(
            folder / "model-00001-of-00002.safetensors", folder / "adapters.safetensors"
        )
        assert mx.array_equal(logits(load_model(folder)), want)
        for number, file in enumerate(sorted(folder.glob("model-*"))):
            file.rename(folder / f"model_part{number}.safetensors")
        assert mx.array_equal(logits(load_model(folder)), want)

    def test_without_an_index_and_a_part(self, folder: Path) -> None:
        (folder / self.INDEX).unlink()
        (folder / "model-00001-of-00002.safetensors").unlink()
        refused(
            folder, "must hold all 2 parts of the weights but lacks part 1, and there is no index"
        )

    def test_without_an_index_and_with_two_copies(self, folder: Path) -> None:
        (folder / self.INDEX).unlink()
        first = folder / "model-00001-of-00002.safetensors"
        shutil.copyfile(first, folder / "model.fp16.safetensors")
        refused(folder, r"once but both model-00001-of-00002.safetensors and model\.fp16")

    def test_of_torch_without_an_index(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint(tmp_path / "m")
        want = logits(load_model(folder))
        tensors = dict(mx.load(str(weights(folder))))
        weights(folder).unlink()
        for number in (1, 2):
            part = dict(list(tensors.items())[number - 1 :: 2])
            write_torch(folder / f"pytorch_model-0000{number}-of-00002.bin", part)
        (folder / "._pytorch_model-00001-of-00002.bin").write_bytes(b"\0\5\26\7")
        assert mx.array_equal(logits(load_model(folder)), want)

    def test_links_as_in_the_hub_cache(self, folder: Path, tmp_path: Path) -> None:
        repository = tmp_path / "models--me--tiny"
        snapshot = repository / "snapshots" / "abc"
        for part in (repository / "blobs", snapshot):
            part.mkdir(parents=True)
        for number, file in enumerate(sorted(folder.iterdir())):
            file.rename(repository / "blobs" / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        assert load_model(snapshot).vocab_size == 288


def test_a_head_that_is_missing_may_be_the_embedding(tmp_path: Path) -> None:
    """Without 'tie_word_embeddings' transformers takes a head of its own and mlx-lm the embedding."""
    save_model(tmp_path / "m", tiny_transformer(linears=None))
    want = logits(load_model(tmp_path / "m"))
    edit_json(tmp_path / "m/config.json", tie_word_embeddings=...)
    assert mx.array_equal(logits(load_model(tmp_path / "m")), want)
    edit_tensors(weights(tmp_path / "m"), **{"lm_head.weight": None})
    refused(tmp_path / "m", r"'lm_head.weight'. Set 'tie_word_embeddings' in config\.json to true")
    edit_json(tmp_path / "m/config.json", tie_word_embeddings=True)
    load_model(tmp_path / "m")


class TestTokenizer:
    def test_is_loaded_beside_the_model(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint(tmp_path / "model", vocab_size=700)
        for file in (GOLDENS / "tokenizer_spm").glob("tokenizer*"):
            shutil.copyfile(file, folder / file.name)
        model, tokenizer = load(folder)
        assert tokenizer.vocab_size <= model.vocab_size == 700
        assert model(mx.array([tokenizer.encode("Hello")]))[0].shape[-1] == 700

    def test_missing(self, folder: Path) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            load(folder)

    def test_more_tokens_than_rows(self, tmp_path: Path) -> None:
        """Only a text that holds one of them is refused."""
        folder = tiny_checkpoint(tmp_path / "model", vocab_size=640)
        for file in (GOLDENS / "tokenizer_spm").glob("tokenizer*"):
            shutil.copyfile(file, folder / file.name)
        (folder / "added_tokens.json").write_text('{"<pad>": 640, "<more>": 641}')
        model, tokenizer = load(folder)
        assert (model.vocab_size, tokenizer.vocab_size) == (640, 642)
        text = generate(model, tokenizer, "hi", max_tokens=3)
        assert batch_generate(model, tokenizer, ["hi", "a"], max_tokens=3).texts[0] == text
        message = "within the model's vocabulary, 0 to 639, but got 640 at position 1"
        for call in (
            lambda prompt: generate(model, tokenizer, prompt),
            lambda prompt: batch_generate(model, tokenizer, ["hi", prompt]),
            lambda prompt: score_continuations(model, [(prompt, [5])]),
        ):
            with pytest.raises(ValueError, match=message):
                call([5, 640])


LOADED_ELSEWHERE = ("bitcpm_minicpm", "maple_hf", "mlx_qwen3_1bit_g128", "llama_bitlinear_rope3")


@pytest.mark.parametrize("name", [*LOADED_ELSEWHERE, "qwen35_hub", "prism_schema1", "mamba2"])
def test_another_thread_computes_and_no_token_gives_no_logits(name: str) -> None:
    model = load_model(GOLDENS / name)
    with ThreadPoolExecutor(1) as executor:
        got = executor.submit(lambda: mx.eval(model(mx.array([[1, 2]]))[0])).result()
    assert got is None
    assert model(mx.zeros((1, 0), mx.int32))[0].shape == (1, 0, model.vocab_size)


def test_one_line_names_what_is_never_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a vision model in the file, or without a second head, the line does not speak of it."""
    folder = golden_checkpoint("qwen35_hub", tmp_path / "m")
    vision, prediction = "the vision model", "the prediction of several tokens at once"
    for rest, absent in (("model.visual", [prediction, vision]), ("mtp", [prediction]), ("-", [])):
        capsys.readouterr()
        load_model(folder)
        others = " and ".join(absent)
        line = f"[load] '{folder}' also holds {others}, which this library does not read.\n"
        assert capsys.readouterr().err == (line if absent else "")
        names = mx.load(str(weights(folder)))
        edit_tensors(weights(folder), **{name: None for name in names if name.startswith(rest)})


@pytest.mark.parametrize("name", ["bitnet_packed", "embedding_bitnet_qwen3"])
def test_another_dtype_is_converted(tmp_path: Path, name: str) -> None:
    report = convert(
        open_checkpoint(str(GOLDENS / name)), tmp_path / "m", formats=FloatFormats(mx.float32)
    )
    assert report.logits_difference <= 1e-5


def test_a_configuration_without_weights_describes_a_model(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    described = described_checkpoint(find_source(alone))
    assert described is not None
    shapes = {name: entry.shape for name, entry in open_checkpoint(folder).tensors.items()}
    assert {name: entry.shape for name, entry in described.tensors.items()} == shapes
    assert described_checkpoint(find_source(folder)) is None
    (alone / "config.json").unlink()
    assert described_checkpoint(find_source(alone)) is None
