"""The device programs of an engine: prompts read in pieces, rows put into slots, one step for all.

A slot is a row of one large cache and of `rows.Rows`. Prompts are read in a cache of their own,
`num_lanes` at a time, which is copied to its slots at the end.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ModelConfig
from k3jax.model.cache import Cache, init_cache
from k3jax.model.kimi import Kimi, decode, prefill
from k3jax.model.param import param_specs
from k3jax.model.plan import Plan, at, stacks
from k3jax.serve.rows import Drawn, Rows, draw, mask_words, no_rows, put_row
from k3jax.serve.steps import cuts_of


def _batch_axes(config: ModelConfig, plan: Plan, cache: Cache) -> Cache:
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
    """

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
        vocab_size = model.config.vocab_size
        self.open_mask = jnp.full((num_slots, mask_words(vocab_size)), 2**32 - 1, jnp.uint32)
        self._step = jax.jit(functools.partial(_step, self._on_mesh(decode)), donate_argnums=(1, 2))
        self._read = jax.jit(self._on_mesh(prefill), donate_argnums=3)
        self._admit = jax.jit(
            functools.partial(_admit, model.config, model.plan), donate_argnums=(0, 1)
        )
        self.reset()

    def reset(self) -> None:
        """Gives up all slots, also after a step that failed on its way."""
        self.cache = self._cache(self.num_slots, self.size)
        self.rows = jax.device_put(no_rows(self.num_slots, self.model.config.vocab_size))

    def _cache(self, num_rows: int, size: int) -> Cache:
        model = self.model
        make = functools.partial(
            init_cache, model.config, model.plan, num_rows, size, model.run.dtype
        )
        if model.run.parallel is None:
            return make()
        shardings = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), cuts_of(model).cache, is_leaf=_is_spec
        )
        return jax.jit(make, out_shardings=shardings)()

    def _on_mesh(self, function: Any) -> Any:
        """function(model, params, *rows, cache, ...) without its model."""
        model = self.model
        function = functools.partial(function, model)
        if model.run.parallel is None:
            return function
        cuts = cuts_of(model)

        def call(params: Any, *args: Any) -> Any:
            specs = [cuts.cache if isinstance(x, Cache) else cuts.rows for x in args]
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=(cuts.params, *specs),
                out_specs=(cuts.rows, cuts.cache),
                check_vma=False,
            )(params, *args)

        return call

    def lanes(self, size: int) -> Cache:
        """An empty cache for `num_lanes` prompts of up to `size` tokens."""
        return self._cache(self.num_lanes, size)

    def read(
        self, tokens: np.ndarray, num_real: np.ndarray, cache: Cache, media: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """Logits [L, Z] after a piece of each lane's prompt, and the cache, which is given up.

        Args:
          tokens: [L, T]. num_real: [L], 0 in lanes that have nothing to read.
          media: [L, T, D], rows of each lane's media tokens, or None.
        """
        extra = () if media is None else (media,)
        return self._read(self.params, tokens, num_real, cache, *extra)

    def admit(
        self, lanes: Cache, logits: jax.Array, lane: int, slot: int, row: Rows, mask: Any
    ) -> Drawn:
        """Puts what a lane has read into a slot; the first token of its answer, [1].

        row: a single one. mask: [mask_words] uint32, or None.
        """
        constrained = mask is not None
        mask = self.open_mask[:1] if mask is None else np.asarray(mask, np.uint32)[None]
        where = np.int32(lane), np.int32(slot)
        self.cache, self.rows, drawn = self._admit(
            self.cache, self.rows, lanes, logits, *where, row, mask, np.bool_(constrained)
        )
        return drawn

    def step(self, active: np.ndarray, mask: np.ndarray | None) -> Drawn:
        """The next token of every slot.

        active: [B] bool. mask: [B, mask_words] uint32, or None where all tokens are allowed.
        """
        constrained = np.bool_(mask is not None)
        mask = self.open_mask if mask is None else mask
        self.cache, self.rows, drawn = self._step(
            self.params, self.cache, self.rows, active, mask, constrained
        )
        return drawn


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _step(decode, params, cache, rows, active, mask, constrained):
    rows = rows._replace(active=active)
    logits, after = decode(params, rows.token, cache)
    # A slot without a request stays where it is: its cache is full of what will be written over.
    cache = after._replace(length=jnp.where(active, after.length, cache.length))
    drawn, rows = draw(logits, rows, mask, constrained)
    return cache, rows, drawn


def _admit(config, plan, cache, rows, lanes, logits, lane, slot, row, mask, constrained):
    own = lax.dynamic_slice_in_dim(logits, lane, 1, 0)
    drawn, row = draw(own, row, mask, constrained)

    def put(axis: int, old: jax.Array, new: jax.Array) -> jax.Array:
        one = lax.dynamic_slice_in_dim(new, lane, 1, axis)
        starts = [0] * old.ndim
        starts[axis] = slot
        return lax.dynamic_update_slice(old, one.astype(old.dtype), starts)

    cache = jax.tree.map(put, _batch_axes(config, plan, cache), cache, lanes)
    return cache, put_row(rows, row, slot), drawn


def place_params(params: Any, model: Kimi, mesh: Mesh | None) -> Any:
    """Parameters where the model's steps want them; on a mesh, cut over its chips."""
    if model.run.parallel is None:
        return params
    specs = param_specs(model.config, model.plan, model.run.parallel)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    return jax.device_put(params, shardings)
