"""The published shapes of the table of models, by repository."""

CONTEXT = 2048
SHAPES = {
    "ridger/MMfreeLM-370M": "mmfreelm-370m",
    "ridger/MMfreeLM-1.3B": "mmfreelm-1.3b",
    "ridger/MMfreeLM-2.7B": "mmfreelm-2.7b",
    "microsoft/bitnet-b1.58-2B-4T": "bitnet-2b-4t",
    "prism-ml/Ternary-Bonsai-1.7B-mlx-2bit": "ternary-bonsai-1.7b",
    "prism-ml/Ternary-Bonsai-4B-mlx-2bit": "ternary-bonsai-4b",
    "prism-ml/Ternary-Bonsai-8B-mlx-2bit": "ternary-bonsai-8b",
    "prism-ml/Ternary-Bonsai-27B-mlx-2bit": "ternary-bonsai-27b",
    # the same shape, whose weights are rotated
    "prism-ml/Ternary-Bonsai-2-27B-mlx-2bit": "ternary-bonsai-27b",
    "prism-ml/Ternary-Bonsai-2-27B-gguf": "ternary-bonsai-27b",
    "prism-ml/Ternary-Bonsai-2-27B-gguf-dev": "ternary-bonsai-27b",
    "tiiuae/Falcon-E-3B-Instruct": "falcon-e-3b",
    "tiiuae/Falcon3-1B-Instruct-1.58bit": "falcon3-1b",
    "tiiuae/Falcon3-7B-Instruct-1.58bit": "falcon3-7b",
    "tiiuae/Falcon3-10B-Instruct-1.58bit": "falcon3-10b",
}
GROUPS = {"prism-ml/Ternary-Bonsai-2-27B-gguf-dev": 64}
"""The inputs that share a scale, where a repository's files have others than its shape says."""
