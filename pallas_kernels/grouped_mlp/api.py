"""What the routed experts compute: a gated MLP per group of rows, groups of any size."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.checks import check_floating, check_integer
from pallas_kernels.common.platform import Implementation, check_implementation, form_for, run_form
from pallas_kernels.grouped_mlp import dense_kernels, mxfp4_kernels, xla
from pallas_kernels.grouped_mlp.activations import GatedActivation
from pallas_kernels.grouped_mlp.experts import Experts, is_packed, shape_of
from pallas_kernels.grouped_mlp.mxfp4 import GROUP, Mxfp4
from pallas_kernels.grouped_mlp.mxfp4_tiles import CHUNK, Mxfp4Tiles, tile_mxfp4
from pallas_kernels.grouped_mlp.mxfp8 import Mxfp8, RoundedActivation, round_rows
from pallas_kernels.grouped_mlp.reference import grouped_mlp_reference


def grouped_mlp(
    x: jax.Array,
    experts: Experts,
    group_sizes: jax.Array,
    activation: GatedActivation,
    *,
    quantise: Mxfp8 | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """y_m = w2_e activation(w1_e x_m, w3_e x_m), e the group of row m.

    Args:
      x: [M, L], rows sorted by expert.
      experts: weights: arrays of any float dtype, used in x's dtype; or MXFP4, which has no
        gradient itself: train on `fake_quantise_mxfp4` of arrays.
      group_sizes: [E] int32, rows of each expert, summing to M; may be 0. Where the values are
        not known before the program runs, rows past the sum give 0 and groups past M are cut.
      activation: `SiTU` or `SwiGLU`.
      quantise: rounds x and the hidden values to MXFP8; gradients pass straight through, and the
        backward products have the rounded values. None leaves both as they are.
      implementation: 'reference' | 'xla' | 'pallas' | None (best for the platform lowered for).

    Returns:
      [M, L] in x's dtype.

    Raises:
      ValueError: widths disagree, known group sizes are negative or do not sum to M, or with
        `quantise` a width is not a multiple of 32.
      NotImplementedError: 'pallas' with a dtype or width it does not support.

    Source: Kimi K3 `block_sparse_moe.experts`.
    """
    width, num_experts = experts.width, experts.num_experts
    if x.ndim != 2 or x.shape[1] != width or group_sizes.shape != (num_experts,):
        raise ValueError(
            f'grouped_mlp: x {x.shape} and group_sizes {group_sizes.shape}, '
            f'wanted [M, {width}] and ({num_experts},)'
        )
    check_experts('grouped_mlp', experts)
    check_implementation('grouped_mlp', implementation)
    check_floating('grouped_mlp', x=x)
    check_integer('grouped_mlp', group_sizes=group_sizes)
    if not isinstance(group_sizes, jax.core.Tracer):
        sizes = np.asarray(group_sizes)
        if sizes.min(initial=0) < 0 or sizes.sum() != x.shape[0]:
            raise ValueError(
                f'grouped_mlp: group_sizes are at least {sizes.min(initial=0)} and sum to '
                f'{sizes.sum()}, wanted none negative and the {x.shape[0]} rows of x'
            )
    group_sizes = jnp.asarray(group_sizes, jnp.int32)
    if quantise is not None:
        quantise.check('grouped_mlp', width, experts.inner)
    if implementation != 'reference':
        implementation = form_for('grouped_mlp', implementation, unsupported(x, experts, quantise))
    if 0 in (x.size, num_experts, experts.inner):
        return jnp.zeros_like(x)
    x, quantise = round_rows(x, quantise)
    if quantise is not None:
        activation = RoundedActivation(activation, quantise.rule, x.dtype)
    if implementation == 'reference':
        return grouped_mlp_reference(x, experts, group_sizes, activation)
    return _grouped_mlp(x, experts, group_sizes, activation, implementation)


def check_experts(name: str, experts: Experts) -> None:
    for field, weight in experts._asdict().items():
        if not isinstance(weight, Mxfp4):
            continue
        packed, scale = weight
        wanted = (*packed.shape[:-1], 2 * packed.shape[-1] // GROUP)
        if packed.dtype != jnp.uint8 or scale.dtype != jnp.uint8 or scale.shape != wanted:
            raise ValueError(
                f'{name}: {field} has packed {packed.dtype} {packed.shape} and scale '
                f'{scale.dtype} {scale.shape}, wanted uint8 and a scale of {wanted}'
            )
    num_experts, inner, width = shape_of(experts.w1)
    wanted = [(num_experts, inner, width)] * 2 + [(num_experts, width, inner)]
    got = [shape_of(w) for w in experts]
    if got != wanted:
        raise ValueError(f'{name}: w1, w3, w2 have shapes {got}, wanted {wanted}')


def unsupported(x: jax.Array, experts: Experts, quantise: Mxfp8 | None) -> str | None:
    """Why the kernels cannot run, or None."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f'has rows in {x.dtype}, wanted bfloat16 or float32'
    if quantise is not None and experts.inner % CHUNK:
        return f'rounds F = {experts.inner} hidden values to MXFP8, wanted a multiple of {CHUNK}'
    packed = [is_packed(w) for w in experts]
    if not any(packed):
        return None
    if not all(packed):
        return 'has some weights packed and some not, wanted all or none'
    if x.dtype != jnp.bfloat16:
        return f'has packed weights and rows in {x.dtype}, wanted bfloat16'
    if experts.width % CHUNK or experts.inner % CHUNK:
        return (
            f'has packed weights with L = {experts.width} and F = {experts.inner}, '
            f'wanted multiples of {CHUNK}'
        )
    return None


