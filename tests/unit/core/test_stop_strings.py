from typing import Any

import pytest

from miles.core.stop_strings import tokens_to_stop


class Bytes:
    """A tokenizer of bytes: a character may be several tokens."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("before", "new", "count"),
    [
        ("say en", "d now", 1),
        ("say e", "nd", 2),
        # One that ends before the seam is of an earlier turn, one behind it the engine has seen.
        ("say end", " now", None),
        ("say end e", "nd", 2),
        ("say ", "end", None),
        ("say en", "", None),
        ("", "end", None),
        # The first of two.
        ("e", "nd, end", 2),
    ],
)
def test_a_stop_string_counts_where_it_begins_before_the_seam_and_ends_behind_it(
    before: str, new: str, count: int | None
) -> None:
    tokenizer: Any = Bytes()
    tokens = list(before.encode()), list(new.encode())
    assert tokens_to_stop(tokenizer, *tokens, ("fin", "end")) == count
    assert tokens_to_stop(tokenizer, *tokens, ()) is None


def test_a_character_that_the_seam_divides_is_part_of_the_stop_string() -> None:
    tokenizer: Any = Bytes()
    whole = list("say ende€ now".encode())
    for split in range(whole.index(ord("e")) + 1, len("say ende€".encode())):
        rest = len("say ende€".encode()) - split
        assert tokens_to_stop(tokenizer, whole[:split], whole[split:], ("ende€",)) == rest
    assert tokens_to_stop(tokenizer, whole[:9], whole[9:], ("€",)) == 2
