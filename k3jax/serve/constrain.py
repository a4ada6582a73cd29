"""Which tokens an answer may go on with: a grammar over a tokenizer's vocabulary."""

from __future__ import annotations

from typing import Any

import llguidance
import numpy as np

from k3jax.data.tokenizer import Tokenizer

# Of a grammar: a hundred tools, or seconds to compile. The items of a step allow all optional
# properties of such a grammar, of which one takes four, so that none fails on its way.
_MAX_BYTES, _MAX_SYMBOLS, _MAX_ITEMS = 2**20, 50_000, 20_000


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id = tokenizer.end_of_msg_id
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = list(range(tokenizer.num_ranks, tokenizer.vocab_size))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode('utf-8', 'replace')
        return self._tokenizer.encode(text)


class Matcher:
    """One answer under a grammar.

    Attributes:
      is_finished: the grammar is complete and its end has been taken.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_id: int):
        self._matcher, self._vocab_size, self._end_id = matcher, vocab_size, end_id
        self.is_finished = False

    def bitmask(self) -> np.ndarray:
        """[ceil(Z / 32)] uint32: which tokens may come next, the first in the lowest bit."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        return mask[: -(-self._vocab_size // 32)]

    def mask(self) -> np.ndarray:
        """[Z] bool: which tokens may come next."""
        bits = np.unpackbits(self.bitmask().view(np.uint8), bitorder='little')
        return bits[: self._vocab_size].astype(bool)

    def advance(self, token_id: int) -> None:
        """Takes a token.

        Raises:
          ValueError: the grammar does not allow it here, or the answer is over.
        """
        if self.is_finished or not self._matcher.consume_token(token_id):
            raise ValueError(f'token {token_id}: not allowed by the grammar here')
        self.is_finished = token_id == self._end_id

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f'grammar: {self._matcher.get_error()}')


class Constrainer:
    """Makes matchers for one tokenizer; a large vocabulary takes a second to get ready."""

    def __init__(self, tokenizer: Tokenizer):
        self._vocab_size = tokenizer.vocab_size
        self._end_id = tokenizer.end_of_msg_id
        self._limits = llguidance.LLParserLimits(
            verbose_errors=False, max_grammar_size=_MAX_SYMBOLS, max_items_in_row=_MAX_ITEMS
        )
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=tokenizer.vocab_size,
            eos_token=tokenizer.end_of_msg_id,
        )

    def fault(self, grammar: str) -> str | None:
        """What is wrong with a grammar, in a line; None for nothing."""
        if len(grammar) > _MAX_BYTES:
            return f'too large: {len(grammar)} bytes of rules, wanted at most {_MAX_BYTES}'
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._tokenizer, limits=self._limits
        )
        return (messages[0].splitlines() or ['no reason given'])[0][:300] if failed else None

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the start of `grammar`.

        Raises:
          ValueError: `fault` says why.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(f'grammar: {self.fault(grammar)}')
        return Matcher(matcher, self._vocab_size, self._end_id)
