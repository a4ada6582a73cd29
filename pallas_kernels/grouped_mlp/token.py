"""What the experts add to few tokens: each needed expert is read once, the others never."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.checks import check_floating, check_integer
from pallas_kernels.common.platform import Implementation, check_implementation, form_for, run_form
from pallas_kernels.grouped_mlp import token_kernel, xla
from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.api import check_experts, for_kernels, in_kernel, unsupported
from pallas_kernels.grouped_mlp.experts import Experts
from pallas_kernels.grouped_mlp.mxfp8 import Mxfp8, RoundedActivation, round_rows
from pallas_kernels.grouped_mlp.reference import token_mlp_reference

MAX_TOKENS = 64


def token_mlp(
    x: jax.Array,
    experts: Experts,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    activation: GatedActivation,
    *,
    quantise: Mxfp8 | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """y_t = sum_i p_ti w2_e activation(w1_e x_t, w3_e x_t), e = expert_ids_ti.

    For decoding: rows are neither sorted nor repeated. No gradients with the kernel.

    Args:
      x: [T, L]. experts: as for `grouped_mlp`.
      expert_ids: [T, k] int32, different experts in a row. Ids outside 0..E - 1 count for nothing
        where they are not known before the program runs: experts of other chips.
      expert_weights: [T, k] float.
      activation, quantise, implementation: as for `grouped_mlp`; 'pallas' takes up to 64 tokens.

    Returns:
      [T, L] in x's dtype, summed in float32.

    Raises:
      ValueError: shapes disagree, known ids are out of range, or with `quantise` a width is not a
        multiple of 32.
      NotImplementedError: 'pallas' with more tokens, or a dtype or width it does not support.
    """
    num_experts = experts.num_experts
    wanted = (x.shape[0], expert_ids.shape[-1])
    shapes_agree = expert_ids.shape == expert_weights.shape == wanted
    if x.ndim != 2 or x.shape[1] != experts.width or not shapes_agree:
        raise ValueError(
            f'token_mlp: x {x.shape}, expert_ids {expert_ids.shape} and expert_weights '
            f'{expert_weights.shape}, wanted [T, {experts.width}] and [T, k] twice'
        )
    check_experts('token_mlp', experts)
    check_implementation('token_mlp', implementation)
    check_floating('token_mlp', x=x, expert_weights=expert_weights)
    check_integer('token_mlp', expert_ids=expert_ids)
    if not isinstance(expert_ids, jax.core.Tracer) and expert_ids.size:
        ids = np.asarray(expert_ids)
        if ids.min() < 0 or ids.max() >= num_experts:
            raise ValueError(
                f'token_mlp: expert_ids reach from {ids.min()} to {ids.max()}, '
                f'wanted 0 to {num_experts - 1}'
            )
    if quantise is not None:
        quantise.check('token_mlp', experts.width, experts.inner)
    problem = unsupported(x, experts, quantise)
    if x.shape[0] > MAX_TOKENS:
        problem = f'has {x.shape[0]} tokens, wanted at most {MAX_TOKENS}'
    if implementation != 'reference':
        implementation = form_for('token_mlp', implementation, problem)
    if 0 in (x.size, expert_ids.size, num_experts, experts.inner):
        return jnp.zeros_like(x)
    x, quantise = round_rows(x, quantise)
    if quantise is not None:
        activation = RoundedActivation(activation, quantise.rule, x.dtype)
    args = (
        jnp.asarray(x),
        experts,
        jnp.asarray(expert_ids, jnp.int32),
        jnp.asarray(expert_weights),
    )
    if implementation == 'reference':
        return token_mlp_reference(*args, activation)
    forms = (functools.partial(form, activation=activation) for form in (_on_tpu, _xla))
    return run_form('token_mlp', implementation, *forms, *args)


class Needed(NamedTuple):
    """Experts that a token chose. ids: [A] int32, ascending, then the last again. count: [1]
    int32, how many differ. weights: [A, 1, T] float32, each token's weight for each."""

    ids: jax.Array
    count: jax.Array
    weights: jax.Array


def needed(expert_ids: jax.Array, expert_weights: jax.Array, num_experts: int) -> Needed:
    """A = min(E, T k); ids out of range choose nothing."""
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    # Comparisons of all with all: small, and without the scatters that TPUs run apart.
    chooses = expert[:, None, None] == expert_ids  # [E, T, k]
    weights = jnp.sum(jnp.where(chooses, expert_weights.astype(jnp.float32), 0), axis=2)
    used = jnp.any(chooses, axis=(1, 2))
    count = jnp.sum(used, dtype=jnp.int32)
    place = jnp.cumsum(used, dtype=jnp.int32) - 1
    wanted = jnp.arange(min(num_experts, expert_ids.size), dtype=jnp.int32)
    wanted = jnp.minimum(wanted, count - 1)[:, None]
    ids = jnp.sum(jnp.where((place == wanted) & used, expert, 0), axis=1, dtype=jnp.int32)
    return Needed(ids, count[None], weights[ids][:, None])


def _on_tpu(interpret, x, experts, expert_ids, expert_weights, *, activation):
    chosen = needed(expert_ids, expert_weights, experts.num_experts)
    args = (x, for_kernels(experts, x.dtype), *chosen)
    activation = in_kernel(activation, interpret)
    return token_kernel.run(*args, activation=activation, interpret=interpret)


def _xla(x, experts, expert_ids, expert_weights, *, activation):
    num_experts, num_chosen = experts.num_experts, expert_ids.shape[1]
    own = (expert_ids >= 0) & (expert_ids < num_experts)
    flat = jnp.where(own, expert_ids, num_experts).reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    rows = xla.forward(x[order // num_chosen], experts, sizes, activation, keep=False)
    rows = rows.astype(jnp.promote_types(x.dtype, jnp.float32))[jnp.argsort(order)]
    rows = rows.reshape(*expert_ids.shape, -1)
    return jnp.sum(rows * expert_weights[..., None].astype(rows.dtype), axis=1).astype(x.dtype)
