"""The memory behind a prefix cache: equal blocks on the device, of latents or of states, as words.

A block holds, of one attention layer, the latents and shared keys of a page of tokens; or of one
KDA layer its state and convolution tails. Both lie in one array, so that one allocator rules both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import ModelConfig
from k3jax.model.cache import Cache, KDACache, MLACache
from k3jax.model.plan import Plan, Stack, at, stacks

_WORD = jnp.uint32
_WORD_BYTES = 4


def state_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Of one KDA layer's state and convolution tails."""
    c = config.linear_attn_config
    state = c.num_heads * c.head_dim**2 * jnp.promote_types(dtype, jnp.float32).itemsize
    rows = 3 * (c.short_conv_kernel_size - 1)
    return state + rows * c.num_heads * c.head_dim * dtype.itemsize


def token_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Of one token in one attention layer."""
    return (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize


def page_tokens(config: ModelConfig, dtype: jnp.dtype, hash_tokens: int) -> int:
    """The smallest page, in whole hash blocks, whose bytes hold a state too."""
    dtype = jnp.dtype(dtype)
    tokens = math.ceil(state_bytes(config, dtype) / token_bytes(config, dtype))
    return -(-tokens // hash_tokens) * hash_tokens


def layer_counts(config: ModelConfig) -> tuple[int, int]:
    """Attention layers, which a page has a block for each of, and KDA layers, so of a state."""
    num_kda = len(config.linear_attn_config.kda_layers)
    return config.num_hidden_layers - num_kda, num_kda


def _to_words(x: jax.Array) -> jax.Array:
    """[N, words] of [N, ...]."""
    flat = x.reshape(len(x), -1)
    each = _WORD_BYTES // flat.dtype.itemsize
    flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % each)))
    grouped = flat.reshape(len(x), -1, each) if each > 1 else flat
    return lax.bitcast_convert_type(grouped, _WORD)


def _from_words(words: jax.Array, shape: Sequence[int], dtype: jnp.dtype) -> jax.Array:
    """[N, *shape] of the first of [N, words]."""
    size = math.prod(shape)
    flat = lax.bitcast_convert_type(words, dtype).reshape(len(words), -1)
    return flat[:, :size].reshape(-1, *shape)


def _num_words(size: int, dtype: jnp.dtype) -> int:
    return -(-size * dtype.itemsize // _WORD_BYTES)


class BlockPool:
    """Blocks of one model, on one device.

    Attributes:
      page_tokens: tokens of a page. num_words, block_bytes: of one block.
      blocks: [blocks, words] uint32.
    """

    def __init__(
        self, config: ModelConfig, plan: Plan, dtype: Any, num_blocks: int, page_tokens: int
    ):
        dtype = jnp.dtype(dtype)
        self.page_tokens = page_tokens
        # Each of a state's four parts begins with a word.
        state = state_bytes(config, dtype) + 3 * _WORD_BYTES
        most = max(page_tokens * token_bytes(config, dtype), state)
        self.num_words = -(-most // _WORD_BYTES)
        self.block_bytes = self.num_words * _WORD_BYTES
        self._num_blocks = num_blocks
        self.reset()
        own = _Layers(config, plan, page_tokens)
        self._save_page = jax.jit(own.save_page, donate_argnums=0)
        self._load_page = jax.jit(own.load_page, donate_argnums=1)
        self._state_of = jax.jit(own.state_of)
        self._put = jax.jit(own.put_blocks, donate_argnums=0)
        self._get = jax.jit(lambda blocks, ids: blocks[ids])
        self._load_state = jax.jit(own.load_state, donate_argnums=1)

    def reset(self) -> None:
        """Empty blocks, also after a step that failed on its way."""
        self.blocks = jnp.zeros((self._num_blocks, self.num_words), _WORD)

    def get(self, ids: Sequence[int]) -> jax.Array:
        """[N, words]: a copy of blocks as they are now."""
        return self._get(self.blocks, np.asarray(ids, np.int32))

    def put(self, words: jax.Array | np.ndarray, ids: Sequence[int]) -> None:
        """Writes blocks [N, words]; fewer words, as `state_of` takes, fill their beginnings."""
        self.blocks = self._put(self.blocks, words, np.asarray(ids, np.int32))

    def save_page(self, cache: Cache, row: int, start: int, ids: Sequence[int]) -> None:
        """Copies a page of tokens from `start` on of a row of a cache into blocks."""
        places = np.int32(row), np.int32(start), np.asarray(ids, np.int32)
        self.blocks = self._save_page(self.blocks, cache, *places)

    def load_page(self, cache: Cache, row: int, start: int, ids: Sequence[int]) -> Cache:
        """The cache, which is given up, with a page in a row; what is past its end is left out."""
        places = np.int32(row), np.int32(start), np.asarray(ids, np.int32)
        return self._load_page(self.blocks, cache, *places)

    def state_of(self, cache: Cache, row: int) -> jax.Array:
        """[KDA layers, words]: a row's states as blocks hold them, for `put` later."""
        return self._state_of(cache, np.int32(row))

    def load_state(self, cache: Cache, row: int, length: int, ids: Sequence[int]) -> Cache:
        """The cache, which is given up, with a row's states, after `length` tokens."""
        places = np.int32(row), np.int32(length), np.asarray(ids, np.int32)
        return self._load_state(self.blocks, cache, *places)


