"""Fine-tuning: what is trained, what is kept, exact resume."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_mmfree.errors import CheckpointError, TrainingError
from mlx_mmfree.hub import Tokenizer, load
from mlx_mmfree.hub.adapters.adapter import attach
from mlx_mmfree.hub.adapters.adapter_folder import read_adapter
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.lora import LoRALinear, add_adapters
from mlx_mmfree.layers.matrix import converted
from mlx_mmfree.models import Decoder, find
from mlx_mmfree.training.batches import SampleBatches, padded_batch
from mlx_mmfree.training.fine_tuning.data import read_data
from mlx_mmfree.training.fine_tuning.fine_tune import (
    adapt_layers,
    fine_tune,
    held_out_loss,
    prepare,
    trained_parameters,
    unfreeze_layers,
)
from mlx_mmfree.training.fine_tuning.settings import FineTuneSettings, fine_tune_settings
from mlx_mmfree.training.losses.loss import next_token_loss
from mlx_mmfree.training.optimizer import OPTIMIZERS
from mlx_mmfree.training.optimizer_step import checkpoint_blocks
from mlx_mmfree.training.results import Callback, read_log
from tests.tolerances import GRADIENT_TOLERANCE, TOLERANCE, relative_error

pytestmark = pytest.mark.usefixtures("without_curve")

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
SIZES = {
    "vocab_size": 518,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "hgrn": {"model_type": "hgrn_bit"},
    "hgrn_dense": {"model_type": "hgrn_bit", "linear_class": "dense"},
    "bitnet": {"model_type": "bitnet", "rope_theta": 500000.0, **HEADS, "head_dim": 16},
    "llama": {"model_type": "llama", **HEADS},
    "llama_ternary": {
        "model_type": "llama",
        **HEADS,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        },
    },
}
FLOAT32 = TOLERANCE[mx.float32]


def _build(name: str, packed: bool = True) -> Decoder:
    mx.random.seed(3)
    architecture = find(MODELS[name]["model_type"])
    config = SIZES | MODELS[name]
    model: Decoder = architecture.build(architecture.config.from_hub(config))
    mx.eval(model.parameters())
    if packed:
        pack_linears(model)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(GOLDENS / "tokenizer_bpe")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Questions of which each has one answer."""
    folder = tmp_path / "data"
    folder.mkdir()
    animals = ["cat", "dog", "hen", "fox", "owl", "bee", "elk", "ant", "yak"]
    for name, first, last in (("train", 0, 7), ("valid", 2, 4), ("test", 1, 3)):
        lines = [
            {"prompt": f"Who is number {n}?", "completion": f"The {animals[n]}."}
            for n in range(first, last)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def _settings(data: Path, **values: Any) -> FineTuneSettings:
    defaults: dict[str, Any] = {
        "data": str(data),
        "adapter_path": str(data.parent / "run"),
        "iters": 6,
        "batch_size": 2,
        "learning_rate": 1e-2,
        "rank": 4,
        "scale": 2.0,
        "steps_per_report": 1,
        "steps_per_eval": 3,
        "save_every": 2,
        "max_seq_length": 64,
        "mask_prompt": True,
    }
    return FineTuneSettings(**(defaults | values))


def _run(
    settings: FineTuneSettings,
    tokenizer: Tokenizer,
    name: str = "hgrn",
    callbacks: tuple[Callback, ...] = (),
) -> tuple[Decoder, dict[str, Any]]:
    model = _build(name, packed=settings.fine_tune_type != "full")
    samples = read_data(settings, tokenizer)
    prepare(model, settings)
    return model, fine_tune(model, tokenizer, samples, settings, callbacks=callbacks)


def _losses(settings: FineTuneSettings) -> list[float]:
    records = read_log(Path(settings.adapter_path) / "log.jsonl")
    return [r[key] for r in records for key in ("loss", "valid_loss") if key in r]


class _Killed(Exception):
    pass


class _Kill(Callback):
    """Ends a run right after a step."""

    def __init__(self, step: int):
        self._step = step

    def on_train(self, record: Any) -> None:
        if record["step"] == self._step:
            raise _Killed


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_killed_run_resumes_to_the_same_bits(data: Path, tokenizer: Tokenizer, kind: str) -> None:
    options: dict[str, Any] = {
        "fine_tune_type": kind,
        "optimizer": "adam",
        "dropout": 0.3,
        "grad_accumulation_steps": 2,
        "num_layers": 1,
    }
    whole = _settings(data, adapter_path=str(data.parent / "whole"), **options)
    want, _ = _run(whole, tokenizer)
    settings = _settings(data, **options)
    for step in (3, 5):
        with pytest.raises(_Killed):
            _run(settings, tokenizer, callbacks=(_Kill(step),))
    got, progress = _run(settings, tokenizer)
    assert progress["step"] == 6
    assert _losses(settings) == _losses(whole)
    wanted = dict(tree_flatten(want.parameters()))
    for name, value in tree_flatten(got.parameters()):
        assert mx.array_equal(value, wanted[name]), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"adam"}))
