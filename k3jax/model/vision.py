"""The vision tower and its projector: patches of images and video chunks become rows for the text.

Patches of many media lie one after the other in one sequence; each attends to its own medium. The
tables of positions are read at each patch's own place, so that shapes do not depend on the sizes of
the images. Source: Kimi K3 (MoonViT-V2) and Kimi K2.5 (MoonViT-3D), whose configs differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.config import ModelConfig, VisionConfig
from k3jax.model.layout import CORNERS, VISION, vision_leaves
from k3jax.model.norms import project, rms_norm
from k3jax.model.param import gathered
from k3jax.model.run import Run

Params = dict[str, Any]

FRAMES = 4  # of a chunk of video, at most
BLOCK = 1024  # of queries and of keys, where there are more patches
PADDING = 2**30  # after all media


class Media(NamedTuple):
    """Where each patch belongs; of padding, all 0. int32.

    Attributes:
      medium: [P], from 1; patches of one medium are neighbours.
      frame, row, column: [P], its place in its medium.
      height, width: [P], of its medium, in patches.
      moves: [P], 1 in media of several frames.
      merged: [N, 4, FRAMES], the patches that a row for the text is made of, by corner and frame;
        -1 where there are fewer frames, and in rows of padding.
    """

    medium: np.ndarray | jax.Array
    frame: np.ndarray | jax.Array
    row: np.ndarray | jax.Array
    column: np.ndarray | jax.Array
    height: np.ndarray | jax.Array
    width: np.ndarray | jax.Array
    moves: np.ndarray | jax.Array
    merged: np.ndarray | jax.Array


class MediaInputs(NamedTuple):
    """Media of a batch; each of its rows has patches and rows for the text of its own.

    pixels: [B, P, 3, size, size] float32, normalised. media: its leaves with a leading axis B.
    """

    pixels: np.ndarray | jax.Array
    media: Media


def media_of(
    grids: list[tuple[int, int, int]], num_patches: int | None = None, num_rows: int | None = None
) -> Media:
    """Where patches belong of media with these grids (frames, rows, columns), in order.

    num_patches, num_rows: to pad to, patches and rows for the text; None for no padding.

    Raises:
      ValueError: a grid that is none, or more than is padded to.
    """
    parts, merged, start = [], [], 0
    for number, (frames, rows, columns) in enumerate(grids):
        if not 1 <= frames <= FRAMES or rows < 2 or columns < 2 or rows % 2 or columns % 2:
            raise ValueError(
                f'medium {number}: got a grid of {frames} x {rows} x {columns}, wanted 1 to '
                f'{FRAMES} frames and even numbers of rows and columns'
            )
        place = np.indices((frames, rows, columns)).reshape(3, -1)
        size = place.shape[1]
        same = np.full((4, size), [[number + 1], [rows], [columns], [int(frames > 1)]])
        parts.append(np.concatenate([same[:1], place, same[1:]]))
        index = start + np.arange(size).reshape(frames, rows // 2, 2, columns // 2, 2)
        index = index.transpose(1, 3, 2, 4, 0).reshape(-1, CORNERS, frames)
        merged.append(np.pad(index, ((0, 0), (0, 0), (0, FRAMES - frames)), constant_values=-1))
        start += size
    fields = np.concatenate(parts, axis=1) if parts else np.zeros((7, 0), int)
    index = np.concatenate(merged) if merged else np.zeros((0, CORNERS, FRAMES), int)
    for name, got, most in (('patches', start, num_patches), ('rows', len(index), num_rows)):
        if most is not None and got > most:
            raise ValueError(f'media: got {got} {name}, wanted at most {most}')
    fields = np.pad(fields, ((0, 0), (0, (num_patches or start) - start)))
    missing = (num_rows or len(index)) - len(index)
    index = np.pad(index, ((0, missing), (0, 0), (0, 0)), constant_values=-1)
    return Media(*fields.astype(np.int32), index.astype(np.int32))


def _norm(x: jax.Array, params: Params, eps: float) -> jax.Array:
    if 'bias' not in params:
        return rms_norm(x, params['weight'], eps)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * params['weight'] + params['bias']).astype(x.dtype)


def _linear(x: jax.Array, params: Params) -> jax.Array:
    y = project(x, params['weight'])
    return y + params['bias'].astype(y.dtype) if 'bias' in params else y


def _taps(
    place: jax.Array, count: jax.Array, size: int, cubic: bool, wide: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Where a table of `size` is read for place `place` of `count`: indices and weights [P, n].

    Half-pixel centres, edges repeated. cubic: with a = -0.75, as PyTorch's.
    """
    source = (place.astype(wide) + 0.5) * size / jnp.maximum(count, 1) - 0.5
    if not cubic:
        source = jnp.clip(source, 0, size - 1)
        low = jnp.floor(source)
        part = source - low
        index, weight = jnp.stack([low, low + 1], -1), jnp.stack([1 - part, part], -1)
    else:
        low = jnp.floor(source)
        distance = jnp.abs(source[:, None] - (low[:, None] + jnp.arange(-1, 3)))
        a, x = -0.75, distance
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((x - 5) * x + 8) * x * a - 4 * a
        index, weight = low[:, None] + jnp.arange(-1, 3), jnp.where(x <= 1, near, far)
    return jnp.clip(index, 0, size - 1).astype(jnp.int32), weight


