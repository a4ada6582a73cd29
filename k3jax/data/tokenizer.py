"""How text becomes token ids and back: Kimi's byte-level BPE, or bytes and the same specials."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tiktoken
from etils import epath

from k3jax.data.special_tokens import (
    BOS,
    END_OF_MSG,
    EOS,
    EOT,
    K3_SLOTS,
    NUM_SPECIAL_TOKENS,
    PAD,
    slots_of_model,
)

BYTES = 'bytes'  # the name of the tokenizer that needs no file
VOCAB_FILE = 'tiktoken.model'
CONFIG_FILE = 'tokenizer_config.json'
MODEL_CONFIG_FILE = 'config.json'

_MAX_CHUNK = 400_000  # characters that are split and merged at once
_MAX_RUN = 25_000  # consecutive characters that are all whitespace, or all not


def _split_pattern() -> str:
    """The regular expression that cuts text into the words within which bytes are merged.

    `&&[^...]` intersects character classes, which Rust's regex (inside tiktoken) understands and
    Python's does not. Source: the release's tokenizer, pat_str.
    """
    letter_or_number = r'\p{L}\p{N}'
    upper = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
    lower = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]'
    lead = rf'[^\r\n{letter_or_number}]?'
    suffix = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    alternatives = (
        r'[\p{Han}]+',
        f'{lead}{upper}*{lower}+{suffix}',
        f'{lead}{upper}+{lower}*{suffix}',
        r'\p{N}{1,3}',
        rf' ?[^\s{letter_or_number}]+[\r\n]*',
        r'\s*[\r\n]+',
        r'\s+(?!\S)',
        r'\s+',
    )
    return '|'.join(alternatives)


def _chunks(text: str) -> Iterator[str]:
    """Pieces that are encoded one by one: their borders change the ids of extreme inputs.

    Every 400,000 characters, and within such a piece at the 25,001st character of a run that is
    whitespace (`str.isspace`) or non-whitespace throughout.
    """
    for start in range(0, len(text), _MAX_CHUNK):
        piece = text[start : start + _MAX_CHUNK]
        begin = 0
        if len(piece) > _MAX_RUN:
            for run in re.finditer(r'\s+|\S+', piece):
                for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                    yield piece[begin:cut]
                    begin = cut
        yield piece[begin:]


def _without_surrogates(text: str) -> str:
    """`text` with surrogate pairs joined and lone ones replaced, so that it has UTF-8 bytes."""
    try:
        text.encode('utf-8')
    except UnicodeEncodeError:
        return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
    return text


class Tokenizer:
    """Byte-level BPE ranks, followed directly by 256 special tokens.

    Nothing is added to the text: no prefix space, no [BOS], no [EOS].

    Attributes:
      vocab_size: number of ranks + 256.
      num_ranks: number of ordinary tokens, which is also the id of the first special token.
      bos_id, eos_id, end_of_msg_id, eot_id, pad_id: ids of special slots 0, 1, 2, 9 and 255.
        Documents end with `eos_id`, chat messages with `end_of_msg_id`.
      stop_ids: the ids after which nothing more is generated.
      special_tokens: text -> id of all 256.
    """

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str] | None = None):
        """Builds the tokenizer.

        Args:
          ranks: token bytes -> id, ids 0..len(ranks) - 1, all 256 single bytes among them.
          special_names: id -> text of the named special tokens; None: K3's names. The others are
            called `<|reserved_token_{id}|>`.

        Raises:
          ValueError: ids that are not contiguous, a missing byte, a special id out of range, or one
            text for two special ids.
        """
        size = len(ranks)
        if sorted(ranks.values()) != list(range(size)):
            raise ValueError(f'tokenizer ranks: got {size} ids, wanted each of 0..{size - 1} once')
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise ValueError(
                f'tokenizer ranks: no token for byte {missing[0]:#04x} ({len(missing)} bytes lack '
                'one), wanted all 256 single bytes; is the vocabulary file complete?'
            )
        if special_names is None:
            special_names = {size + slot: name for slot, name in K3_SLOTS.items()}
        last = size + NUM_SPECIAL_TOKENS - 1
        for token_id, name in special_names.items():
            if not size <= token_id <= last:
                raise ValueError(
                    f'special token {name!r}: got id {token_id}, wanted {size}..{last}, the '
                    f'{NUM_SPECIAL_TOKENS} ids after the {size} ranks'
                )
        texts = [
            special_names.get(i, f'<|reserved_token_{i}|>')
            for i in range(size, size + NUM_SPECIAL_TOKENS)
        ]
        self.special_tokens = {text: size + slot for slot, text in enumerate(texts)}
        if len(self.special_tokens) != NUM_SPECIAL_TOKENS:
            twice = next(text for text in texts if texts.count(text) > 1)
            raise ValueError(f'special token {twice!r}: got two ids, wanted one')
        self.num_ranks = size
        self.vocab_size = size + NUM_SPECIAL_TOKENS
        self.bos_id = size + BOS
        self.eos_id = size + EOS
        self.end_of_msg_id = size + END_OF_MSG
        self.eot_id = size + EOT
        self.pad_id = size + PAD
        self.stop_ids = frozenset({self.end_of_msg_id, self.eos_id, self.eot_id})
        self._all_special = frozenset(self.special_tokens)
        # Without merges the ids of a text are a lookup of its bytes.
        self._byte_ids = (
            np.array([ranks[bytes([byte])] for byte in range(256)], np.int32)
            if size == 256
            else None
        )
        self._lengths = np.zeros(self.vocab_size, np.int32)
        for token, token_id in ranks.items():
            self._lengths[token_id] = len(token)
        self._encoding = tiktoken.Encoding(
            'kimi',
            pat_str=_split_pattern(),
            mergeable_ranks=dict(ranks),
            special_tokens=self.special_tokens,
        )

    def encode_pieces(self, text: str) -> Iterator[np.ndarray]:
        """[t] int32 ids of `text` as ordinary text, some hundred thousand characters at a time."""
        text = _without_surrogates(text)
        if self._byte_ids is not None:
            yield self._byte_ids[np.frombuffer(text.encode('utf-8'), np.uint8)]
            return
        for chunk in _chunks(text):
            ids = self._encoding.encode_to_numpy(chunk, disallowed_special=())
            yield ids.astype(np.int32)

    def encode_array(self, text: str) -> np.ndarray:
        """[T] int32 ids of `text` as ordinary text; the fast path for data."""
        pieces = list(self.encode_pieces(text))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.int32), *pieces])

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`.

        Args:
          text: any string; lone surrogates count as U+FFFD.
          allow_special: whether the text of a special token means that token. By default it is
            ordinary text, so that no user input can forge the structure of a conversation.
        """
        if not allow_special:
            return self.encode_array(text).tolist()
        return [
            token_id
            for chunk in _chunks(_without_surrogates(text))
            for token_id in self._encoding.encode(chunk, allowed_special=self._all_special)
        ]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`, special tokens as their text.

        Raises:
          ValueError: an id outside 0..vocab_size - 1.
        """
        ids = [int(i) for i in ids]
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(
                    f'token id at position {position}: got {token_id}, wanted '
                    f'0..{self.vocab_size - 1}'
                )
        return self._encoding.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` with nothing inserted; bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside 0..vocab_size - 1.
        """
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, a special token's text; the id is not checked."""
        return self._encoding.decode_single_token_bytes(token_id)

    def token_byte_lengths(self) -> np.ndarray:
        """[Z] int32: how many bytes of text each token stands for; 0 for special tokens."""
        return self._lengths.copy()