def for_kernels(experts: Experts, dtype: jnp.dtype) -> Experts:
    """In the order and dtype that the kernels read."""

    def one(weight):
        if isinstance(weight, Mxfp4):
            return tile_mxfp4(weight)
        return weight if isinstance(weight, Mxfp4Tiles) else weight.astype(dtype)

    return Experts(*map(one, experts))


def in_kernel(activation: GatedActivation | RoundedActivation, interpret: bool) -> Any:
    """The same inside a kernel."""
    if isinstance(activation, RoundedActivation):
        return dataclasses.replace(activation, place='interpreted' if interpret else 'kernel')
    return activation


def _forward_on_tpu(interpret, x, experts, group_sizes, *, activation, keep):
    kernels = mxfp4_kernels if is_packed(experts.w1) else dense_kernels
    args = (x, for_kernels(experts, x.dtype), group_sizes, in_kernel(activation, interpret))
    y, kept = kernels.forward(*args, keep=keep, interpret=interpret)
    return (y, kept) if keep else y


def _backward_on_tpu(interpret, x, experts, group_sizes, kept, dy, *, activation):
    activation = in_kernel(activation, interpret)
    args = (for_kernels(experts, x.dtype), group_sizes, kept, dy, activation)
    if is_packed(experts.w1):
        return mxfp4_kernels.backward(*args, interpret=interpret), [None] * 3
    return dense_kernels.backward(x, *args, dtypes=[w.dtype for w in experts], interpret=interpret)


def _forward(x, experts, group_sizes, activation, implementation, keep):
    forms = (
        functools.partial(form, activation=activation, keep=keep)
        for form in (_forward_on_tpu, xla.forward)
    )
    return run_form('grouped_mlp', implementation, *forms, x, experts, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_mlp(x, experts, group_sizes, activation, implementation):
    return _forward(x, experts, group_sizes, activation, implementation, keep=False)


def _grouped_mlp_forward(x, experts, group_sizes, activation, implementation):
    y, kept = _forward(x, experts, group_sizes, activation, implementation, keep=True)
    return y, (x, experts, group_sizes, kept)


def _grouped_mlp_backward(activation, implementation, residuals, dy):
    x, experts, group_sizes, kept = residuals
    forms = (
        functools.partial(form, activation=activation) for form in (_backward_on_tpu, xla.backward)
    )
    args = (x, experts, group_sizes, kept, dy)
    dx, grads = run_form('grouped_mlp', implementation, *forms, *args)
    return dx, Experts(*grads), None


_grouped_mlp.defvjp(_grouped_mlp_forward, _grouped_mlp_backward)
