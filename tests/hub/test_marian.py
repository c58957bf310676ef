"""Marian beside transformers: the same tokens, by greedy and by beam search."""

import itertools
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.generation.translation import BeamSettings, translate_tokens
from mlx_mmfree.hub import load_model
from mlx_mmfree.tokenizer.translation_tokenizer import TranslationTokenizer
from tests.hub.marian_folder import SENTENCES, marian_folder

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import MarianTokenizer

    folder = marian_folder(tmp_path / "model")
    ours, theirs = TranslationTokenizer(folder), MarianTokenizer.from_pretrained(folder)
    for text in (*SENTENCES, ">>fra<<the cat", "Ω and a dog", "", "  two  spaces "):
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids
        want = theirs.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)
        assert ours.decode(ids) == want


@pytest.mark.parametrize("seed", range(4))
def test_searches_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(seed)
    size, pad = 37, 36
    config = MarianConfig(
        vocab_size=size,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=20,
        pad_token_id=pad,
        eos_token_id=0,
        decoder_start_token_id=pad,
        forced_eos_token_id=0,
        scale_embedding=True,
        init_std=0.5,
        max_position_embeddings=64,
    )
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        model.final_logits_bias += torch.randn(1, size)
        model.final_logits_bias[0, 0] += 2
    model.save_pretrained(tmp_path)
    own = load_model(tmp_path, dtype=mx.float32)
    lengths, longest = (7, 4, 6, 1), 20
    rows = [[*torch.randint(1, pad, (length - 1,)).tolist(), 0] for length in lengths]
    source = torch.tensor([[*row, *[pad] * (max(lengths) - len(row))] for row in rows])
    for beams, penalty in itertools.product((1, 2, 4), (0.0, 0.6, 1.0, 2.0)):
        written = model.generate(
            source,
            attention_mask=(source != pad).long(),
            num_beams=beams,
            length_penalty=penalty,
            max_length=longest + 1,
            do_sample=False,
            bad_words_ids=[[pad]],
        )
        want = [row[1:] for row in written.tolist()]
        want = [row[: row.index(0)] for row in want]
        search = BeamSettings(beams, penalty, longest, pad, 0, (pad,))
        assert translate_tokens(own, rows, search) == want  # type: ignore[arg-type]
