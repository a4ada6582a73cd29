"""One decoder layer, and how runs of equal layers are scanned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from k3jax.config import ModelConfig
from k3jax.model.attn_res import push_snapshot
from k3jax.model.kda import kda_mixer
from k3jax.model.layout import layer_leaves
from k3jax.model.mla import mla_mixer
from k3jax.model.moe import activation_of, gated_mlp, moe
from k3jax.model.norms import rms_norm
from k3jax.model.param import declare
from k3jax.model.plan import Block, Segment
from k3jax.model.run import Run
from k3jax.model.statistics import LayerStatistics
from k3jax.parallel.sequence import Row
from pallas_kernels.attn_res import Flag, attn_res


class Depth(NamedTuple):
    """What layers share inside one attention-residual block.

    bank: [N, B, T, D] snapshots, or None in a model with plain residuals; num_live of them count.
    """

    bank: jax.Array | None
    num_live: jax.Array | int


class Left(NamedTuple):
    """What a layer leaves: its cache and what the run watches; None for what there is not.

    Of many layers, dicts by name, stacked where layers are scanned.
    """

    cache: Any
    seen: Any


def joined(parts: dict[str, Left], run: Run, cache: Any) -> Left:
    """What named layers leave, as one; `cache`: what came before, or None."""
    caches = None if cache is None else {name: left.cache for name, left in parts.items()}
    watched = run.watch is not None
    return Left(caches, {name: left.seen for name, left in parts.items()} if watched else None)


class Sequence(NamedTuple):
    """What layers know of the tokens: segment ids [B, T] or None; cached tokens [B] or None; of the
    whole row, where chips share its tokens."""

    segment_ids: jax.Array | None
    length: jax.Array | None
    row: Row | None


@jax.custom_vjp
def _together(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
    """Its arguments; their gradients are passed on when all are there.

    Else XLA may put off the gradients of the weights, and keep what they are made of for many
    layers.
    """
    return x, params


_together.defvjp(
    lambda x, params: ((x, params), None), lambda _, grads: lax.optimization_barrier(grads)
)


def _of_layer(heads: LayerStatistics | None, experts: LayerStatistics | None) -> LayerStatistics:
    heads, experts = heads or LayerStatistics(), experts or LayerStatistics()
    return experts._replace(max_logit=heads.max_logit)


class DecoderLayer(nn.Module):
    """Mixer and feed-forward, each reading the attention residual (or the running sum)."""

    config: ModelConfig
    run: Run
    layer: int  # any layer of its kind; it only selects the kind

    @nn.compact
    def __call__(
        self, prefix: jax.Array, depth: Depth, sequence: Sequence, use_prefix: Flag, cache: Any
    ) -> tuple[jax.Array, Left]:
        """prefix [B, T, D] -> prefix after the layer, and what it leaves.

        use_prefix: whether the running sum is a candidate yet; at a block's first layer it is not.
        """
        config, eps, run = self.config, self.config.rms_norm_eps, self.run
        leaves = layer_leaves(config, self.layer)
        params = declare(self, leaves, config.initializer_range, run)

        def read(name: str, norm: str, use_prefix: Flag) -> jax.Array:
            if depth.bank is None:
                return rms_norm(prefix, params[norm], eps)
            return attn_res(
                depth.bank,
                prefix,
                params[f'{name}_norm'],
                params[f'{name}_proj'],
                params[norm],
                num_live=depth.num_live,
                use_prefix=use_prefix,
                eps=eps,
                implementation=run.implementation,
            )

        prefix, params = _together(checkpoint_name(prefix, 'layer_input'), params)
        x = read('self_attention_res', 'input_layernorm', use_prefix)
        x = checkpoint_name(x, 'mixer_input')
        shared = {'segment_ids': sequence.segment_ids, 'cache': cache, 'row': sequence.row}
        heads = experts = None
        if config.is_kda(self.layer):
            a, cache = kda_mixer(params['self_attn'], x, config, run=run, **shared)
        else:
            a, cache, heads = mla_mixer(
                params['self_attn'], x, config, run=run, length=sequence.length, **shared
            )
        prefix = prefix + checkpoint_name(a, 'mixer_output')
        y = checkpoint_name(read('mlp_res', 'post_attention_layernorm', True), 'ffn_input')
        if config.is_moe(self.layer):
            m, experts = moe(params['block_sparse_moe'], y, config, run, sequence.segment_ids)
        else:
            m = gated_mlp(params['mlp'], y, activation_of(config), run.parallel)
        prefix = prefix + checkpoint_name(m, 'ffn_output')
        return prefix, Left(cache, None if run.watch is None else _of_layer(heads, experts))


def _remat_policy(run: Run) -> Callable[..., Any] | None:
    """What a recomputed layer still keeps; None for nothing but its input."""
    if not (run.keep or run.offload):
        return None
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(run.keep),
        names_which_can_be_offloaded=list(run.offload),
        offload_src='device',
        offload_dst='pinned_host',
    )


def layer_class(run: Run, *, in_scan: bool) -> type[nn.Module]:
    """DecoderLayer, recomputed in the backward pass where the run asks for it."""
    if run.remat != 'layer':
        return DecoderLayer
    # A scan already keeps the recomputation apart; elsewhere it must be kept apart by hand.
    return nn.remat(DecoderLayer, prevent_cse=not in_scan, policy=_remat_policy(run))


class _Segment(nn.Module):
    """The layers of a segment once; `start` is true in the first repeat of a block's start."""

    config: ModelConfig
    run: Run
    segment: Segment
    first: int
    in_scan: bool

    @nn.compact
    def __call__(self, prefix, start, cache, depth, sequence):
        left = {}
        for run in self.segment.runs:
            name, own = run.name, None if cache is None else cache[run.name]
            # Of the first layer of an attention-residual block, the running sum is empty.
            use_prefix = True
            if run.offset == 0 and start is not False:
                use_prefix = False if start is True else jnp.logical_not(start)
            body = layer_class(self.run, in_scan=self.in_scan or run.count > 1)
            args = (self.config, self.run, self.first + run.offset)
            if run.count == 1:
                layer = body(*args, name=name)
                prefix, left[name] = layer(prefix, depth, sequence, use_prefix, own)
                continue
            along = nn.broadcast
            if use_prefix is not True:
                use_prefix, along = jnp.ones(run.count, bool).at[0].set(use_prefix), 0
            scanned = nn.scan(
                body,
                variable_axes={'params': 0},
                split_rngs={'params': True},
                length=run.count,
                in_axes=(nn.broadcast, nn.broadcast, along, 0),
            )(*args, name=name)
            prefix, left[name] = scanned(prefix, depth, sequence, use_prefix, own)
        return prefix, joined(left, self.run, cache)


