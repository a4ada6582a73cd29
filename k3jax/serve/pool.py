"""The device programs of an engine: prompts read in pieces, rows put into slots, one step for all.

A slot is a row of one large cache and of `rows.Rows`. Prompts are read in a cache of their own,
`num_lanes` at a time, which is copied to its slots at the end. On a mesh each part that has rows of
its own has its slots and one lane, and a lane fills slots of its part: no cache travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ModelConfig
from k3jax.model.cache import Cache, init_cache
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.model.plan import Plan, at, stacks
from k3jax.serve.rows import Drawn, Rows, draw, mask_words, no_rows, put_row
from k3jax.serve.steps import cuts_of


def batch_axes(config: ModelConfig, plan: Plan, cache: Cache) -> Cache:
    """A tree like the cache with the number of the axis that counts rows."""
    layers: dict[str, Any] = {}
    for stack in stacks(plan):
        node = layers
        for name in stack.path[:-1]:
            node = node.setdefault(name, {})
        own = at(cache.layers, stack.path)
        node[stack.path[-1]] = type(own)(*[stack.layers.ndim] * len(own))
    return Cache(0, layers)


class Pool:
    """Slots of one model, and what moves them on; not for several threads.

    Attributes:
      num_slots: rows that are decoded together. num_lanes: prompts that are read together: the
        parts of a mesh that have rows of their own, or 1.
      size: tokens that a slot holds.
      num_guesses: tokens that a step guesses, 0 here: it gives one.
    """

    num_guesses = 0

    def __init__(self, model: Kimi, params: Any, num_slots: int, size: int, mesh: Mesh | None):
        self.model, self.params, self.size = model, params, size
        self.num_slots, self.mesh = num_slots, mesh
        parallel = model.run.parallel
        self.num_lanes = 1 if parallel is None else parallel.size(*parallel.rules.rows)
        if num_slots % self.num_lanes:
            raise ValueError(
                f'slots: got {num_slots}, wanted a multiple of {self.num_lanes}, the parts of the '
                'mesh that have rows of their own (mesh.data x mesh.expert)'
            )
        cuts, whole = cuts_of(model), PartitionSpec()
        self._cuts = cuts
        vocab_size = model.config.vocab_size
        self.open_mask = self._placed(
            np.full((num_slots, mask_words(vocab_size)), 2**32 - 1, np.uint32)
        )
        self._open_row = np.full((1, mask_words(vocab_size)), 2**32 - 1, np.uint32)
        made = cuts.cache, cuts.rows, cuts.rows
        step = self._on_mesh(
            functools.partial(_step, model),
            (cuts.params, cuts.cache, *[cuts.rows] * 3, whole),
            made,
        )
        self._step = jax.jit(step, donate_argnums=(1, 2))
        admit = self._on_mesh(
            functools.partial(_admit, model, num_slots // self.num_lanes),
            (cuts.cache, cuts.rows, cuts.cache, cuts.rows, *[whole] * 4),
            made,
        )
        self._admit = jax.jit(admit, donate_argnums=(0, 1))
        read = functools.partial(prefill, model)
        taken = cuts.params, cuts.rows, cuts.rows, cuts.cache
        made = cuts.rows, cuts.cache
        self._read = jax.jit(self._on_mesh(read, taken, made), donate_argnums=3)
        seeing = self._on_mesh(read, (*taken, cuts.rows), made)
        self._read_media = jax.jit(seeing, donate_argnums=3)
        self.reset()

    def reset(self) -> None:
        """Gives up all slots, also after a step that failed on its way."""
        self.cache = self._cache(self.num_slots, self.size)
        self.rows = self._placed(no_rows(self.num_slots, self.model.config.vocab_size))

    def lane_of(self, slot: int) -> int:
        """The lane that fills a slot."""
        return slot // (self.num_slots // self.num_lanes)

    def _placed(self, rows: Any) -> Any:
        """Arrays with an axis of all slots, where the steps want them."""
        if self.model.run.parallel is None:
            return jax.device_put(rows)
        return jax.device_put(rows, NamedSharding(self.mesh, self._cuts.rows))

    def _cache(self, num_rows: int, size: int) -> Cache:
        model = self.model
        make = functools.partial(
            init_cache, model.config, model.plan, num_rows, size, model.run.dtype
        )
        if model.run.parallel is None:
            return make()
        shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self._cuts.cache,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        return jax.jit(make, out_shardings=shardings)()

    def _on_mesh(self, function: Callable[..., Any], taken: Any, made: Any) -> Callable[..., Any]:
        """`function` as a program of every chip; taken, made: how its arguments and results are
        cut."""
        if self.model.run.parallel is None:
            return function
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=taken, out_specs=made, check_vma=False
        )

    def lanes(self, size: int) -> Cache:
        """An empty cache for `num_lanes` prompts of up to `size` tokens."""
        return self._cache(self.num_lanes, size)

    def read(
        self,
        tokens: np.ndarray,
        num_real: np.ndarray,
        following: np.ndarray,
        cache: Cache,
        media: jax.Array | None,
    ) -> tuple[jax.Array, Cache]:
        """Logits [L, Z] after a piece of each lane's prompt, and the cache, which is given up.

        Args:
          tokens: [L, T]. num_real: [L], 0 in lanes that have nothing to read.
          following: [L], each lane's token after these, -1 where it is not drawn yet: for a draft.
          media: [L, T, D], rows of each lane's media tokens, or None.
        """
        del following
        if media is None:
            return self._read(self.params, tokens, num_real, cache)
        return self._read_media(self.params, tokens, num_real, cache, media)

    def admit(
        self, lanes: Cache, logits: jax.Array, slot: int, row: Rows, mask: np.ndarray | None
    ) -> Drawn:
        """Puts what the lane of a slot has read into it; the first token of its answer is that of
        the lane, in [L].

        row: a single one. mask: [mask_words] uint32, or None.
        """
        constrained = np.bool_(mask is not None)
        mask = self._open_row if mask is None else mask[None]
        self.cache, self.rows, drawn = self._admit(
            self.cache, self.rows, lanes, logits, np.int32(slot), row, mask, constrained
        )
        return drawn

    def step(
        self, active: np.ndarray, mask: np.ndarray | None, limit: np.ndarray | None = None
    ) -> Drawn:
        """The next token of every slot.

        active: [B] bool. mask: [B, mask_words] uint32, or None where all tokens are allowed.
        limit: for a draft.
        """
        del limit
        constrained = np.bool_(mask is not None)
        mask = self.open_mask if mask is None else mask
        self.cache, self.rows, drawn = self._step(
            self.params, self.cache, self.rows, active, mask, constrained
        )
        return drawn


def _step(model, params, cache, rows, active, mask, constrained):
    rows = rows._replace(active=active)
    # A slot without a request is an empty one, so that attention is as short as the others allow;
    # what is in its cache will be written over.
    cache = cache._replace(length=jnp.where(active, cache.length, 0))
    logits, cache = decode(model, params, rows.token, cache)
    drawn, rows = draw(logits, rows, mask, constrained)
    return cache, rows, drawn


def _admit(model, num_slots, cache, rows, lanes, logits, slot, row, mask, constrained):
    """num_slots: of this part of the mesh, whose lane this is."""
    drawn, row = draw(logits, row, mask, constrained)
    parallel, here = model.run.parallel, True
    if parallel is not None:
        here = lax.axis_index(parallel.rules.rows) == slot // num_slots

    axes = batch_axes(model.config, model.plan, cache)
    cache = put_row(cache, lanes, slot % num_slots, here, axes)
    return cache, put_row(rows, row, slot % num_slots, here), drawn
