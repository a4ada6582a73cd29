"""How parameters move: Muon or AdamW on a warm-up and cosine schedule; some leaves are held."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import ConfigError, ModelConfig, MuonConfig, OptimizerConfig
from k3jax.model.kimi import Kimi
from k3jax.model.layout import Leaf
from k3jax.model.param import map_leaves
from k3jax.train.host_memory import on_chip, sent_home, waits
from k3jax.train.muon import Blocks, MuonState, accumulated, directions_on_mesh

# Leaves ordered after each other: while one is computed, the next may come from the host's memory
# or the last go there.
LEAVES_AT_ONCE = 2
WHOLE_BYTES = 2**30  # of a parameter on a chip; a larger one that waits comes in parts

# What a parameter is to the optimizer. heads: a matrix whose rows are those of one head after the
# other; keys_and_values: so, and in each head first the keys' rows; matrix: a single one, or one
# for each expert; other: no matrix, or a table of vectors; held: set by another rule.
Group = Literal['heads', 'keys_and_values', 'matrix', 'router', 'other', 'held']
Label = Literal['muon', 'decayed', 'plain', 'held']

# Every parameter of the family. Source: report section 2.5 for the heads of queries, keys and
# values; what is not said there is as in Moonlight and K2.
_NAMES: dict[Group, str] = {
    'heads': 'q_proj k_proj v_proj q_b_proj wqkv.weight',
    'keys_and_values': 'kv_b_proj',
    'matrix': """
        f_a_proj f_b_proj b_proj o_proj g_proj g_a_proj g_b_proj kv_a_proj_with_mqa q_a_proj
        gate_proj up_proj down_proj routed_expert_down_proj routed_expert_up_proj w1 w2 w3
        eh_proj fc
        wo.weight fc0.weight fc1.weight proj_0.weight proj_2.weight""",
    'router': 'gate',
    'other': """
        embed_tokens lm_head norm enorm hnorm input_layernorm post_attention_layernorm
        kv_a_layernorm q_a_layernorm o_norm routed_expert_norm A_log dt_bias q_conv1d k_conv1d
        v_conv1d
        self_attention_res_norm self_attention_res_proj mlp_res_norm mlp_res_proj
        output_attn_res_norm output_attn_res_proj
        proj.weight proj.bias pos_emb norm0.weight norm0.bias norm1.weight norm1.bias wqkv.bias
        wo.bias fc0.bias fc1.bias final_layernorm.weight final_layernorm.bias proj_0.bias
        proj_2.bias pre_norm.weight pre_norm.bias post_norm.weight""",
    'held': """
        e_score_correction_bias w1_packed w2_packed w3_packed w1_scale w2_scale w3_scale""",
}
_GROUPS: dict[str, Group] = {
    name: group for group, names in _NAMES.items() for name in names.split()
}
assert set(_NAMES) == set(get_args(Group))


def group_of(name: str) -> Group:
    """What the parameter of this name is to the optimizer.

    Raises:
      ConfigError: no group has it.
    """
    if name not in _GROUPS:
        raise ConfigError(f'optimizer: no group has the parameter {name!r}; add it to one in optim')
    return _GROUPS[name]


def _label(name: str, leaf: Leaf, config: OptimizerConfig) -> Label:
    group = group_of(name)
    if group == 'held':
        return 'held'
    routed = group != 'router' or config.muon.router
    if config.name == 'muon' and group != 'other' and routed:
        return 'muon'
    return 'decayed' if leaf.init == 'normal' and len(leaf.shape) > 1 else 'plain'


def blocks_of(name: str, leaf: Leaf, model: ModelConfig, muon: MuonConfig) -> Blocks:
    """The matrices in a leaf that Muon moves."""
    rows, group = leaf.shape[-2], group_of(name)
    if not muon.per_head or group not in ('heads', 'keys_and_values'):
        return Blocks(1, (rows,))
    if name == 'wqkv.weight':
        heads = 3 * model.vision.num_attention_heads
    elif leaf.axes[-2] == 'kda_heads':
        heads = model.linear_attn_config.num_heads
    else:
        heads = model.num_attention_heads
    if rows % heads:
        raise ConfigError(f'optimizer: {name} has {rows} rows, wanted a multiple of {heads} heads')
    if group == 'keys_and_values' and muon.split_kv_b:
        return Blocks(heads, (model.qk_nope_head_dim, model.v_head_dim))
    return Blocks(heads, (rows // heads,))


def learning_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Linear from 0 over `warmup_steps`, then cosine to the final ratio at `num_steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.learning_rate * config.final_learning_rate_ratio,
    )


class AdamState(NamedTuple):
    """mu, nu: the moments, like the parameter."""

    mu: jax.Array
    nu: jax.Array


Correction = Callable[[jax.Array], jax.Array]
LeafState = AdamState | MuonState | optax.EmptyState


@dataclasses.dataclass(frozen=True)
class Rule:
    """What moves a leaf.

    blocks: the matrices in it, where that is Muon. spec: how a mesh cuts it. lead: its leading axes
    that number layers.
    """

    label: Label
    blocks: Blocks | None = None
    spec: PartitionSpec | None = None
    lead: int = 0


class _Scalars(NamedTuple):
    """What the update of every leaf takes."""

    step: jax.Array
    rate: jax.Array
    norm: jax.Array
    count: jax.Array | int
    undone: jax.Array | None


class _Leaf(NamedTuple):
    """A leaf, or a part of one, on its way through the update.

    correction: what is then done to the parameter. home: its abstract parameter and state, if they
    may have to be sent to the host's memory.
    """

    rule: Rule
    correction: Correction | None
    home: tuple[Any, ...]
    grad: jax.Array
    param: jax.Array
    state: LeafState

    def having(self, grad: jax.Array, param: jax.Array, state: LeafState) -> _Leaf:
        return self._replace(grad=grad, param=param, state=state)

    @property
    def matrices(self) -> tuple[Any, ...] | None:
        """What leaves that Muon moves together have alike; None for others."""
        rule, param = self.rule, self.param
        if rule.label != 'muon':
            return None
        cut = None if rule.spec is None else tuple(rule.spec[-2:])
        return rule.blocks, cut, param.shape[-2:], param.dtype, self.grad.dtype, waits(param)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Global-norm clipping, then each leaf by its own rule; weight decay on matrices.

    rules: a tree of Rule like the parameters. mesh: None on a single chip.
    """

    config: OptimizerConfig
    schedule: optax.Schedule
    rules: Any
    mesh: Mesh | None = None

    def init(self, params: Any) -> Any:
        """The state before the first step: a LeafState at each leaf of a tree like params."""

        def fresh(rule: Rule, param: jax.Array) -> LeafState:
            match rule.label:
                case 'held':
                    return optax.EmptyState()
                case 'muon':
                    return MuonState(jnp.zeros_like(param))
            return AdamState(jnp.zeros_like(param), jnp.zeros_like(param))

        return jax.tree.map(fresh, self.rules, params)

    def update(
        self,
        grads: Any,
        opt_state: Any,
        params: Any,
        step: jax.Array,
        *,
        norm: jax.Array,
        count: jax.Array | int = 1,
        corrections: Mapping[tuple[str, ...], Correction] = MappingProxyType({}),
        undone: jax.Array | None = None,
        placed: tuple[Any, Any] | None = None,
    ) -> tuple[Any, Any]:
        """The parameters after a step, and the optimizer's state.

        Matrices that are alike are moved by Muon together. What waits in the host's memory, or is
        moved by Muon, is not begun before the last but LEAVES_AT_ONCE of these is done, and sent
        home: neither all states nor all temporaries are on a chip together. A large leaf comes and
        goes in parts of some layers. Other leaves XLA may order as it likes.

        Args:
          grads: a tree like params, sums of `count` gradients, of any float dtype.
          opt_state, params: what `init` or the last update gave; may wait in the host's memory.
          step: int32, updates done before.
          norm: float32, of all gradients divided by `count`.
          corrections: what is then done to parameters, by their path.
          undone: bool, whether all stays as it was; None: it does not.
          placed: abstract parameters and state, where parts of them wait in the host's memory.
        """
        rules, tree = jax.tree_util.tree_flatten_with_path(self.rules)
        columns = map(tree.flatten_up_to, (grads, params, opt_state, *(placed or ())))
        leaves = []
        for (path, rule), grad, param, state, *home in zip(rules, *columns, strict=True):
            correction = corrections.get(tuple(key.key for key in path))
            leaves.append(_Leaf(rule, correction, tuple(home), grad, param, state))
        scalars = _Scalars(step, self.schedule(step), norm, count, undone)
        moved = [(leaf.param, leaf.state) for leaf in leaves]
        done: list[Any] = [norm] * LEAVES_AT_ONCE
        for group in self._together(leaves):
            members = [leaves[i] for i in group]
            ordered = members[0].rule.label == 'muon' or waits(members[0].param)
            # With nothing to wait for, too: what XLA fuses, and so every last bit, is then the same
            # wherever the state lies.
            arrays = [(leaf.grad, leaf.param, leaf.state) for leaf in members]
            arrays, _ = lax.optimization_barrier((arrays, done[-LEAVES_AT_ONCE] if ordered else ()))
            members = [leaf.having(*new) for leaf, new in zip(members, arrays, strict=True)]
            if axes := self._parts(members[0]):
                results = [self._moved_in_parts(members[0], axes, scalars)]
            else:
                results = self._moved(members, scalars)
            for i, result in zip(group, results, strict=True):
                moved[i] = result
            if ordered:
                done.append(results)
        return tuple(map(tree.unflatten, zip(*moved, strict=True)))

    def _bytes(self, leaf: _Leaf) -> int:
        """Of its parameter on a chip."""
        shape = leaf.param.shape
        if self.mesh is not None and leaf.rule.spec is not None:
            shape = NamedSharding(self.mesh, leaf.rule.spec).shard_shape(shape)
        return math.prod(shape) * leaf.param.dtype.itemsize

    def _together(self, leaves: Sequence[_Leaf]) -> list[list[int]]:
        """The leaves that move, by their numbers: like matrices together, others alone."""
        groups: list[list[int]] = []
        last: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if leaf.rule.label == 'held' and leaf.correction is None:
                continue
            kind = leaf.matrices
            group = None if kind is None else last.get(kind)
            if group and sum(self._bytes(leaves[j]) for j in (*group, i)) <= WHOLE_BYTES:
                group.append(i)
                continue
            groups.append([i])
            last[kind] = groups[-1]
        return groups

    def _parts(self, leaf: _Leaf) -> int:
        """How many leading axes number the parts in which a leaf comes, 0 where it comes whole."""
        if not waits(leaf.param) or leaf.correction is not None:
            return 0
        size, axes = self._bytes(leaf), 0
        while size > WHOLE_BYTES and axes < leaf.rule.lead:
            size //= leaf.param.shape[axes]
            axes += 1
        return axes

    def _moved_in_parts(
        self, leaf: _Leaf, axes: int, scalars: _Scalars
    ) -> tuple[jax.Array, LeafState]:
        lead = leaf.param.shape[:axes]

        def start(i: jax.Array, x: jax.Array) -> tuple[jax.Array | int, ...]:
            return (*jnp.unravel_index(i, lead), *[0] * (x.ndim - axes))

        def move(i: jax.Array, arrays: Any) -> Any:
            part = jax.tree.map(
                lambda x: lax.dynamic_slice(x, start(i, x), (1,) * axes + x.shape[axes:]),
                (leaf.grad, *arrays),
            )
            (new,) = self._moved([leaf.having(*part)], scalars)
            return jax.tree.map(
                lambda x, y: lax.dynamic_update_slice(x, y, start(i, x)), arrays, new
            )

        return lax.fori_loop(0, math.prod(lead), move, (leaf.param, leaf.state))

    def _moved(
        self, leaves: Sequence[_Leaf], scalars: _Scalars
    ) -> list[tuple[jax.Array, LeafState]]:
        """Leaves of one kind, or a part of one, and their states after the step."""
        leaves = [leaf.having(leaf.grad, *on_chip((leaf.param, leaf.state))) for leaf in leaves]
        results = []
        for leaf, (direction, state) in zip(leaves, self._directions(leaves, scalars), strict=True):
            param = leaf.param
            if leaf.rule.label in ('muon', 'decayed'):
                direction = direction + self.config.weight_decay * param
            if leaf.rule.label != 'held':
                param = (param - scalars.rate * direction).astype(param.dtype)
            if leaf.correction is not None:
                param = leaf.correction(param)
            new = param, state
            if scalars.undone is not None:
                before = leaf.param, leaf.state
                new = jax.tree.map(functools.partial(jnp.where, scalars.undone), before, new)
            results.append(sent_home(new, leaf.home) if leaf.home else new)
        return results

    def _directions(
        self, leaves: Sequence[_Leaf], scalars: _Scalars
    ) -> list[tuple[jax.Array | None, LeafState]]:
        """Where each leaf moves, before decay and learning rate, and its state; None if held."""
        config, rule = self.config, leaves[0].rule
        if rule.label == 'held':
            return [(None, leaf.state) for leaf in leaves]
        grads = (leaf.grad.astype(jnp.float32) / scalars.count for leaf in leaves)
        grads = [_clipped(grad, scalars.norm, config.grad_clip_norm) for grad in grads]
        if rule.label == 'muon':
            states = [leaf.state for leaf in leaves]
            pairs = [accumulated(*pair, config.muon) for pair in zip(grads, states, strict=True)]
            ahead, states = zip(*pairs, strict=True)
            specs = None if self.mesh is None else [leaf.rule.spec for leaf in leaves]
            found = directions_on_mesh(ahead, rule.blocks, config.muon, self.mesh, specs)
            return list(zip(found, states, strict=True))
        adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
        results = []
        for grad, leaf in zip(grads, leaves, strict=True):
            state = optax.ScaleByAdamState(scalars.step, leaf.state.mu, leaf.state.nu)
            direction, new = adam.update(grad, state)
            results.append((direction, AdamState(new.mu, new.nu)))
        return results


