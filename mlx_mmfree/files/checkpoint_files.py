"""The names of the files in a checkpoint folder."""

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_WEIGHTS_FILE = "pytorch_model.bin"
TORCH_INDEX_FILE = "pytorch_model.bin.index.json"
WEIGHTS_PATTERN = "model*.safetensors"
"""The files that mlx-lm takes for weights, with or without an index."""

TORCH_WEIGHTS_PATTERN = "pytorch_model*.bin"
SCALES_FILE = "ternary_scales.safetensors"
PACKING_FILE = "hadamard_packing.json"
"""The description of float weights that were rotated, see `hub.checkpoint.formats.folded`."""

GGUF_SUFFIX = ".gguf"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")
TRANSLATION_FILES = ("source.spm", "target.spm", "vocab.json")
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Where transformers keeps chat templates that have names, each in a file `<name>.jinja`."""

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
SENTENCES_FILE = "sentence_bert_config.json"
"""With the two above, what sentence-transformers keeps beside a model that embeds texts."""

TOKENIZER_PATTERNS = (
    CONFIG_FILE,
    GENERATION_FILE,
    *VOCABULARY_FILES,
    *TRANSLATION_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
    f"{TEMPLATES_FOLDER}/[!.]*.jinja",
    MODULES_FILE,
    POOLING_FILE,
    PROMPTS_FILE,
    SENTENCES_FILE,
)
WEIGHT_PATTERNS = (WEIGHTS_FILE, "model-*-of-*.safetensors", INDEX_FILE, SCALES_FILE, PACKING_FILE)
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE, PEFT_ADAPTER_FILE = "adapters.safetensors", "adapter_model.safetensors"
ADAPTER_PATTERNS = (ADAPTER_CONFIG_FILE, ADAPTER_FILE)
"""The files of an adapter that lies beside the weights of its base model."""
TORCH_PATTERNS = (
    *TOKENIZER_PATTERNS,
    PACKING_FILE,
    TORCH_WEIGHTS_FILE,
    "pytorch_model-*-of-*.bin",
    TORCH_INDEX_FILE,
)
"""The files to fetch of a repository without safetensors."""