def test_every_optimizer_resumes(data: Path, tokenizer: Tokenizer, optimizer: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "fine_tune_type": "dora", "iters": 4}
    whole = _settings(data, adapter_path=str(data.parent / "whole"), **options)
    _run(whole, tokenizer)
    settings = _settings(data, **options)
    with pytest.raises(_Killed):
        _run(settings, tokenizer, callbacks=(_Kill(3),))
    _run(settings, tokenizer)
    assert _losses(settings) == _losses(whole)


def test_more_steps_go_on_from_the_last(data: Path, tokenizer: Tokenizer) -> None:
    whole = _settings(data, adapter_path=str(data.parent / "whole"), iters=8)
    _run(whole, tokenizer)
    _run(_settings(data, iters=4), tokenizer)
    _, progress = _run(_settings(data, iters=8), tokenizer)
    assert progress["step"] == 8
    train = [
        [r["loss"] for r in read_log(data.parent / run / "log.jsonl") if "loss" in r]
        for run in ("run", "whole")
    ]
    assert train[0] == train[1]


def test_other_data_or_settings_do_not_resume(data: Path, tokenizer: Tokenizer) -> None:
    _run(_settings(data, iters=2), tokenizer)
    with pytest.raises(TrainingError, match="other values of rank, seed"):
        _run(_settings(data, rank=2, seed=1), tokenizer)
    with pytest.raises(TrainingError, match="holds a run that began with other weights"):
        _run(_settings(data), tokenizer, "hgrn_dense")
    (data / "train.jsonl").write_text('{"prompt": "Who?", "completion": "Me."}')
    with pytest.raises(TrainingError, match="other values of samples"):
        _run(_settings(data), tokenizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "name"), [*(("lora", name) for name in MODELS), ("dora", "hgrn"), ("dora", "llama")]
)
def test_adapters_learn_and_the_base_stays(
    data: Path, tokenizer: Tokenizer, name: str, kind: str
) -> None:
    settings = _settings(data, fine_tune_type=kind, iters=12, steps_per_eval=6, save_every=12)
    base = dict(tree_flatten(_build(name).parameters()))
    model, progress = _run(settings, tokenizer, name)
    losses = _losses(settings)
    assert progress["best_loss"] < 0.7 * losses[0]
    plain = _build(name)
    for path, value in tree_flatten(attach(model, None).parameters()):
        assert mx.array_equal(value, base[path]), path
    samples = read_data(settings, tokenizer)
    attach(plain, read_adapter(settings.adapter_path))
    loss = held_out_loss(plain, samples["valid"], settings)
    assert loss == pytest.approx(progress["best_loss"], rel=1e-6)


def test_a_run_leaves_best_last_and_each_adapter(data: Path, tokenizer: Tokenizer) -> None:
    settings = _settings(data, iters=4)
    _, progress = _run(settings, tokenizer)
    folder = Path(settings.adapter_path)
    names = {file.name for file in folder.iterdir()}
    assert names == {
        "0000002_adapters.safetensors",
        "0000004_adapters.safetensors",
        "adapters.safetensors",
        "adapter_config.json",
        "last",
        "checkpoint",
        "log.jsonl",
    }
    assert json.loads((folder / "adapter_config.json").read_text())["step"] == progress["best_step"]
    assert json.loads((folder / "last/adapter_config.json").read_text())["step"] == 4
    again = _settings(
        data,
        adapter_path=str(data.parent / "again"),
        resume_adapter_file=str(folder / "adapters.safetensors"),
    )
    _run(again, tokenizer)
    assert _losses(again)[0] == pytest.approx(progress["best_loss"], rel=1e-6)


