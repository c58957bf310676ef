"""A whole encoder-decoder, as transformers computes it, from a checkpoint in its names."""

import json
from pathlib import Path

import mlx.core as mx

from mlx_mmfree.hub import load_model
from mlx_mmfree.models.marian import Marian
from tests.goldens.mixers.files import GoldenFile, assert_close, golden


def _load(file: GoldenFile, folder: Path) -> Marian:
    hyper = file.hyper
    config = {
        "model_type": "marian",
        "vocab_size": hyper["vocab"],
        "d_model": hyper["d_model"],
        "activation_function": hyper["activation"],
        "scale_embedding": hyper["scale_embedding"] == "sqrt(d_model)",
        "pad_token_id": hyper["pad_id"],
        "decoder_start_token_id": hyper["pad_id"],
    }
    sizes = {"layers": "layers", "attention_heads": "heads", "ffn_dim": "ffn"}
    for side in ("encoder", "decoder"):
        config |= {f"{side}_{ours}": hyper[theirs] for ours, theirs in sizes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), file.weights)
    model: Marian = load_model(folder)  # type: ignore[assignment]
    return model


@golden("transformer__encdec_marian_full")
def test_marian(file: GoldenFile, tmp_path: Path) -> None:
    model, tokens = _load(file, tmp_path), file.inputs["decoder_input_ids"]
    source, valid = file.inputs["input_ids"], file.inputs["attention_mask"].astype(mx.bool_)
    memory = model.encode(source, valid)
    # the source attends to what is real; what it computes at padding is never looked at
    seen = valid[..., None]
    assert_close(mx.where(seen, memory, 0.0), mx.where(seen, file.out["encoder_last"], 0.0))
    logits, _ = model(source, tokens, source_valid=valid)
    assert_close(logits, file.out["logits"])
    state, parts = None, []
    for n in range(tokens.shape[1]):
        part, state = model.decode(tokens[:, n : n + 1], memory, state, memory_valid=valid)
        parts.append(part)
    assert_close(mx.concatenate(parts, axis=1), file.out["logits"])
