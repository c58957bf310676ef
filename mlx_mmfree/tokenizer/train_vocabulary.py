"""Trains a byte-level BPE vocabulary and writes it as a `tokenizer.json`."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _BPETokenizer

from ..files.replacing import new_file
from .from_gguf import LLAMA3_PATTERN


def train_vocabulary(
    documents: Iterable[str],
    vocab_size: int,
    folder: Path,
    *,
    end_of_text: str = "<|endoftext|>",
    mask_token: str | None = None,
) -> None:
    """Trains a byte-level BPE vocabulary (Sennrich et al., arXiv 1508.07909).

    Texts are split before merging as for Llama 3, which llama.cpp knows by name. Writes
    `tokenizer.json` and `tokenizer_config.json` into `folder`.

    Args:
        documents: The texts to learn merges from.
        vocab_size: The number of tokens, including the 256 bytes and the special ones. Fewer are made
            if the texts have no more pairs to merge.
        folder: The folder for the files, which is made if needed.
        end_of_text: The special token between documents. Its id is 0.
        mask_token: A special token that stands for one that is left out, together with the space before
            it; `None`: there is none. Its id is 1.
    """
    tokenizer = _BPETokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special: list[str | AddedToken] = [end_of_text]
    config = {"eos_token": end_of_text, "clean_up_tokenization_spaces": False}
    if mask_token is not None:
        special.append(AddedToken(mask_token, lstrip=True, special=True))
        config["mask_token"] = mask_token
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    with new_file(folder / "tokenizer.json") as file:
        tokenizer.save(str(file))
    with new_file(folder / "tokenizer_config.json") as file:
        file.write_text(json.dumps(config, indent=2) + "\n")