def test_an_adapter_to_begin_with_tells_how_it_was_made(data: Path, tokenizer: Tokenizer) -> None:
    options = {"fine_tune_type": "dora", "rank": 2, "scale": 0.5, "num_layers": 1}
    keys = ("q_proj", "lm_head")
    settings = _settings(data, iters=1, keys=keys, **options)
    _, progress = _run(settings, tokenizer, "llama_ternary")
    file = Path(settings.adapter_path) / "adapters.safetensors"
    given = {"data": str(data), "resume_adapter_file": str(file)}
    found = fine_tune_settings(given, "the flags")
    assert {name: getattr(found, name) for name in options} == options
    assert sorted(found.keys or ()) == ["lm_head", "self_attn.q_proj"]
    model = _build("llama_ternary")
    assert len(prepare(model, found)) == 2
    before = held_out_loss(model, read_data(settings, tokenizer)["valid"], settings)
    assert before == pytest.approx(progress["best_loss"], rel=1e-6)
    with pytest.raises(CheckpointError, match=r"'scale' must be 0.5, as for the .* but got 3"):
        prepare(_build("llama_ternary"), fine_tune_settings(given | {"scale": 3.0}, "the flags"))
    (file.parent / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"must have an adapter_config.json beside it"):
        fine_tune_settings(given, "the flags")


def test_an_adapter_of_other_layers_does_not_begin_a_run(data: Path, tokenizer: Tokenizer) -> None:
    settings = _settings(data, iters=1)
    _run(settings, tokenizer)
    file = str(Path(settings.adapter_path) / "adapters.safetensors")
    for change in ({"rank": 2}, {"num_layers": 1}, {"fine_tune_type": "dora"}):
        with pytest.raises(CheckpointError, match="must hold an adapter like the one"):
            prepare(_build("hgrn"), _settings(data, resume_adapter_file=file, **change))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["hgrn", "hgrn_dense", "bitnet", "llama_ternary"])
def test_full_tuning_changes_layers_alone_and_writes_a_model(
    data: Path, tokenizer: Tokenizer, name: str
) -> None:
    settings = _settings(data, fine_tune_type="full", num_layers=1, iters=3)
    before = dict(tree_flatten(_build(name, packed=False).parameters()))
    model, _ = _run(settings, tokenizer, name)
    for path, value in tree_flatten(model.parameters()):
        is_trained = path.startswith("blocks.1.")
        assert mx.array_equal(value, before[path]) is not is_trained, path
    tokens = mx.array([[5, 6, 7, 8]])
    want = pack_linears(model)(tokens)[0]
    loaded, _ = load(Path(settings.adapter_path) / "model")
    assert relative_error(loaded(tokens)[0], want) <= FLOAT32


def test_full_tuning_needs_float_weights(data: Path) -> None:
    with pytest.raises(TrainingError, match=r"must have float weights .* but is packed"):
        prepare(_build("hgrn"), _settings(data, fine_tune_type="full"))


def test_training_ends_when_nothing_gets_better(data: Path, tokenizer: Tokenizer) -> None:
    # too small a rate to change a bit of a loss
    settings = _settings(
        data, learning_rate=1e-30, optimizer="sgd", iters=40, steps_per_eval=2, patience=2
    )
    _, progress = _run(settings, tokenizer)
    assert progress["validations_since_best"] == 2
    assert progress["step"] == progress["best_step"] + 4 < 40
    _, again = _run(settings, tokenizer)
    assert again["step"] == progress["step"]


def test_without_validation_the_last_weights_are_kept(data: Path, tokenizer: Tokenizer) -> None:
    (data / "valid.jsonl").unlink()
    settings = _settings(data, iters=3)
    _run(settings, tokenizer)
    folder = Path(settings.adapter_path)
    weights = (folder / "adapters.safetensors").read_bytes()
    assert weights == (folder / "last/adapters.safetensors").read_bytes()


def test_layers_are_chosen_by_number_and_pattern() -> None:
    in_layer = ["attn.f_proj", "attn.g_proj", "attn.i_proj", "attn.o_proj"]
    in_layer += ["mlp.down_proj", "mlp.gate_proj"]
    assert adapt_layers(_build("hgrn"), num_layers=1) == [f"model.layers.1.{n}" for n in in_layer]
    assert len(adapt_layers(_build("hgrn"), num_layers=16)) == 12
    model = _build("hgrn")
    names = adapt_layers(model, keys=["attn.[if]_proj", "lm_head"], num_layers=1)
    assert names == ["lm_head", "model.layers.1.attn.f_proj", "model.layers.1.attn.i_proj"]
    assert isinstance(model.head, LoRALinear)
    names = adapt_layers(_build("hgrn"), keys=["model.embeddings", "model.layers.0.*"], kind="dora")
    assert names == ["model.embeddings", *(f"model.layers.0.{n}" for n in in_layer)]
    names = unfreeze_layers(_build("hgrn", packed=False), keys=["*norm", "model.lower_bounds"])
    assert {"lm_head.norm", "model.layers.0.attn.f_proj.norm", "model.lower_bounds"} < set(names)


