"""Trains a model: `python -m experiments.train --config=configs/tiny_k3.py --workdir=DIR`.

Goes on from the newest whole checkpoint in the workdir. At the end: held-out bits a byte beside a
trigram model's, a sample, and loss.png.
"""

from __future__ import annotations

import jax
from absl import logging
from etils import epath

from k3jax import processes
from k3jax.config import Config
from k3jax.flags import define_config_flags, load_config, run_main, workdir
from k3jax.serve.generate import generate
from k3jax.train.loop import Outcome, Trainer
from k3jax.train.metrics import plot_loss

define_config_flags()


def print_sample(outcome: Outcome, prompt: str, num_tokens: int) -> None:
    """Continues `prompt`, at temperature 0.8."""
    tokenizer = outcome.tokenizer
    ids = generate(
        *outcome.on_one_chip(),
        tokenizer.encode(prompt),
        max_new_tokens=num_tokens,
        temperature=0.8,
        top_p=0.95,
        stop_ids=frozenset({tokenizer.eos_id}),
        num_ids=tokenizer.vocab_size,
    )
    logging.info('sample:\n%s%s', prompt, tokenizer.decode(list(ids)))


def train(config: Config) -> None:
    """Trains, evaluates and samples; process 0 alone does what one can do alone."""
    trainer = Trainer(config, workdir())
    outcome = trainer.run()
    if not outcome.finished:
        return
    logging.info(
        'evaluating on %d held-out batches, and a trigram model', config.train.eval_batches
    )
    result = trainer.evaluate(outcome.state.params)
    if jax.process_index() > 0:
        return
    plot_loss(trainer.workdir)
    logging.info(
        'held-out: %.3f bits a byte (trigram counted on the same data: %.3f); plot: %s',
        result.bits_per_byte,
        trainer.trigram(),
        epath.Path(workdir()) / 'loss.png',
    )
    if config.train.sample_tokens and jax.process_count() == 1:
        print_sample(outcome, config.train.sample_prompt, config.train.sample_tokens)


def main(argv: list[str]) -> None:
    del argv
    config = load_config()
    processes.start()
    with processes.ends_together():
        train(config)


if __name__ == '__main__':
    run_main(main)
