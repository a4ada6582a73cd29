"""How depth folds into scans: equal blocks and equal runs of layers, found from the layer kinds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from k3jax.config import ModelConfig


class LayerSpec(NamedTuple):
    """What one layer is: its token mixer, its feed-forward kind, its attention-residual block."""

    mixer: Literal['kda', 'mla']
    ffn: Literal['dense', 'moe']
    attn_res_block: int  # 0 where the model has none


def layer_specs(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """One spec a layer, 0-based."""
    size = config.attn_res_block_size or config.num_hidden_layers
    return tuple(
        LayerSpec(
            'kda' if config.is_kda(layer) else 'mla',
            'moe' if config.is_moe(layer) else 'dense',
            layer // size,
        )
        for layer in range(config.num_hidden_layers)
    )


def block_ends(config: ModelConfig) -> tuple[int, ...]:
    """The 0-based layers that attention-residual blocks end with; the last alone without these."""
    last = config.num_hidden_layers - 1
    size = config.attn_res_block_size or config.num_hidden_layers
    return (*range(size - 1, last, size), last)


class LayerRun(NamedTuple):
    """`count` equal layers in a row, the first at `offset` in its segment."""

    offset: int
    count: int

    @property
    def name(self) -> str:
        return f'layer_{self.offset}'


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` copies in a row of the layers `specs`, the first at `offset` in its block.

    folded: equal layers beside each other are one body that is repeated.
    """

    offset: int
    specs: tuple[LayerSpec, ...]
    repeats: int
    folded: bool

    @property
    def name(self) -> str:
        return f'segment_{self.offset}'

    @property
    def runs(self) -> tuple[LayerRun, ...]:
        return _runs(_kinds(self.specs), self.folded)


@dataclasses.dataclass(frozen=True)
class Block:
    """`repeats` attention-residual blocks in a row with the same segments, from layer `first`."""

    first: int
    segments: tuple[Segment, ...]
    repeats: int

    @property
    def num_layers(self) -> int:
        return sum(len(s.specs) * s.repeats for s in self.segments)

    @property
    def name(self) -> str:
        return f'block_{self.first}'


Plan = tuple[Block, ...]


def _kinds(specs: tuple[LayerSpec, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((spec.mixer, spec.ffn) for spec in specs)


def _runs(kinds: tuple[tuple[str, str], ...], folded: bool) -> tuple[LayerRun, ...]:
    runs: list[LayerRun] = []
    for offset, kind in enumerate(kinds):
        if folded and runs and kinds[runs[-1].offset] == kind:
            runs[-1] = runs[-1]._replace(count=runs[-1].count + 1)
        else:
            runs.append(LayerRun(offset, 1))
    return tuple(runs)


def _segments(specs: tuple[LayerSpec, ...], scan: bool) -> tuple[Segment, ...]:
    """Splits one block so that the fewest layer bodies remain."""
    kinds, count = _kinds(specs), len(specs)

    def cheapest(start: int, known: dict[int, tuple[int, tuple[Segment, ...]]]):
        if start == count:
            return 0, ()
        if start in known:
            return known[start]
        best = None
        for period in range(1, count - start + 1 if scan else 2):
            repeats = 1
            body = kinds[start : start + period]
            while scan and kinds[start + repeats * period :][:period] == body:
                repeats += 1
            for used in {1, repeats}:
                tail = cheapest(start + used * period, known)
                cost = len(_runs(body, scan)) + tail[0], 1 + len(tail[1])
                if best is None or cost < best[0]:
                    head = Segment(start, specs[start : start + period], used, scan)
                    best = cost, (head, *tail[1])
        known[start] = best[0][0], best[1]
        return known[start]

    return cheapest(0, {})[1]


def depth_plan(config: ModelConfig, *, scan: bool = True) -> Plan:
    """The layers as blocks of segments; without `scan`, every layer stands alone."""
    specs = layer_specs(config)
    size = config.attn_res_block_size or config.num_hidden_layers
    blocks: list[Block] = []
    for first in range(0, len(specs), size):
        segments = _segments(specs[first : first + size], scan)
        previous = blocks[-1] if blocks else None
        if scan and previous and _shape(previous.segments) == _shape(segments):
            blocks[-1] = dataclasses.replace(previous, repeats=previous.repeats + 1)
        else:
            blocks.append(Block(first, segments, 1))
    return tuple(blocks)


def _shape(segments: tuple[Segment, ...]) -> tuple[Any, ...]:
    return tuple((s.offset, s.repeats, _kinds(s.specs)) for s in segments)


class Stack(NamedTuple):
    """Where layers lie in the model's tree: a path, and the layer held at each leading index."""

    path: tuple[str, ...]
    layers: np.ndarray  # shape = the leading axes of every leaf at `path`


def stacks(plan: Plan) -> Iterator[Stack]:
    """Every layer body of the plan, in order."""
    for block in plan:
        for segment in block.segments:
            for run in segment.runs:
                layers = np.arange(block.repeats)[:, None, None] * block.num_layers
                layers = layers + np.arange(segment.repeats)[:, None] * len(segment.specs)
                layers = layers + np.arange(run.count)
                layers = layers + block.first + segment.offset + run.offset
                counts = block.repeats, segment.repeats, run.count
                single = tuple(axis for axis, count in enumerate(counts) if count == 1)
                yield Stack((block.name, segment.name, run.name), layers.squeeze(single))


def bodies(config: ModelConfig, plan: Plan) -> Iterator[Stack]:
    """`stacks`, and the layer of multi-token prediction, which counts as the one after the last."""
    yield from stacks(plan)
    if config.num_nextn_predict_layers:
        yield Stack(('mtp', 'layer'), np.array(config.num_hidden_layers))


def at(tree: Any, path: tuple[str, ...]) -> Any:
    """What lies at `path` in nested dicts."""
    return functools.reduce(lambda node, name: node[name], path, tree)


def _map_together(join: Callable[[list[Any]], Any], trees: list[Any]) -> Any:
    if isinstance(trees[0], dict):
        return {name: _map_together(join, [tree[name] for tree in trees]) for name in trees[0]}
    return join(trees)


def gather_layers(
    params: dict[str, Any], plan: Plan, join: Callable[[list[Any], tuple[int, ...]], Any]
) -> dict[str, Any]:
    """The on-disk tree (`layers_0` ...) in the shape of the model's own tree.

    join: makes one leaf of equal leaves of several layers, given the leading axes it stands for.
    """
    out = {name: leaf for name, leaf in params.items() if not name.startswith('layers_')}
    for path, layers in stacks(plan):
        node = out
        for name in path[:-1]:
            node = node.setdefault(name, {})
        trees = [params[f'layers_{layer}'] for layer in layers.flat]
        node[path[-1]] = _map_together(lambda leaves, s=layers.shape: join(leaves, s), trees)
    return out


def stack_params(
    params: dict[str, Any], plan: Plan, stack: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """The on-disk tree as the parameters that the model takes.

    stack: joins equal leaves on a new leading axis (`np.stack`, `jnp.stack`).
    """

    def join(leaves: list[Any], lead: tuple[int, ...]) -> Any:
        return stack(leaves).reshape(*lead, *leaves[0].shape) if lead else leaves[0]

    return gather_layers(params, plan, join)


def unstack_params(params: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Inverse of `stack_params`."""
    names = {block.name for block in plan}
    out = {name: leaf for name, leaf in params.items() if name not in names}
    for path, layers in stacks(plan):
        node = at(params, path)
        for index, layer in np.ndenumerate(layers):
            out[f'layers_{layer}'] = _map_together(lambda leaf, i=index: leaf[0][i], [node])
    return out