@pytest.mark.parametrize("choose", [adapt_layers, unfreeze_layers])
def test_nothing_to_train_is_an_error(choose: Any) -> None:
    with pytest.raises(TrainingError, match=r"got 'attn\.x_proj'\. The model has .*lm_head"):
        choose(_build("hgrn", packed=False), keys=["attn.x_proj", "lm_head"])
    with pytest.raises(TrainingError, match="nothing would be trained"):
        choose(_build("hgrn", packed=False), keys=[])


def test_a_model_with_an_adapter_gets_no_second_one() -> None:
    model = _build("hgrn")
    adapt_layers(model, num_layers=1)
    with pytest.raises(TrainingError, match="'model' must have no adapter yet but has one"):
        adapt_layers(model, num_layers=1)


def test_parameters_are_counted_as_if_unpacked() -> None:
    model = _build("hgrn", packed=False)
    _, total = trained_parameters(model)
    packed = _build("hgrn")
    scales = sum(1 for module in packed.modules() if "scale" in module)
    assert trained_parameters(packed)[1] == total + scales
    adapt_layers(packed, rank=3, keys=["attn.i_proj"])
    assert trained_parameters(packed)[0] == 2 * 3 * (32 + 32)


def test_gradient_checkpoints_drop_the_same(data: Path, tokenizer: Tokenizer) -> None:
    gradients = []
    batch = padded_batch(read_data(_settings(data), tokenizer)["train"].samples)
    for is_checkpointed in (False, True):
        model = _build("hgrn")
        add_adapters(model, lambda name, _: "proj" in name, rank=4, dropout=0.5)
        for _, module in model.named_modules():
            if isinstance(module, LoRALinear):
                module.lora_b = mx.ones(module.lora_b.shape) * 0.1
        model.train()
        if is_checkpointed:
            checkpoint_blocks(model)
        mx.random.seed(11)
        loss, gradient = nn.value_and_grad(model, next_token_loss)(model, batch)
        gradients.append(dict(tree_flatten(gradient)) | {"loss": loss})
    for name, want in gradients[0].items():
        assert relative_error(gradients[1][name], want) <= GRADIENT_TOLERANCE, name


