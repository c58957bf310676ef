"""Wrong arguments of public functions raise errors that name them: misspelt names, other types."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_mmfree
from mlx_mmfree import (
    GQA,
    MLGRU,
    BitLinear,
    SwiGLU,
    batch_generate,
    demo,
    embed,
    embed_tokens,
    fuse,
    generate,
    load,
    load_plugin,
    load_tokenizer,
    lora,
    make_processors,
    make_sampler,
    save_model,
    stream_generate,
)
from mlx_mmfree.arguments import did_you_mean
from mlx_mmfree.errors import MMFreeError, TrainingError, UnsupportedModelError
from mlx_mmfree.hub import convert, open_checkpoint
from mlx_mmfree.layers import pack_linears
from mlx_mmfree.layers.lora import add_adapters
from mlx_mmfree.layers.mixer import TokenMixer
from mlx_mmfree.token_mixers import SlidingWindowAttention
from mlx_mmfree.training import FineTuneSettings, train_model

Loaded = tuple[Any, Any]
NAMES = [name for name in mlx_mmfree.__all__ if callable(getattr(mlx_mmfree, name))]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    model, tokenizer = load(demo.path())
    return model, tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_argument_is_named(name: str) -> None:
    function = getattr(mlx_mmfree, name)
    for argument in inspect.signature(function).parameters:
        with pytest.raises(TypeError) as error:
            function(**{f"{argument}_": 1})
        words = f"[{name}] the argument '{argument}_' is not known. Did you mean '{argument}'?"
        assert str(error.value) == words


def test_the_nearest_argument_of_settings_and_mixers_is_named() -> None:
    made: Any = FineTuneSettings
    for given, meant in (
        ({"iter": 2}, "iters"),
        ({"steps": 2}, "iters"),
        ({"lr": 1e-3}, "learning_rate"),
        ({"output": "a"}, "adapter_path"),
    ):
        with pytest.raises(TypeError, match=rf"\[FineTuneSettings\].* Did you mean '{meant}'\?"):
            made(data="data", **given)
    # its arguments are passed on to attention
    with pytest.raises(TypeError, match=r"Did you mean 'num_heads'\?"):
        SlidingWindowAttention(64, window=8, heads=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"\[make_sampler\].* Did you mean 'temp'\?"):
        make_sampler(temperature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'zzz' is not known\. Known are dims, num_heads"):
        GQA(64, zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: SwiGLU(64, 128),  # type: ignore[call-arg]
            r"\[SwiGLU\] only 'dims' may be given without a name but got 2 v",
        ),
        (lambda: BitLinear(64), r"\[BitLinear\] 'output_dims' must be given but is missing\."),  # type: ignore[call-arg]
        (MLGRU, r"\[MLGRU\] 'dims' must be given but is missing\."),
        (lambda: BitLinear(8, 8, bias="no"), "'bias' must be True or False but got 'no'"),  # type: ignore[arg-type]
        (lambda: BitLinear(8, 8, "no"), "'bias' must be True or False but got 'no'"),  # type: ignore[arg-type]
        (
            lambda: BitLinear(8, 8, quantize_activations="no"),  # type: ignore[arg-type]
            "'quantize_activations' must be True or False but got 'no'",
        ),
        (lambda: MLGRU(64, bias=1), r"\[MLGRU\] 'bias' must be True or False but got 1\."),  # type: ignore[arg-type]
    ],
)
def test_a_constructor_names_its_class_and_the_argument(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        make()


_OBJECT: Any = object()


def _calls(loaded: Loaded) -> dict[Any, dict[str, Any]]:
    """Sound arguments of each public function, of which one is then replaced by a wrong one."""
    model, tokenizer = loaded
    path = str(demo.path())
    text = {"model": model, "tokenizer": tokenizer, "max_tokens": 1}
    return {
        BitLinear: {"input_dims": 8, "output_dims": 8},
        FineTuneSettings: {"data": "data"},
        GQA: {"dims": 8, "num_heads": 2},
        MLGRU: {"dims": 8},
        SwiGLU: {"dims": 8},
        batch_generate: {**text, "prompts": ["a"]},
        embed: {"model": model, "tokenizer": tokenizer, "texts": ["a"]},
        embed_tokens: {"model": model, "tokens": mx.array([[1]])},
        fuse: {"model": model, "format": "dense"},
        generate: {**text, "prompt": "a"},
        load: {"path_or_repo": path},
        load_plugin: {"source": "os"},
        load_tokenizer: {"path_or_repo": path},
        lora: {
            "model": model,
            "processor": tokenizer,
            "settings": FineTuneSettings(data="data", teacher="teacher"),
            "teacher": model,
        },
        make_processors: {},
        make_sampler: {},
        mlx_mmfree.load_model: {"path_or_repo": path},
        save_model: {"path": "never", "model": model},
        stream_generate: {**text, "prompt": "a"},
        convert: {"source": open_checkpoint(demo.path()), "path": "never"},
        open_checkpoint: {"path_or_repo": path},
        pack_linears: {"model": model},
    }


def test_each_argument_of_another_type_is_named(loaded: Loaded) -> None:
    calls = _calls(loaded)
    assert {function.__name__ for function in calls} >= set(NAMES)
    for function, given in calls.items():
        for name in inspect.signature(function).parameters:
            with pytest.raises((TypeError, ValueError, MMFreeError)) as error:
                function(**{**given, name: _OBJECT})
            assert f"'{name}' must" in str(error.value), (function, name)


def test_the_arguments_of_a_call_of_a_mixer_are_named() -> None:
    x = mx.zeros((1, 4, 64))
    assert MLGRU(64)(x, lower_bound=mx.zeros(64))[0].shape == x.shape
    with pytest.raises(
        TypeError, match=r"\[MLGRU\] .*'foo' is not known\. Known are x, state, valid"
    ):
        MLGRU(64)(x, foo=1)
    with pytest.raises(TypeError, match=r"\[MLGRU\] .* Did you mean 'lower_bound'\?"):
        MLGRU(64)(x, lower_bond=1)
    for layer in (BitLinear(64, 4), BitLinear(64, 4).to_packed()):
        with pytest.raises(TypeError, match=rf"^{type(layer).__name__}\.__call__\(\) .*'foo'"):
            layer(x, foo=1)  # type: ignore[call-arg]


def test_a_mixer_may_define_its_run_alone() -> None:
    class Scaled(TokenMixer):
        def run(self, x: mx.array, state: Any, context: Any, *, by: float = 1.0, **_: Any) -> Any:
            return by * x, state

        def init_state(self, batch_size: int, dtype: mx.Dtype) -> tuple[()]:
            return ()

    y, _ = Scaled()(mx.ones((1, 2, 4)), by=3.0)
    assert mx.all(y == 3).item()
    with pytest.raises(
        TypeError, match=r"\[Scaled\] the argument 'zzz' is not known\. Known .*, by\."
    ):
        Scaled()(mx.ones((1, 2, 4)), zzz=3.0)


def test_signatures_stay_as_they_are_written() -> None:
    assert list(inspect.signature(make_sampler).parameters)[:2] == ["temp", "top_p"]
    assert list(inspect.signature(MLGRU).parameters)[:2] == ["dims", "hidden_dims"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temp": "hot"}, "'temp' must be a number but got 'hot'"),
        ({"temp": True}, "'temp' must be a number but got True"),
        ({"top_p": None}, "'top_p' must be a number but got None"),
        ({"top_k": 2.5}, r"'top_k' must be a whole number but got 2\.5"),
        ({"xtc_special_tokens": 5}, "'xtc_special_tokens' must be a list of ids but got 5"),
    ],
)
def test_numbers_of_samplers(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=rf"\[make_sampler\] {words}"):
        make_sampler(**given)


def test_numbers_of_processors() -> None:
    for given, words in (
        ({"repetition_penalty": "x"}, "'repetition_penalty' must be a number but got 'x'"),
        ({"logit_bias": [1]}, r"'logit_bias' must be a mapping .* but got \[1\]"),
    ):
        with pytest.raises(TypeError, match=rf"\[make_processors\] {words}"):
            make_processors(**given)


def test_numbers_of_settings(tmp_path: Path) -> None:
    made: Any = FineTuneSettings
    for given, words in (
        ({"iters": "2"}, "'iters' must be a whole number but got '2'"),
        ({"iters": 2.5}, r"'iters' must be a whole number but got 2\.5"),
        ({"mask_prompt": "yes"}, "'mask_prompt' must be true or false but got 'yes'"),
        ({"keys": "q_proj"}, "'keys' must be a list but got 'q_proj'"),
        ({"keys": [1]}, "'keys' must be a list of names but holds 1"),
        ({"data": 3}, "'data' must be text but got 3"),
    ):
        with pytest.raises(TrainingError, match=rf"\[lora\] {words}"):
            made(**{"data": "data", **given})
    settings = made(data=tmp_path, iters=2.0, keys=["q_proj"])
    assert (settings.data, settings.iters) == (str(tmp_path), 2)


@pytest.mark.parametrize("path", [None, 3, b"x"])
def test_paths(path: Any, loaded: Loaded) -> None:
    for call in (load, mlx_mmfree.load_model, load_tokenizer):
        with pytest.raises(TypeError, match=r"\[load\] 'path_or_repo' must be the text or path of"):
            call(path)
    with pytest.raises(TypeError, match=r"\[load_plugin\] 'source' must be the text or path of"):
        load_plugin(path)
    with pytest.raises(TypeError, match=r"\[save_model\] 'path' must be the text or path of"):
        save_model(path, loaded[0])
    if path is not None:
        with pytest.raises(TypeError, match=r"\[adapter\] 'adapter_path' must be the text or path"):
            load(demo.path(), adapter_path=path)


def test_a_model_in_another_place_is_named_in_one_line(loaded: Loaded) -> None:
    model: Any = loaded[0]
    kind = type(model).__name__
    for call, words in (
        (lambda: save_model(model, "m"), rf"the folder to make but got {kind}\.$"),
        (lambda: load(model), rf"a Hub repository but got {kind}\.$"),
        (lambda: generate(*loaded, model), rf"a list of ids but got {kind}\. Several"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_a_dtype_is_mlx_s_own() -> None:
    with pytest.raises(ValueError, match=r"must be mx\.float32, .* but got 'float16'"):
        load(demo.path(), dtype="float16")  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [generate, stream_generate, batch_generate, embed])
def test_models_and_tokenizers(function: Any, loaded: Loaded) -> None:
    model, tokenizer = loaded
    name = "embed" if function is embed else "generate"
    for first, second, words in (
        (tokenizer, model, r"Swap the two: \(model, tokenizer, \.\.\.\)"),
        (nn.Linear(4, 4), tokenizer, "'model' must be a loaded model but got Linear"),
        ("demo", tokenizer, r"'model' must be a loaded model but got the text 'demo'\. Load it"),
        (loaded, tokenizer, "'model' must be a loaded model but got tuple"),
        (model, "Once", "'tokenizer' must be the one that load gives .* but got 'Once'"),
        (model, None, "'tokenizer' must be the one that load gives .* but got NoneType"),
    ):
        with pytest.raises(TypeError, match=rf"\[{name}\] .*{words}"):
            function(first, second, ["Once"])


def test_models_of_other_functions(loaded: Loaded) -> None:
    model, tokenizer = loaded
    settings = FineTuneSettings(data="data")
    for call, words in (
        (lambda: fuse("o2", "ternary"), r"\[fuse\] 'model' must be a loaded model"),  # type: ignore[arg-type]
        (lambda: lora("demo", tokenizer, settings), r"\[lora\] 'model' must be a loaded model"),  # type: ignore[arg-type]
        (lambda: lora(model, None, settings), r"\[lora\] 'processor' must be the one"),
        (lambda: embed_tokens(model, [1]), r"\[embed_tokens\] 'tokens' must be an mx\.array"),  # type: ignore[arg-type]
        (
            lambda: embed_tokens(tokenizer, mx.array([[1]])),
            r"\[embed_tokens\] 'model' must be a loaded",
        ),
    ):
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize("prompt", [None, 5, ["Once"], [[1]], mx.array([[1]]), b"x", {}], ids=str)
def test_prompts(prompt: Any, loaded: Loaded) -> None:
    with pytest.raises(TypeError, match=r"'prompt' must be a text or a list of ids but got .*"):
        generate(*loaded, prompt)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"processors": make_sampler(temp=1)}, "'processors' must be a list, such as"),
        ({"stop": 5}, "'stop' must be a list of texts but got 5"),
        ({"stop": [1]}, "'stop' must hold texts but holds 1"),
        ({"seed": 1}, r"'seed' must be set before, by mx\.random\.seed\(\.\.\.\)"),
        ({"extra_eos_tokens": "x"}, r"must be a list of tokens .* Write \['x'\]"),
        ({"processors": "x"}, "'processors' must be a list, such as"),
        ({"stop": {"x": 1}}, "'stop' must be a list of texts but got {'x': 1}"),
        ({"draft_model": "demo"}, "'draft_model' must be a loaded model"),
        ({"num_draft_tokens": "x"}, "'num_draft_tokens' must be a whole number but got 'x'"),
        (
            {"prompt_progress_callback": 5},
            "'prompt_progress_callback' must be a function but got 5",
        ),
        ({"verbose": "no"}, "'verbose' must be True or False but got 'no'"),
        ({"max_tokens": True}, "'max_tokens' must be a whole number but got True"),
        ({"prefill_step_size": "a"}, "'prefill_step_size' must be a whole number"),
    ],
)
def test_options_of_generation(given: dict[str, Any], words: str, loaded: Loaded) -> None:
    with pytest.raises(TypeError, match=words):
        generate(*loaded, "Once", **given)


@pytest.mark.parametrize("made", [MLGRU, GQA, SwiGLU])
def test_a_layer_is_no_class_of_layers(made: Any) -> None:
    with pytest.raises(TypeError, match=r"made already\. Give its class: linear=BitLinear"):
        made(64, linear=BitLinear(4, 4))
    with pytest.raises(TypeError, match=r"made already"):
        made(
            64, linear={name: BitLinear(4, 4) for name in ("query_proj", "input_proj", "gate_proj")}
        )


def test_masks(loaded: Loaded) -> None:
    x = mx.ones((2, 5, 64))
    for call, caller in (
        (lambda **masks: MLGRU(64)(x, **masks), "MLGRU"),
        (lambda **masks: GQA(64)(x, **masks), "GQA"),
        (lambda **masks: loaded[0](mx.ones((2, 5), mx.int32), **masks), "Decoder"),
    ):
        for name in ("valid", "starts"):
            for mask, kind, words in (
                (mx.ones((2, 5)), TypeError, rf"float32\. Convert it: {name}\.astype\(mx\.bool_\)"),
                (mx.ones((2, 4), mx.bool_), ValueError, r"\(2, 5\), but got \(2, 4\)"),
                ([[True] * 5] * 2, TypeError, "must be an mx.array but got list"),
                (5, TypeError, "must be an mx.array but got int"),
            ):
                with pytest.raises(kind, match=rf"\[{caller}\] '{name}' .*{words}"):
                    call(**{name: mask})


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"norm_eps": "1e-6"}, TypeError, "'norm_eps' must be a number but got '1e-6'"),
        ({"norm_eps": True}, TypeError, "'norm_eps' must be a number but got True"),
        ({"rounding": "up"}, ValueError, "'rounding' must be one of 'half_even', 'half_away' but"),
    ],
)
def test_options_of_ternary_layers(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=rf"\[BitLinear\] {words}"):
        BitLinear(4, 4, **given)


@pytest.mark.parametrize("name", ["rope", "position_bias", "norms", "cache"])
def test_parts_of_attention(name: str) -> None:
    given: Any = {name: True}
    with pytest.raises(TypeError, match=rf"\[GQA\] '{name}' must be as \w+\(.*\).* but got True"):
        GQA(64, **given)


def test_a_conversion_begins_with_an_opened_checkpoint() -> None:
    with pytest.raises(TypeError, match=r"\[convert\] 'source' .* got 'demo'\. Open it: open_ch"):
        convert("demo", "converted")  # type: ignore[arg-type]
    opened = open_checkpoint(demo.path())
    for given, words in (
        ({"to": "MLX"}, "'to' must be one of 'mlx', 'hf', 'gguf' but got 'MLX'"),
        ({"trits_per_byte": 3}, "'trits_per_byte' must be one of 4, 5 but got 3"),
    ):
        with pytest.raises(ValueError, match=rf"\[convert\] {words}"):
            convert(opened, "converted", **given)


def test_a_model_with_an_adapter_is_not_saved_without_it(loaded: Loaded, tmp_path: Path) -> None:
    model, _ = load(demo.path())
    add_adapters(model, lambda name, _: name.endswith("down_proj"), rank=2)
    with pytest.raises(
        UnsupportedModelError, match=r"'model' must have no adapter on it but has one"
    ):
        save_model(tmp_path / "tuned", model, loaded[1])
    assert not list(tmp_path.iterdir())
    fuse(model, "ternary")
    save_model(tmp_path / "tuned", model, loaded[1])
    ids = mx.array([[1, 2, 3]])
    assert mx.array_equal(load(tmp_path / "tuned")[0](ids)[0], model(ids)[0])


def test_a_text_is_no_array_of_tokens(loaded: Loaded) -> None:
    for tokens in ("Once", None, 5):
        with pytest.raises(TypeError, match=r"\[Decoder\] 'tokens' must be an mx\.array but got "):
            loaded[0](tokens)


def test_settings_of_a_run_are_read_first() -> None:
    with pytest.raises(
        TypeError, match=r"'settings' must be Settings but got str\. Read them: read_s"
    ):
        train_model("run.yaml")  # type: ignore[arg-type]


def test_states_of_another_number_of_texts(loaded: Loaded) -> None:
    model, tokenizer = loaded
    words = "'state' must be of as many texts as this batch has, 1, but is of 2"
    one, two = mx.ones((1, 1, 64)), mx.ones((2, 1, 64))
    for mixer in (MLGRU(64), GQA(64)):
        with pytest.raises(ValueError, match=rf"\[{type(mixer).__name__}\] {words}"):
            mixer(one, mixer(two)[1])
    _, state = model(mx.array([[1], [2]]))
    for call in (
        lambda: model(mx.array([[1]]), state),
        lambda: generate(model, tokenizer, "Once", state=state),
    ):
        with pytest.raises(ValueError, match=rf"\[Decoder\] {words}"):
            call()


def test_lora_without_validation_has_no_best_loss(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "The frog hopped."}\n')
    settings = FineTuneSettings(data="a.jsonl", iters=1, batch_size=1, num_layers=1)
    assert lora(load(demo.path())[0], loaded[1], settings).keys() == {"step", "tokens"}


def test_a_misspelt_name_of_the_package_is_answered_by_python() -> None:
    with pytest.raises(AttributeError) as error:
        _ = mlx_mmfree.BitLinaer
    assert (error.value.name, error.value.obj) == ("BitLinaer", mlx_mmfree)


def test_the_nearest_word() -> None:
    assert did_you_mean("BITNET", ["bitnet-2b-4t", "x"]) == " Did you mean 'bitnet-2b-4t'?"
    assert did_you_mean("falcon", ["x"]) == ""