class _Layers:
    """How the layers of a cache and blocks become each other; pure functions of arrays."""

    def __init__(self, config: ModelConfig, plan: Plan, page_tokens: int):
        self._config, self._plan, self._page = config, plan, page_tokens

    def _stacks(self, kind: type, cache: Cache) -> Iterator[tuple[Stack, Any]]:
        for stack in stacks(self._plan):
            own = at(cache.layers, stack.path)
            if isinstance(own, kind):
                yield stack, own

    @staticmethod
    def _row(x: jax.Array, stack: Stack, row: jax.Array) -> jax.Array:
        """[layers, ...] of one row of [*lead, B, ...]."""
        one = lax.dynamic_index_in_dim(x, row, stack.layers.ndim, keepdims=False)
        return one.reshape(stack.layers.size, *x.shape[stack.layers.ndim + 1 :])

    @staticmethod
    def _put_row(x: jax.Array, stack: Stack, row: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(*stack.layers.shape, *new.shape[1:])
        return lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), row, stack.layers.ndim)

    def _with(self, cache: Cache, changed: dict[tuple[str, ...], Any]) -> Cache:
        layers: dict[str, Any] = {}
        for stack in stacks(self._plan):
            node = layers
            for name in stack.path[:-1]:
                node = node.setdefault(name, {})
            node[stack.path[-1]] = changed.get(stack.path, at(cache.layers, stack.path))
        return cache._replace(layers=layers)

    def save_page(self, blocks, cache, row, start, ids):
        pages = []
        for stack, own in self._stacks(MLACache, cache):
            places = start + jnp.arange(self._page)
            both = [jnp.take(self._row(x, stack, row), places, axis=1, mode='clip') for x in own]
            pages.append(_to_words(jnp.concatenate(both, axis=-1)))
        return self.put_blocks(blocks, jnp.concatenate(pages), ids)

    def load_page(self, blocks, cache, row, start, ids):
        changed, first = {}, 0
        rank, key = self._config.kv_lora_rank, self._config.qk_rope_head_dim
        for stack, own in self._stacks(MLACache, cache):
            words = blocks[ids[first : first + stack.layers.size]]
            first += stack.layers.size
            page = _from_words(words, (self._page, rank + key), own.latent.dtype)
            places = start + jnp.arange(self._page)
            new = []
            for x, part in zip(own, (page[..., :rank], page[..., rank:]), strict=True):
                whole = self._row(x, stack, row).at[:, places].set(part, mode='drop')
                new.append(self._put_row(x, stack, row, whole))
            changed[stack.path] = MLACache(*new)
        return self._with(cache, changed)

    def state_of(self, cache, row):
        states = []
        for stack, own in self._stacks(KDACache, cache):
            parts = [_to_words(self._row(x, stack, row)) for x in own]
            states.append(jnp.concatenate(parts, axis=1))
        return jnp.concatenate(states)

    def load_state(self, blocks, cache, row, length, ids):
        changed, first = {}, 0
        for stack, own in self._stacks(KDACache, cache):
            words = blocks[ids[first : first + stack.layers.size]]
            first += stack.layers.size
            new, start = [], 0
            for x in own:
                shape = x.shape[stack.layers.ndim + 1 :]
                count = _num_words(math.prod(shape), x.dtype)
                part = _from_words(words[:, start : start + count], shape, x.dtype)
                new.append(self._put_row(x, stack, row, part))
                start += count
            changed[stack.path] = KDACache(*new)
        cache = self._with(cache, changed)
        return cache._replace(length=cache.length.at[row].set(length))

    @staticmethod
    def put_blocks(blocks: jax.Array, words: jax.Array, ids: jax.Array) -> jax.Array:
        words = jnp.pad(words, ((0, 0), (0, blocks.shape[1] - words.shape[1])))
        return blocks.at[ids].set(words)
