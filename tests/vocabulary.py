"""The released vocabulary, where it lies beside the repository, and a small one like it."""

import functools
import pathlib
import tempfile

import pytest

from k3jax.data.special_tokens import K2_SLOTS
from k3jax.data.tokenizer import Tokenizer, load_tokenizer

DATA = pathlib.Path(__file__).parents[1] / '../shared/data'
VOCABULARY = DATA / 'tiktoken.model'


@functools.cache
def _released() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / 'tiktoken.model').write_bytes(VOCABULARY.read_bytes())
        return load_tokenizer(folder)


def released_tokenizer() -> Tokenizer:
    """K3's; the test that asks for it is skipped where it is missing."""
    if not VOCABULARY.exists():
        pytest.skip(f'needs the released vocabulary at {VOCABULARY}')
    return _released()


@functools.cache
def small_tokenizer() -> Tokenizer:
    """All bytes, and merges that cut markers, words of the format and characters anywhere."""
    texts = ['<|cl', 'ose|>', '<|op', 'en|>', '<|s', 'ep|>', 'of_msg|>', 'think', 'to', 'ol', 'ls']
    texts += ['="', '", "', 'é', '中', 'a"', ' k', 'ey', '\\n', '": ', 'call', 'arg', '{"']
    tokens = [text.encode() for text in texts] + ['中'.encode()[1:], b'a\xf0\x9f', b'\x9a\x80b']
    # Byte-pair merges need every beginning of a token.
    merges = dict.fromkeys(t[:n] for t in tokens for n in range(2, len(t) + 1))
    return Tokenizer({t: i for i, t in enumerate([*(bytes([b]) for b in range(256)), *merges])})


@functools.cache
def k2_tokenizer() -> Tokenizer:
    """All bytes, and the special tokens of the models before K3."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return Tokenizer(ranks, {256 + slot: text for slot, text in K2_SLOTS.items()})
