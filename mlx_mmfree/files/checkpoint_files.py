"""What the files of a checkpoint folder are called."""

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SCALES_FILE = "ternary_scales.safetensors"
GGUF_SUFFIX = ".gguf"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")

TOKENIZER_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
WEIGHT_PATTERNS = (
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "ternary_scales.safetensors",
)
TORCH_PATTERNS = (
    *TOKENIZER_PATTERNS,
    "pytorch_model.bin",
    "pytorch_model-*-of-*.bin",
    "pytorch_model.bin.index.json",
)
"""For a repository without safetensors."""
