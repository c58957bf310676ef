"""A tiny model that embeds texts, with a tokenizer that ends each text with a token of its own."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mmfree.hub import Tokenizer, save_model
from mlx_mmfree.models import find

BPE = Path(__file__).parents[1] / "data" / "goldens" / "tokenizer_bpe"
PROMPTS = {"query": "Find what answers: ", "document": ""}


def embedder_folder(
    folder: Path,
    *,
    pooling: str | None = None,
    default_prompt: str | None = None,
    max_length: int | None = None,
    model_type: str = "qwen3",
    **values: Any,
) -> Path:
    """Writes a model with masters, and what sentence-transformers keeps beside it.

    Args:
        folder: Gets the files.
        pooling: The end of the key of its pooling; `None` leaves the files of modules out.
        default_prompt: The name of the prompt of every text.
        max_length: The most tokens of a text.
        model_type: Its architecture.
        values: Further keys of `config.json`.
    """
    architecture = find(model_type)
    given = {
        **architecture.tiny,
        "architectures": [architecture.config.embedder_class],
        "vocab_size": Tokenizer.from_folder(BPE).vocab_size,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
            "use_rms_norm": True,
        },
        **values,
    }
    mx.random.seed(11)
    model = architecture.build(architecture.config.from_hub(given))
    save_model(folder, model, BPE)
    # the last token is the one after each text
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_eos_token": True}))
    if pooling is not None:
        kinds = ("Transformer", "Pooling", "Normalize")
        steps = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (folder / "modules.json").write_text(json.dumps(steps))
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens")}
        modes[f"pooling_mode_{pooling}"] = True
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    prompts = {"prompts": PROMPTS, "default_prompt_name": default_prompt}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    if max_length is not None:
        longest = {"max_seq_length": max_length}
        (folder / "sentence_bert_config.json").write_text(json.dumps(longest))
    return folder
