"""Reformer beside Transformers, which is given the same directions of the hash."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mmfree.cli import main
from mlx_mmfree.generation import generate_tokens
from mlx_mmfree.hub import load_model, open_checkpoint, save_model
from mlx_mmfree.models import find
from tests.hub.checkpoints import GOLDENS, edit_tensors
from tests.tolerances import TOLERANCE, relative_error

KINDS: dict[str, dict[str, Any]] = {
    "both": {},
    "hashed": {"attn_layers": ["lsh", "lsh"], "num_hashes": 2, "num_buckets": 4},
    "local": {"attn_layers": ["local"]},
    "rows": {"axial_pos_embds": False, "max_position_embeddings": 64, "hidden_act": "gelu_new"},
}


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_any_length(tmp_path: Path, kind: str) -> None:
    import torch

    from tests.goldens.make_reformer import SIZES, build, directions, logits_of

    theirs = build(4, KINDS[kind])
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=mx.float32)
    theirs = theirs.double()
    for length in (1, 3, 7, 8, 13, 40, 45):
        tokens = np.random.default_rng(length).integers(0, 40, (2, length))
        with torch.no_grad(), directions(SIZES["hash_seed"]):
            want, _ = logits_of(theirs, torch.tensor(tokens), use_cache=False)
        error = relative_error(ours(mx.array(tokens))[0], mx.array(want.numpy()))
        assert error <= TOLERANCE[mx.float32], length


@pytest.mark.interop
@pytest.mark.filterwarnings("default")
def test_a_prompt_of_a_chunk_is_continued_far_beyond(tmp_path: Path) -> None:
    """Of a longer prompt, Transformers reads the last token with the others, and here it is a step."""
    import torch

    from tests.goldens.make_reformer import SIZES, build, directions

    theirs = build(1, {})
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=mx.float32)
    prompt = [3, 9, 17, 4, 22]
    with torch.no_grad(), directions(SIZES["hash_seed"]):
        written = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
        )
    assert list(generate_tokens(ours, prompt, max_tokens=40)) == written[0, 5:].tolist()


def test_it_is_written_as_it_was(tmp_path: Path) -> None:
    source = GOLDENS / "hf_reformer"
    model = load_model(source)
    save_model(tmp_path / "m", model)
    written, published = open_checkpoint(tmp_path / "m"), open_checkpoint(source)
    # which of the two names of the bias every version of transformers reads
    newer = {"lm_head.bias": "lm_head.decoder.bias"}
    assert {name: each.shape for name, each in written.tensors.items()} == {
        newer.get(name, name): each.shape for name, each in published.tensors.items()
    }
    tokens = mx.arange(30)[None]
    assert mx.array_equal(load_model(tmp_path / "m")(tokens)[0], model(tokens)[0])


def test_constants_of_older_versions_are_left_out(tmp_path: Path) -> None:
    source = GOLDENS / "hf_reformer"
    model = load_model(source)
    save_model(tmp_path / "m", model)
    inside = "reformer.encoder.layers.1.attention.self_attention"
    constants = {f"{inside}.self_mask_value_float32": mx.array(-1e5)}
    constants |= {f"{inside}.mask_value_float16": mx.array(-1e4)}
    edit_tensors(tmp_path / "m" / "model.safetensors", **constants)
    tokens = mx.arange(30)[None]
    assert mx.array_equal(load_model(tmp_path / "m")(tokens)[0], model(tokens)[0])


def test_it_is_generated_with_and_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture = find("reformer")
    mx.random.seed(0)
    keys = {"vocab_size": 518, "initializer_range": 0.3}
    model = architecture.build(architecture.config.from_hub({**architecture.tiny, **keys}))
    save_model(tmp_path / "m", model, GOLDENS / "tokenizer_bpe")
    for folder in ("m", "converted"):
        flags = ["-p", "The dog", "-m", "30", "--temp", "0"]
        if folder == "converted":
            target = ["--mlx-path", str(tmp_path / folder)]
            assert main(["convert", "--model", str(tmp_path / "m"), *target]) == 0
            assert "no: it has no such architecture" in capsys.readouterr().out
        assert main(["generate", "--model", str(tmp_path / folder), *flags]) == 0
    assert capsys.readouterr().out.strip()
