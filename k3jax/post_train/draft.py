"""How a draft is trained: its model writes, and the draft learns to guess what it wrote.

The model is frozen; no text but its own is learnt from. Source: report section 4.1.4.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from etils import epath

from k3jax.config import OptimizerConfig, QuantisationConfig, require
from k3jax.data.tokenizer import Tokenizer
from k3jax.files import open_whole
from k3jax.model.draft import draft_leaves, init_draft, ready_for_head, unrolled, with_taps
from k3jax.model.kimi import Kimi
from k3jax.model.layout import Leaf
from k3jax.post_train.rollout import rollout
from k3jax.serve.draft_folder import DRAFT_FILE, check_draft, stored_training, write_draft
from k3jax.serve.sampling import Choice
from k3jax.serve.speculative import Counts, generate_speculatively
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.lk_loss import SMALLEST, accepted_shares, lk_loss
from k3jax.train.metrics import MetricsWriter
from k3jax.train.optim import Optimizer, learning_rate, rule_of
from k3jax.train.quantise import quantised_leaves
from k3jax.train.state import TrainState

OWN_TEXT = 'own_text.npy'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """How a draft is fed, taught and moved. Source: report section 4.1.4, where it says so."""

    taps: tuple[
        int, ...
    ] = ()  # 0-based layers; (): ends of the first block, a middle one, the last
    unroll_steps: int = 7  # guesses in a row that are trained together
    step_decay: float = 1.0  # of the weight of each guess after the first; UNCONFIRMED
    quantisation: QuantisationConfig = QuantisationConfig()  # of the draft's routed experts
    num_texts: int = 512  # that the model writes
    text_length: int = 256  # tokens, with the prompt's
    prompt_length: int = 16  # tokens of the data that each text begins with
    temperature: float = 1.0  # at which they are written
    texts_at_once: int = 64
    num_steps: int = 600
    batch_size: int = 8  # texts a step
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup_steps=20)
    log_every: int = 20
    checkpoint_every: int = 200
    keep_checkpoints: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (
            'unroll_steps', 'num_texts', 'prompt_length', 'texts_at_once', 'num_steps',
            'batch_size', 'log_every', 'checkpoint_every', 'keep_checkpoints',
        )  # fmt: skip
        for name in counts:
            require(getattr(self, name) >= 1, name, getattr(self, name), '1 or more')
        require(0 < self.step_decay <= 1, 'step_decay', self.step_decay, 'a number in (0, 1]')
        require(
            self.text_length >= self.prompt_length + self.unroll_steps + 1,
            'text_length',
            self.text_length,
            f'at least {self.prompt_length + self.unroll_steps + 1} (prompt_length, unroll_steps '
            'and one more)',
        )
        require(
            self.num_texts >= self.batch_size, 'num_texts', self.num_texts,
            f'at least batch_size ({self.batch_size})',
        )  # fmt: skip
        require(
            self.optimizer.warmup_steps < self.num_steps, 'optimizer.warmup_steps',
            self.optimizer.warmup_steps, f'fewer than num_steps ({self.num_steps})',
        )  # fmt: skip
        require(0 < self.temperature < float('inf'), 'temperature', self.temperature, 'above 0')
        require(0 <= self.seed < 2**32, 'seed', self.seed, '0..2**32 - 1')


class Target(NamedTuple):
    """The model that a draft guesses for. tokenizer: None where there is none."""

    model: Kimi
    params: Any
    tokenizer: Tokenizer | None

    @property
    def num_ids(self) -> int:
        """Ids that stand for something."""
        known = self.tokenizer is not None
        return self.tokenizer.vocab_size if known else self.model.config.vocab_size


def write_texts(target: Target, prompts: Iterator[np.ndarray], config: DraftConfig) -> np.ndarray:
    """[num_texts, text_length] int32: prompts, each [prompt_length], and what the model adds."""
    choice = Choice(jnp.float32(config.temperature), jnp.float32(1.0), jnp.int32(target.num_ids))
    num_new, texts = config.text_length - config.prompt_length, []
    key, started = jax.random.key(config.seed), time.perf_counter()
    while sum(map(len, texts)) < config.num_texts:
        key, now = jax.random.split(key)
        begun = np.stack([next(prompts) for _ in range(config.texts_at_once)])
        arguments = target.model, target.params, begun, num_new, choice, now
        texts.append(np.asarray(rollout(*arguments)))
        done, pace = sum(map(len, texts)), time.perf_counter() - started
        logging.info('the model has written %d of %d texts (%.0f s)', done, config.num_texts, pace)
    return np.concatenate(texts)[: config.num_texts]


def texts_of_step(config: DraftConfig, step: int) -> np.ndarray:
    """[batch_size] int: which texts 0-based `step` learns from; each is met once an epoch."""
    in_epoch = config.num_texts // config.batch_size
    epoch, place = divmod(step, in_epoch)
    order = np.random.default_rng([config.seed, epoch]).permutation(config.num_texts)
    return order[place * config.batch_size : (place + 1) * config.batch_size]


def draft_loss(
    model: Kimi, config: DraftConfig, target: Any, draft: Any, tokens: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted mean over guesses of -log of their acceptance, and metrics.

    Args:
      model: with taps. target, draft: parameters of both.
      tokens: [B, T], a text a row.

    Returns:
      The loss, and `accepted` [J]: the mean acceptance of each guess in a row, given the text
      before it; `hopeless`: guesses whose acceptance is too small for a gradient.
    """
    output = jax.lax.stop_gradient(model.apply({'params': target}, tokens))
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    # A guess at a position is of the token after next: what the model says one later.
    said = jnp.roll(output.hidden, -1, axis=1)
    place = jnp.arange(tokens.shape[1])

    def taught(x: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        share = accepted_shares(target['lm_head'], ready_for_head(model, draft, x), said)
        counts = (place >= step - 1) & (place < len(place) - 1)
        mean = lambda x: jnp.sum(jnp.where(counts, x, 0)) / jnp.sum(counts) / len(x)  # noqa: E731
        return mean(lk_loss(share)), mean(share), mean(share <= SMALLEST)

    arguments = target, output.taps, following, None
    losses, accepted, hopeless = unrolled(model, draft, *arguments, config.unroll_steps, taught)
    weights = config.step_decay ** jnp.arange(config.unroll_steps)
    loss = jnp.sum(weights * losses) / jnp.sum(weights)
    return loss, {'accepted': accepted, 'hopeless': jnp.mean(hopeless)}


def make_draft_step(model: Kimi, optimizer: Optimizer, config: DraftConfig):
    """(state, target's parameters, tokens [B, T]) -> (state, metrics); state is to be donated."""
    leaves = draft_leaves(model.config, len(model.run.taps))
    experts = config.quantisation
    run = model.run._replace(quantisation=experts)

    def step(state: TrainState, target: Any, tokens: jax.Array) -> tuple[TrainState, Any]:
        working = quantised_leaves(leaves, state.params, experts)
        loss_of = functools.partial(draft_loss, model.clone(run=run), config, target)
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(working, tokens)
        norm = optax.tree.norm(grads)
        params, opt_state = optimizer.update(
            grads, state.opt_state, state.params, state.step, norm=norm
        )
        metrics |= {'loss': loss, 'grad_norm': norm}
        return TrainState(state.step + 1, params, opt_state), metrics

    return step


class DraftTrainer:
    """The training of one draft in one workdir; said again, it goes on."""

    def __init__(self, target: Target, config: DraftConfig, workdir: epath.PathLike):
        """Raises ValueError if the workdir holds the draft of another model."""
        self.config, self.workdir = config, epath.Path(workdir)
        self.model = with_taps(target.model, config.taps)
        self.target = target
        longest = self.model.config.max_position_embeddings
        require(
            config.text_length <= longest, 'text_length', config.text_length,
            f'at most {longest} (model.max_position_embeddings)',
        )  # fmt: skip
        if (self.workdir / DRAFT_FILE).exists():
            check_draft(self.workdir, self.model.config)
            self._check_same(stored_training(self.workdir))
        leaves = draft_leaves(self.model.config, len(self.model.run.taps))
        rules = jax.tree_util.tree_map_with_path(
            lambda path, leaf: rule_of(path[-1].key, leaf, self.model.config, config.optimizer),
            leaves,
            is_leaf=lambda x: isinstance(x, Leaf),
        )
        schedule = learning_rate(config.optimizer, config.num_steps)
        self.optimizer = Optimizer(config.optimizer, schedule, rules)

    def _check_same(self, stored: dict[str, Any]) -> None:
        """Refuses what neither the texts nor the checkpoints of a workdir could follow."""
        now = json.loads(json.dumps(self._training()))
        differ = [
            f'{name} is {stored.get(name)!r} there, {now[name]!r} here'
            for name in now
            if stored.get(name) != now[name]
        ]
        if differ:
            raise ValueError(
                f'{self.workdir} holds a draft trained in another way: {"; ".join(differ)}. Take '
                'another --workdir, or the values it was made with'
            )

    def _training(self) -> dict[str, Any]:
        """What must stay as it was when a workdir is gone on with."""
        fields = dataclasses.asdict(self.config)
        names = (
            'quantisation', 'num_texts', 'text_length', 'prompt_length', 'temperature', 'seed',
        )  # fmt: skip
        kept = {name: fields[name] for name in names}
        return kept | {'taps': self.model.run.taps, 'optimizer': fields['optimizer']['name']}

    def _texts(self, prompts: Iterator[np.ndarray]) -> np.ndarray:
        path = self.workdir / OWN_TEXT
        if path.exists():
            try:
                with path.open('rb') as f:
                    return np.load(f)
            except (ValueError, EOFError, OSError) as error:
                raise ValueError(
                    f'{path}: cannot be read ({error}); delete it, and the model writes again'
                ) from None
        texts = write_texts(self.target, prompts, self.config)
        with open_whole(path) as f:
            np.save(f, texts)
        return texts

    def run(self, prompts: Iterator[np.ndarray]) -> Any:
        """Trains to `num_steps`; the draft's float32 parameters.

        prompts: endless, each [prompt_length] int32; read where the model has not written yet.
        """
        config = self.config
        write_draft(self.workdir, self.model, config.quantisation, self._training())
        texts = self._texts(prompts)
        fresh = init_draft(self.model, self.target.params, jax.random.key(config.seed))
        state = TrainState(jnp.int32(0), fresh, self.optimizer.init(fresh))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), state
        )
        checkpoints = Checkpoints(self.workdir, keep=config.keep_checkpoints)
        found = checkpoints.restore_newest(abstract)
        if found is not None:
            state = found[0]
            logging.info('resumed from step %d', int(state.step))
        step = jax.jit(make_draft_step(self.model, self.optimizer, config), donate_argnums=0)
        first = int(state.step)
        writer = MetricsWriter(self.workdir, config.num_steps, first, 'stop')
        started = time.perf_counter()
        try:
            for number in range(first, config.num_steps):
                rows = texts[texts_of_step(config, number)]
                state, metrics = step(state, self.target.params, rows)
                done = number + 1
                saves = done % config.checkpoint_every == 0 or done == config.num_steps
                if saves or done % config.log_every == 0 or done == first + 1:
                    values = {name: np.asarray(x).tolist() for name, x in metrics.items()}
                    for name in ('loss', 'grad_norm'):
                        require(
                            bool(np.isfinite(values[name])), name, values[name],
                            f'a number at step {done}; lower optimizer.learning_rate',
                        )  # fmt: skip
                    writer.write(done, values)
                    pace = (time.perf_counter() - started) / (done - first)
                    writer.step_line(done, values, pace * (config.num_steps - done))
                if saves:
                    checkpoints.save(state, {'step': done})
        finally:
            writer.close()
            checkpoints.wait()
            checkpoints.close()
        return state.params


def tokens_a_check(
    model: Kimi,
    target: Target,
    draft: Any,
    prompts: Sequence[np.ndarray],
    *,
    num_guesses: int,
    num_new: int,
    temperature: float,
) -> float:
    """Tokens that each check by the model gave, over all prompts, its own token counted.

    0 without a check: the first token of a text needs none.
    """
    counts = Counts()
    for seed, prompt in enumerate(prompts):
        tokens = generate_speculatively(
            model,
            target.params,
            draft,
            prompt.tolist(),
            max_new_tokens=num_new,
            num_guesses=num_guesses,
            temperature=temperature,
            seed=seed,
            num_ids=target.num_ids,
            counts=counts,
        )
        for _ in tokens:
            pass
    return counts.tokens / max(1, counts.rounds)
