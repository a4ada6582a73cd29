"""How tokens that come one by one become text that never holds half a character."""

from __future__ import annotations

import codecs

from k3jax.data.tokenizer import Tokenizer


class Detokenizer:
    """Text as it becomes certain; all of it together is `Tokenizer.decode` of all ids.

    Bytes that may yet become a character are held back; bytes that cannot become U+FFFD. Special
    tokens come out as their text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder('utf-8')('replace')

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes; often '' in the middle of a character."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is held back, as U+FFFD: nothing that completes it will come."""
        text = self._decoder.decode(b'', True)
        self._decoder.reset()
        return text