def positions(table: jax.Array, media: Media, config: VisionConfig) -> jax.Array:
    """[P, D] float32 that is added to each patch: the table at its place, and its frame's waves."""
    cubic = config.pos_emb_interpolation_mode == 'bicubic'
    wide = jnp.promote_types(table.dtype, jnp.float32)
    table = jnp.asarray(table, wide)
    rows, row_weights = _taps(media.row, media.height, table.shape[0], cubic, wide)
    columns, column_weights = _taps(media.column, media.width, table.shape[1], cubic, wide)
    total = jnp.zeros((len(media.row), table.shape[-1]), table.dtype)
    for i in range(rows.shape[1]):
        for j in range(columns.shape[1]):
            weight = row_weights[:, i] * column_weights[:, j]
            total += weight[:, None] * table[rows[:, i], columns[:, j]]
    half = table.shape[-1] // 2
    angles = media.frame[:, None] * 10000.0 ** (-jnp.arange(half, dtype=wide) / half)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return total + jnp.where(media.moves[:, None] > 0, waves, 0)


def rotations(media: Media, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [P, head_dim / 2]: pairs 2m turn by the column, pairs 2m + 1 by the row."""
    frequencies = 10000.0 ** (-4.0 * jnp.arange(head_dim // 4) / head_dim)
    both = jnp.stack([media.column, media.row], axis=-1)[:, None, :] * frequencies[:, None]
    angles = both.reshape(len(media.row), head_dim // 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [P, H, K] with neighbouring channels turned as pairs, in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(*x.shape[:-1], -1, 2)
    a, b = wide[..., 0], wide[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _blocks(x: jax.Array, fill: int = 0) -> jax.Array:
    """[P, ...] -> [blocks, BLOCK or P, ...], padded at the end."""
    size = min(BLOCK, len(x))
    padding = ((0, -len(x) % size), *[(0, 0)] * (x.ndim - 1))
    return jnp.pad(x, padding, constant_values=fill).reshape(-1, size, *x.shape[1:])


def media_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    medium: jax.Array,
    key_medium: jax.Array | None = None,
) -> jax.Array:
    """Attention of patches within their media, blocks of scores at a time.

    Blocks of keys of other media than a block of queries are passed over.

    Args:
      q: [P, H, K]. k, v: [S, H, K].
      medium: [P], 0 on padding, which comes last and sees nothing. key_medium: [S]; None: the same.

    Returns:
      [P, H, K], 0 on padding.
    """
    count, num_heads, width = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    key_medium = medium if key_medium is None else key_medium
    # No key has the number that padding has among the queries.
    own_ids = _blocks(jnp.where(medium > 0, medium, PADDING), PADDING)
    ids = _blocks(jnp.where(key_medium > 0, key_medium, PADDING + 1), PADDING + 1)
    queries, keys, values = _blocks(q), _blocks(k), _blocks(v)

    @jax.checkpoint
    def of_queries(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, own = block

        def meet(carry: Any, block: Any) -> Any:
            top, total, mixed = carry
            k, v, ids = block
            scores = jnp.einsum('qhk,shk->hqs', q, k, preferred_element_type=wide) * width**-0.5
            scores = jnp.where(own[:, None] == ids, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=-1)
            read = jnp.einsum(
                'hqs,shk->hqk', weights.astype(v.dtype), v, preferred_element_type=wide
            )
            return new_top, total, mixed * shrink[..., None] + read

        def step(carry: Any, block: Any) -> Any:
            ids = block[-1]
            meets = (ids[0] <= own[-1]) & (own[0] <= ids[-1])
            return lax.cond(meets, meet, lambda carry, block: carry, carry, block), None

        shape = num_heads, len(q)
        start = jnp.full(shape, -1e30, wide), jnp.zeros(shape, wide)
        start = *start, jnp.zeros((*shape, width), wide)
        (_, total, mixed), _ = lax.scan(jax.checkpoint(step), start, (keys, values, ids))
        total = jnp.where(total > 0, total, 1)
        return jnp.moveaxis(mixed / total[..., None], 0, 1).astype(q.dtype)

    out = lax.map(of_queries, (queries, own_ids))
    return out.reshape(-1, num_heads, width)[:count]


@jax.named_scope('vision_tower')
def vision_tower(
    params: Params,
    pixels: jax.Array,
    media: Media,
    config: VisionConfig,
    dtype: jnp.dtype,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """[N, 4, D]: of each row for the text its four corners, averaged over frames.

    Args:
      params: the `vision_tower` leaves. pixels: [P, 3, size, size], normalised.
      axes: of the mesh, whose chips each have a part of the patches and of `media.merged`, which
        counts patches over all parts.
    """

    def whole(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, axes, tiled=True) if axes else x

    own = params['patch_embed']
    x = _linear(pixels.reshape(len(pixels), -1).astype(dtype), own['proj'])
    x = x + positions(own['pos_emb'], media, config).astype(dtype)
    width = config.qkv_hidden_size // config.num_attention_heads
    cos, sin = rotations(media, width)
    key_medium = whole(media.medium)

    def block(x: jax.Array, own: Params) -> tuple[jax.Array, None]:
        qkv = _linear(_norm(x, own['norm0'], config.norm_eps), own['wqkv'])
        q, k, v = jnp.moveaxis(qkv.reshape(len(x), 3, -1, width), 1, 0)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        o = media_attention(q, whole(k), whole(v), media.medium, key_medium)
        x = x + _linear(o.reshape(len(x), -1), own['wo'])
        hidden = _linear(_norm(x, own['norm1'], config.norm_eps), own['mlp']['fc0'])
        return x + _linear(jax.nn.gelu(hidden, approximate=True), own['mlp']['fc1']), None

    x, _ = lax.scan(jax.checkpoint(block), x, params['blocks'])
    x = whole(_norm(x, params['final_layernorm'], config.norm_eps))
    there = media.merged >= 0
    frames = jnp.where(there[..., None], x[jnp.maximum(media.merged, 0)], 0)
    frames = frames.astype(jnp.promote_types(dtype, jnp.float32))
    count = jnp.maximum(jnp.sum(there, axis=-1, keepdims=True), 1)
    return (jnp.sum(frames, axis=2) / count).astype(dtype)


@jax.named_scope('mm_projector')
def mm_projector(params: Params, corners: jax.Array, config: VisionConfig) -> jax.Array:
    """Corners [N, 4, D] as rows [N, text width] in place of embeddings."""
    eps = config.projector_eps
    if 'pre_norm' in params:
        corners = _norm(corners, params['pre_norm'], eps)
    hidden = _linear(corners.reshape(len(corners), -1), params['proj_0'])
    out = _linear(jax.nn.gelu(hidden, approximate=False), params['proj_2'])
    return _norm(out, params['post_norm'], eps) if 'post_norm' in params else out


def media_rows(params: Params, inputs: MediaInputs, config: ModelConfig, run: Run) -> jax.Array:
    """[B, N, D]: what takes the place of the embeddings of media tokens; one row at a time.

    A row without media costs nothing, unless chips share its tokens.

    Args:
      params: the model's. inputs: where chips share the tokens of a row, this chip's part of each
        row's patches and of its `merged`; what is returned is whole.
    """
    leaves = vision_leaves(config.vision, config.hidden_size)
    own = gathered({name: params[name] for name in VISION}, leaves, run)
    shared = run.parallel is not None and run.parallel.num_shards > 1
    axes = run.parallel.rules.tokens if shared else ()

    def seen(row: MediaInputs) -> jax.Array:
        arguments = row.pixels, row.media, config.vision, run.dtype, axes
        corners = vision_tower(own['vision_tower'], *arguments)
        rows = mm_projector(own['mm_projector'], corners, config.vision)
        return lax.all_gather(rows, axes, tiled=True) if axes else rows

    def of_row(row: MediaInputs) -> jax.Array:
        if axes:
            # The chips of a row would have to agree; they exchange patches inside.
            return seen(row)
        unseen = jnp.zeros((len(row.media.merged), config.hidden_size), run.dtype)
        return lax.cond(jnp.any(row.media.medium > 0), seen, lambda row: unseen, row)

    if run.remat != 'none' and len(inputs.pixels) > 1:
        of_row = jax.checkpoint(of_row)
    return lax.map(of_row, inputs)