class _Block(nn.Module):
    """One attention-residual block: snapshot the running sum, restart it, run the segments."""

    config: ModelConfig
    run: Run
    block: Block

    @nn.compact
    def __call__(self, carry, cache, sequence):
        bank, num_live, prefix = carry
        if bank is not None:
            bank = push_snapshot(bank, prefix, num_live)
            num_live = num_live + 1
            prefix = jnp.zeros_like(prefix)
        depth, left = Depth(bank, num_live), {}
        for segment in self.block.segments:
            own = None if cache is None else cache[segment.name]
            starts = segment.offset == 0 and bank is not None
            in_scan = segment.repeats > 1 or self.block.repeats > 1
            args = (self.config, self.run, segment, self.block.first + segment.offset, in_scan)
            if segment.repeats == 1:
                body = _Segment(*args, name=segment.name)
                prefix, left[segment.name] = body(prefix, starts, own, depth, sequence)
                continue
            scanned = nn.scan(
                _Segment,
                variable_axes={'params': 0},
                split_rngs={'params': True},
                length=segment.repeats,
                in_axes=(0 if starts else nn.broadcast, 0, nn.broadcast, nn.broadcast),
            )(*args, name=segment.name)
            start = jnp.arange(segment.repeats) == 0 if starts else False
            prefix, left[segment.name] = scanned(prefix, start, own, depth, sequence)
        return (bank, num_live, prefix), joined(left, self.run, cache)


def run_block(
    config: ModelConfig,
    run: Run,
    block: Block,
    carry: tuple[jax.Array | None, int, jax.Array],
    cache: Any,
    sequence: Sequence,
) -> tuple[tuple[jax.Array | None, int, jax.Array], Left]:
    """Runs all repeats of `block` inside the calling module.

    carry: (bank [N, B, T, D] or None, N, prefix [B, T, D]); the bank grows by a row a block.
    """
    bank, num_live, prefix = carry
    if bank is not None:
        bank = jnp.pad(bank, ((0, block.repeats), (0, 0), (0, 0), (0, 0)))
    if block.repeats == 1:
        return _Block(config, run, block, name=block.name)(
            (bank, num_live, prefix), cache, sequence
        )
    scanned = nn.scan(
        _Block,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=block.repeats,
        in_axes=(0, nn.broadcast),
    )(config, run, block, name=block.name)
    carry = (bank, jnp.asarray(num_live, jnp.int32), prefix)
    (bank, _, prefix), left = scanned(carry, cache, sequence)
    return (bank, num_live + block.repeats, prefix), left
