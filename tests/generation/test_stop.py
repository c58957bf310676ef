"""Generation ends at stop strings and end tokens."""

import random
import shutil
from pathlib import Path

import pytest

from mlx_mmfree.generation.answers.completion import end_tokens
from mlx_mmfree.generation.answers.stop_strings import StopStrings
from mlx_mmfree.hub import Tokenizer

SPM = Path(__file__).parents[1] / "data" / "goldens" / "tokenizer_spm"


def shown(stop: StopStrings, chunks: list[str]) -> str:
    text = ""
    for chunk in chunks:
        text += stop.add(chunk)
        if stop.is_met:
            return text
    return text + stop.finalize()


def test_a_stop_string_over_several_chunks_is_not_shown() -> None:
    stop = StopStrings(["\n\nUser:"])
    chunks = ["Hello.", "\n", "\nUs", "er", ": more"]
    assert [stop.add(chunk) for chunk in chunks] == ["Hello.", "", "", "", ""]
    assert stop.is_met


def test_a_partial_match_is_released_once_it_fails() -> None:
    stop = StopStrings(["END"])
    assert [stop.add(chunk) for chunk in ["a E", "N", "x", " E"]] == ["a ", "", "ENx", " "]
    assert not stop.is_met
    assert stop.finalize() == "E"
    assert stop.finalize() == ""


def test_text_after_a_stop_string_in_one_chunk_is_cut() -> None:
    assert shown(StopStrings(["."]), ["One. Two."]) == "One"


def test_a_failed_match_can_contain_a_prefix_of_the_next() -> None:
    assert shown(StopStrings(["aab"]), ["a", "a", "a", "b", "c"]) == "a"


def test_the_first_complete_string_wins() -> None:
    assert shown(StopStrings(["abcdef", "cd"]), ["xabcdef"]) == "xab"
    assert shown(StopStrings(["cd", "bcd"]), ["xabcdef"]) == "xa"


def test_no_strings_hold_nothing_back() -> None:
    assert StopStrings().add("text") == "text"


def test_one_string_is_not_taken_for_its_letters() -> None:
    assert shown(StopStrings("lo"), ["hello"]) == "hel"


def test_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="'stop' must not hold an empty string"):
        StopStrings(["a", ""])


def test_the_cut_of_the_text_does_not_matter() -> None:
    generator = random.Random(0)
    for _ in range(500):
        text = "".join(generator.choices("ab", k=12))
        strings = [
            "".join(generator.choices("ab", k=generator.randint(2, 5)))
            for _ in range(generator.randint(1, 3))
        ]
        chunks, rest = [], text
        while rest:
            size = generator.randint(1, 4)
            chunks.append(rest[:size])
            rest = rest[size:]
        found = [
            (end, end - len(string))
            for string in strings
            for end in range(len(text) + 1)
            if text[:end].endswith(string)
        ]
        expected = text[: min(found)[1]] if found else text
        assert shown(StopStrings(strings), chunks) == expected


def test_end_tokens_by_id_and_text(tokenizer: Tokenizer) -> None:
    assert end_tokens(tokenizer) == {517}
    assert end_tokens(tokenizer, [3, "513", "<|start_header_id|>"]) == {517, 3, 513, 515}


@pytest.mark.parametrize(
    ("token", "chunk"),
    [
        *[(".", "."), ("the", "▁the"), ("▁the", "▁the"), (" the", "▁the"), ("\n", "<0x0A>")],
        *[(name, name) for name in ("<0x0A>", "</s>", "<unk>", "<pad>")],
    ],
)
def test_end_tokens_of_sentencepiece_by_their_names(tmp_path: Path, token: str, chunk: str) -> None:
    """A token may be given by the name that the vocabulary has for it, as in mlx-lm."""
    shutil.copytree(SPM, tmp_path / "copy")
    (tmp_path / "copy" / "added_tokens.json").write_text('{"<pad>": 640}')
    tokenizer = Tokenizer.from_folder(tmp_path / "copy")
    [number] = end_tokens(tokenizer, [token]) - {2} or {2}
    assert tokenizer.id_to_piece(number) == chunk


def test_end_tokens_of_byte_level_vocabularies(tokenizer: Tokenizer) -> None:
    for token, chunk in (("\n", "Ċ"), ("Ċ", "Ċ"), (" the", "Ġthe"), ("Ġthe", "Ġthe"), (".", ".")):
        [number] = end_tokens(tokenizer, [token]) - {517}
        assert tokenizer.id_to_piece(number) == chunk


def test_end_token_must_be_one_token(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="'extra_eos_token' must be an id or one token"):
        end_tokens(tokenizer, ["<|nothing|>"])
