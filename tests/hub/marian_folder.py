"""A tiny Marian checkpoint with the tokenizers of two made-up languages."""

import io
import json
from pathlib import Path

import mlx.core as mx
import sentencepiece

from mlx_mmfree.hub import save_model
from mlx_mmfree.models import find

SENTENCES = ["the cat sat on a mat", "a dog ran", "the sun and the moon", "see the cat run"]
OTHERS = ["eht tac tas no a tam", "a god nar", "eht nus dna eht noom", "ees eht tac nur"]
FIRST = ["</s>", "<unk>", ">>fra<<", ">>deu<<"]


def marian_folder(folder: Path) -> Path:
    """Writes it; its weights are random, so that it translates into anything."""
    chunks: list[str] = []
    tokenizers = folder.with_name(f"{folder.name}-tokenizers")
    tokenizers.mkdir(parents=True)
    for name, sentences in (("source", SENTENCES), ("target", OTHERS)):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences * 5),
            model_writer=model,
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (tokenizers / f"{name}.spm").write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        chunks += [processor.id_to_piece(n) for n in range(3, processor.get_piece_size())]
    listed = [*FIRST, *dict.fromkeys(chunks), "<pad>"]
    (tokenizers / "vocab.json").write_text(json.dumps({chunk: n for n, chunk in enumerate(listed)}))
    marian, pad = find("marian"), len(listed) - 1
    tokens = {"vocab_size": len(listed), "pad_token_id": pad, "decoder_start_token_id": pad}
    config = marian.config.from_hub(
        marian.tiny | tokens | {"num_beams": 2, "max_position_embeddings": 24, "init_std": 0.5}
    )
    mx.random.seed(11)
    save_model(folder, marian.build(config), tokenizers)
    return folder
