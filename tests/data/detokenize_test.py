"""Text that comes token by token: the same as at once, never half a character."""

from hypothesis import given
from hypothesis import strategies as st

from k3jax.data.detokenize import Detokenizer
from k3jax.data.stop_strings import StopStrings
from tests.vocabulary import small_tokenizer

TOKENIZER = small_tokenizer()


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_pieces_together_are_the_text_of_all_ids(ids):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(token_id) for token_id in ids] + [detokenizer.flush()]
    assert ''.join(pieces) == TOKENIZER.decode(ids)


def test_half_a_character_waits():
    detokenizer = Detokenizer(TOKENIZER)
    first, second, third, fourth = '🚀'.encode()
    assert [detokenizer.feed(byte) for byte in (first, second, third)] == ['', '', '']
    assert detokenizer.feed(fourth) == '🚀'
    assert detokenizer.feed(first) == ''
    assert detokenizer.feed(ord('a')) == '\ufffda'
    assert detokenizer.feed(first) == ''
    assert detokenizer.flush() == '\ufffd'
    assert detokenizer.flush() == ''


@given(
    st.text('abc', max_size=12),
    st.lists(st.text('abc', min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_stop_strings_do_not_depend_on_where_the_text_is_cut(text, stops, cuts):
    def passed(pieces):
        finder = StopStrings(stops)
        return ''.join(map(finder.feed, pieces)) + finder.flush(), finder.stopped

    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    expected = passed([text])
    assert passed(pieces) == expected == passed(list(text))
    assert text.startswith(expected[0])
    assert not any(stop in expected[0] for stop in stops)
    assert expected[1] == any(stop in text for stop in stops)


def test_a_stop_string_is_never_begun():
    finder = StopStrings(['END'])
    assert [finder.feed(piece) for piece in ('one E', 'N', 'two EN', 'D three', 'x')] == [
        'one ',
        '',
        'ENtwo ',
        '',
        '',
    ]
    assert finder.stopped and finder.flush() == ''