def byte_tokenizer() -> Tokenizer:
    """One token a byte and the 256 special tokens: a vocabulary of 512 that needs no file."""
    return Tokenizer({bytes([byte]): byte for byte in range(256)})


def byte_tokenizer_files() -> dict[str, bytes]:
    """The files of a folder from which `load_tokenizer` makes the byte tokenizer, by name."""
    ranks = b''.join(base64.b64encode(bytes([byte])) + b' %d\n' % byte for byte in range(256))
    special = {
        str(token_id): {'content': text, 'special': True}
        for text, token_id in byte_tokenizer().special_tokens.items()
    }
    names = json.dumps({'added_tokens_decoder': special}, indent=2)
    return {VOCAB_FILE: ranks, CONFIG_FILE: names.encode() + b'\n'}


def load_tokenizer(folder: str | epath.PathLike | None) -> Tokenizer:
    """The tokenizer of a release folder, or the byte tokenizer for None and 'bytes'.

    Args:
      folder: local or gs:// folder with `tiktoken.model`. Where `tokenizer_config.json` beside it
        has `added_tokens_decoder`, that names the special tokens; else the model type of
        `config.json` does: Kimi Linear and K2 call the same slots otherwise than K3.

    Raises:
      ValueError: a missing, unreadable or contradictory file; the message names it.
    """
    if folder is None or folder == BYTES:
        return byte_tokenizer()
    folder = epath.Path(folder)
    path = folder / VOCAB_FILE
    if not path.exists():
        raise ValueError(
            f'{folder}: no {VOCAB_FILE} here, wanted the folder of a released tokenizer; copy the '
            f"file there, or ask for '{BYTES}', one token a byte"
        )
    ranks = _parse_ranks(path.read_bytes(), str(path))
    config_path = folder / CONFIG_FILE
    names, model_path = None, folder / MODEL_CONFIG_FILE
    if config_path.exists():
        names = _parse_special_names(config_path.read_text(), str(config_path))
    if names is None and model_path.exists():
        slots = slots_of_model(_parse_json(model_path.read_text(), str(model_path)))
        names = {len(ranks) + slot: text for slot, text in slots.items()}
    try:
        return Tokenizer(ranks, names)
    except ValueError as e:
        raise ValueError(f'{folder}: {e}') from e


def _parse_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Token bytes -> rank of the lines `base64 rank`, ranks counting up from 0."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        fields = line.split()
        try:
            token, rank = fields
            token, rank = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{where}, line {number}: got {line[:60]!r}, wanted 'base64 rank'; "
                'the file is damaged, fetch it again'
            ) from None
        if rank != len(ranks):
            raise ValueError(
                f'{where}, line {number}: got rank {rank}, wanted {len(ranks)}; '
                'the file is damaged, fetch it again'
            )
        if not token or token in ranks:
            raise ValueError(
                f'{where}, line {number}: got token {token!r}, wanted one that no earlier line '
                'has; the file is damaged, fetch it again'
            )
        ranks[token] = rank
    if not ranks:
        raise ValueError(f"{where}: got no tokens, wanted lines 'base64 rank'; fetch it again")
    return ranks


def _parse_json(text: str, where: str) -> dict[str, Any]:
    """The object that a JSON file holds; an empty one where it holds something else."""
    try:
        config: Any = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f'{where}: not JSON ({e}); fetch it again') from None
    return config if isinstance(config, dict) else {}


def _parse_special_names(text: str, where: str) -> dict[int, str] | None:
    """Id -> text from `added_tokens_decoder`; None where the file does not have it."""
    added = _parse_json(text, where).get('added_tokens_decoder')
    if not added:
        return None
    try:
        return {int(token_id): entry['content'] for token_id, entry in added.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"{where}: added_tokens_decoder: wanted {{'id': {{'content': text}}}}"
        ) from None