def test_accumulation_equals_the_larger_batch(data: Path, tokenizer: Tokenizer) -> None:
    samples = read_data(_settings(data), tokenizer)["train"].samples
    model = _build("hgrn_dense")
    adapt_layers(model, scale=2.0)
    value_and_grad = nn.value_and_grad(model, next_token_loss)
    want_loss, want = value_and_grad(model, padded_batch(samples[:4]))
    parts = [value_and_grad(model, padded_batch(samples[n : n + 2])) for n in (0, 2)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(want_loss.item(), rel=1e-5)
    got = [dict(tree_flatten(gradient)) for _, gradient in parts]
    for name, gradient in tree_flatten(want):
        assert relative_error(got[0][name] + got[1][name], gradient) <= GRADIENT_TOLERANCE, name


# Codes of ternary layers may fall to the other side of a rounding boundary with the shape of a batch;
# tests/models/test_sample_starts.py has those.
@pytest.mark.parametrize("name", ["hgrn_dense", "llama"])
def test_packed_samples_do_not_see_each_other(data: Path, tokenizer: Tokenizer, name: str) -> None:
    samples = read_data(_settings(data), tokenizer)["train"].samples
    batch = SampleBatches(samples, 2, 0, packed_length=160).batch(0)
    assert batch.starts is not None and batch.starts.sum() >= 3
    model = _adapted(name)
    value_and_grad = nn.value_and_grad(model, next_token_loss)
    loss, got = value_and_grad(model, batch)
    alone = [value_and_grad(model, padded_batch([sample])) for sample in samples]
    assert batch.tokens == sum(padded_batch([sample]).tokens for sample in samples)
    assert loss.item() == pytest.approx(sum(part.item() for part, _ in alone), rel=1e-5)
    gradients = [dict(tree_flatten(gradient)) for _, gradient in alone]
    for path, gradient in tree_flatten(got):
        want = sum(part[path] for part in gradients)
        assert relative_error(gradient, want) <= GRADIENT_TOLERANCE, path


def _adapted(name: str, packed: bool = True) -> Decoder:
    """Adapters that change something, on all linears, embedding and head."""
    model = _build(name, packed)
    adapt_layers(model, keys=["*"], rank=4, scale=2.0)
    for _, module in model.named_modules():
        if "lora_b" in module:
            module.lora_b = 0.05 * mx.random.normal(module.lora_b.shape)
    return model


@pytest.mark.parametrize("name", ["hgrn", "bitnet", "llama_ternary"])
def test_gradients_through_packed_layers_are_those_through_masters(
    data: Path, tokenizer: Tokenizer, name: str
) -> None:
    batch = padded_batch(read_data(_settings(data), tokenizer)["train"].samples)
    results = []
    for packed in (True, False):
        model = _adapted(name, packed)
        loss, gradient = nn.value_and_grad(model, next_token_loss)(model, batch)
        results.append(dict(tree_flatten(gradient)) | {"loss": loss})
    assert results[0].keys() == results[1].keys()
    for path, want in results[1].items():
        assert relative_error(results[0][path], want) <= GRADIENT_TOLERANCE, path


@pytest.mark.parametrize("name", ["hgrn_dense", "llama"])
def test_gradients_of_adapters_are_those_of_the_merged_weights(
    data: Path, tokenizer: Tokenizer, name: str
) -> None:
    batch = padded_batch(read_data(_settings(data), tokenizer)["train"].samples)
    model = _adapted(name)
    loss, got = nn.value_and_grad(model, next_token_loss)(model, batch)
    merged = _build(name)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoRALinear)}
    for path, module in merged.named_modules():
        if path in layers:
            module.weight = module.weight + 2.0 * (layers[path].lora_a @ layers[path].lora_b).T
    merged.embed.weight = model.embed(mx.arange(518))
    want_loss, want = nn.value_and_grad(merged, next_token_loss)(merged, batch)
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-5)
    got, want = dict(tree_flatten(got)), dict(tree_flatten(want))
    for path, layer in layers.items():
        of_weight = 2.0 * want[f"{path}.weight"].T
        of_a, of_b = of_weight @ layer.lora_b.T, layer.lora_a.T @ of_weight
        assert relative_error(got[f"{path}.lora_a"], of_a) <= GRADIENT_TOLERANCE, path
        assert relative_error(got[f"{path}.lora_b"], of_b) <= GRADIENT_TOLERANCE, path
    of_b = 2.0 * model.embed.lora_a.T @ want["embed.weight"]
    assert relative_error(got["embed.lora_b"], of_b) <= GRADIENT_TOLERANCE


def test_packing_trains_with_checkpoints(data: Path, tokenizer: Tokenizer) -> None:
    losses = []
    for checkpoint in (False, True):
        settings = _settings(
            data,
            adapter_path=str(data.parent / f"run{checkpoint}"),
            pack=True,
            max_seq_length=97,
            grad_checkpoint=checkpoint,
            iters=3,
        )
        _run(settings, tokenizer, "hgrn_dense")
        losses.append(_losses(settings))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_bfloat16_base_trains(data: Path, tokenizer: Tokenizer, kind: str) -> None:
    settings = _settings(data, fine_tune_type=kind, iters=12, steps_per_eval=6)
    model = _build("hgrn", packed=kind == "lora")
    converted(model, mx.bfloat16)
    prepare(model, settings)
    progress = fine_tune(model, tokenizer, read_data(settings, tokenizer), settings)
    assert progress["best_loss"] < 0.8 * _losses(settings)[0]
    kinds = {value.dtype for _, value in tree_flatten(model.trainable_parameters())}
    # adapters and master weights
    assert kinds == {mx.float32}


def test_loss_that_is_not_finite_stops(data: Path, tokenizer: Tokenizer) -> None:
    settings = _settings(data, learning_rate=1e30, optimizer="sgd", iters=5, save_every=1)
    with pytest.raises(TrainingError, match=r"loss is .* the state of step 1 is kept in"):
        _run(settings, tokenizer)
    saved = mx.load(str(Path(settings.adapter_path) / "adapters.safetensors"))
    assert all(mx.isfinite(value).all().item() for value in saved.values())
