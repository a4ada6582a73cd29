"""How well a model finds facts in its context: accuracy by the window's length and their depth."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from k3jax.data.needles import Needles
from k3jax.model.kimi import Kimi, head, lm_head

DECILES = 10


class Recall(NamedTuple):
    """Of windows of one length.

    right: [N, m] bool, whether each answer is the most likely token. depths: [N, m], as Window's.
    """

    length: int
    right: np.ndarray
    depths: np.ndarray

    def by_depth(self) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy (nan where nothing was asked), and how many were asked, in each tenth: [10]."""
        decile = np.minimum((self.depths * DECILES).astype(int), DECILES - 1).ravel()
        asked = np.bincount(decile, minlength=DECILES)
        right = np.bincount(decile, weights=self.right.ravel(), minlength=DECILES)
        return np.where(asked, right / np.maximum(asked, 1), np.nan), asked

    def report(self) -> dict[str, Any]:
        """What a JSON file says of it; None where nothing was asked."""
        accuracy, asked = self.by_depth()
        return {
            'length': self.length,
            'windows': len(self.right),
            'asked': int(self.right.shape[1]),
            'accuracy': float(self.right.mean()),
            'whole_answers': float(self.right.all(axis=1).mean()),
            'by_depth': [None if np.isnan(x) else float(x) for x in accuracy],
            'asked_by_depth': asked.tolist(),
        }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _most_likely(
    model: Kimi, num_ids: int, params: Any, tokens: jax.Array, places: jax.Array
) -> jax.Array:
    """[B, m] the most likely next token after each of `places`; only there are logits made."""
    hidden = model.apply({'params': params}, tokens, jnp.ones_like(tokens)).hidden
    hidden = jnp.take_along_axis(hidden, places[..., None], axis=1)
    logits = head(lm_head(model, params), hidden.reshape(-1, hidden.shape[-1]))
    return jnp.argmax(logits[:, :num_ids], axis=-1).reshape(places.shape)


def measure(
    model: Kimi,
    params: Any,
    needles: Needles,
    num_windows: int,
    *,
    tokens_at_once: int = 1 << 16,
    on_batch: Callable[[int], None] = lambda done: None,
) -> Recall:
    """Asks about the first windows; each answer is predicted after the true ones before it.

    Args:
      tokens_at_once: of a batch, or one window; all batches are of one size.
      on_batch: called after each with the number of windows done.

    Raises:
      ValueError: the windows are longer than the model's positions.
    """
    length = needles.config.sequence_length
    limit = model.config.max_position_embeddings
    if length > limit:
        raise ValueError(
            f'length: got {length} tokens, wanted at most {limit} (model.max_position_embeddings)'
        )
    most = max(1, tokens_at_once // length)
    size = max(n for n in range(1, num_windows + 1) if num_windows % n == 0 and n <= most)
    right, depths = [], []
    for start in range(0, num_windows, size):
        windows = [needles[i] for i in range(start, start + size)]
        tokens, answers = (
            np.stack([getattr(w, name) for w in windows]) for name in ('tokens', 'answers')
        )
        num_ids = needles.tokenizer.vocab_size
        found = _most_likely(model, num_ids, params, tokens, answers.astype(np.int32) - 1)
        right.append(np.asarray(found) == np.take_along_axis(tokens, answers, axis=1))
        depths.append(np.stack([window.depths for window in windows]))
        on_batch(start + size)
    return Recall(length, np.concatenate(right), np.concatenate(depths))


def markdown(reports: Sequence[dict[str, Any]]) -> str:
    """One row a length, one column a tenth of the depth."""
    tenths = ' | '.join(f'{i}-{i + 1}' for i in range(DECILES))
    lines = [f'| tokens | windows | accuracy | whole answers | {tenths} |', '|---' * 14 + '|']
    for row in reports:
        shown = ['-' if x is None else f'{x:.2f}' for x in row['by_depth']]
        lines.append(
            f'| {row["length"]:,} | {row["windows"]} | {row["accuracy"]:.3f} | '
            f'{row["whole_answers"]:.3f} | {" | ".join(shown)} |'
        )
    return '\n'.join(lines)


def plot(reports: Sequence[dict[str, Any]]) -> bytes:
    """PNG: accuracy as a colour, over lengths and depths."""
    grid = np.array([[np.nan if x is None else x for x in row['by_depth']] for row in reports])
    figure = Figure(figsize=(1.6 + 0.9 * len(reports), 4.2), layout='constrained')
    axes = figure.subplots()
    image = axes.imshow(grid.T, vmin=0, vmax=1, cmap='RdYlGn', aspect='auto')
    axes.set_xticks(range(len(reports)), [f'{row["length"]:,}' for row in reports])
    axes.set_yticks(range(DECILES), [f'{10 * i}-{10 * (i + 1)}%' for i in range(DECILES)])
    axes.set(xlabel='tokens of a window', ylabel='depth of the fact', title='Facts found')
    for (x, y), value in np.ndenumerate(grid):
        if np.isfinite(value):
            axes.text(x, y, f'{value:.2f}', ha='center', va='center', fontsize=8)
    figure.colorbar(image, label='accuracy')
    png = io.BytesIO()
    figure.savefig(png, format='png', dpi=120)
    return png.getvalue()
