"""Stop strings: the result depends on the text, not on how it was split into pieces."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from neuron_runtime.text.stop_strings import StopStrings

letters = st.text("abc", max_size=30)
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=10)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def shown(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    watch = StopStrings(stops, include)
    text = "".join(watch.feed(piece) for piece in pieces)
    return text + ("" if watch.stopped else watch.flush()), watch.stopped


def expected(stops: list[str], text: str, include: bool, border: int = 0) -> tuple[str, str | None]:
    """The definition: read character by character until the text ends with a stop string; the longest wins."""
    for end in range(border + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@given(text=letters, stops=stop_lists, sizes=cuts, include=st.booleans())
@example(text="aab", stops=["ab", "aab"], sizes=[1], include=False)
@example(text="abcab", stops=["bc", "abca"], sizes=[5], include=False)
def test_the_answer_ends_at_the_first_stop_string_for_any_split(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    pieces, at, turn = [], 0, 0
    while at < len(text):
        pieces.append(text[at : at + sizes[turn % len(sizes)]])
        at, turn = at + sizes[turn % len(sizes)], turn + 1
    assert shown(stops, pieces, include) == expected(stops, text, include)


@given(text=letters, stops=stop_lists, border=st.integers(0, 30), include=st.booleans())
@example(text="aab", stops=["ab"], border=2, include=False)
@example(text="abc", stops=["a", "abc"], border=1, include=False)
def test_a_stop_string_must_end_after_the_border_but_may_begin_before_it(
    text: str, stops: list[str], border: int, include: bool
) -> None:
    watch = StopStrings(stops, include)
    out = "".join(watch.feed(letter, may_stop=at >= border) for at, letter in enumerate(text))
    found = out + ("" if watch.stopped else watch.flush()), watch.stopped
    assert found == expected(stops, text, include, border)


@given(text=letters, stops=stop_lists)
def test_only_text_that_may_start_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    out = watch.feed(text)
    if watch.stopped is None:
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings().feed("abc") == "abc"


def test_no_text_follows_the_stop_string() -> None:
    watch = StopStrings(["\n\n"])
    assert watch.feed("one\n") == "one"
    assert watch.feed("\ntwo") == ""
    assert (watch.feed("three"), watch.flush(), watch.stopped) == ("", "", "\n\n")