def _clipped(grad: jax.Array, norm: jax.Array, most: float) -> jax.Array:
    """As `optax.clip_by_global_norm`, of a norm that is known."""
    return jnp.where(norm < most, grad, grad / norm * most)


def rule_of(name: str, leaf: Leaf, model: ModelConfig, config: OptimizerConfig) -> Rule:
    """What moves a parameter of one layer, on a single chip.

    Raises:
      ConfigError: no group has it, or its rows do not divide by the heads.
    """
    label = _label(name, leaf, config)
    if label != 'muon':
        return Rule(label)
    return Rule(label, blocks_of(name, leaf, model, config.muon))


def make_optimizer(
    config: OptimizerConfig, num_steps: int, model: Kimi, mesh: Mesh | None = None
) -> Optimizer:
    """By the group of each of the model's parameters; mesh: that its `run.parallel` cuts.

    Raises:
      ConfigError: no group has a parameter, or its rows do not divide by the heads.
    """
    parallel = model.run.parallel

    def rule(name: str, leaf: Leaf, lead: tuple[int, ...]) -> Rule:
        found = rule_of(name, leaf, model.config, config)
        if parallel is not None:
            spec = PartitionSpec(*[None] * len(lead), *parallel.spec(leaf))
            found = dataclasses.replace(found, spec=spec)
        return dataclasses.replace(found, lead=len(lead))

    rules = map_leaves(rule, model.config, model.plan)
    mesh = None if parallel is None else mesh
    return Optimizer(config, learning_rate(config, num_steps), rules, mesh)
