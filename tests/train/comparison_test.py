"""Runs beside each other: what the table says of them, and that a plot is drawn."""

import pytest

from k3jax.train.comparison import markdown, plot, summary

RUN = [
    {
        'step': step,
        'loss': 5.0 - step / 10,
        'maxvio': [0.1 * step, 2.0 if step % 3 else 0.2],
        'dead_experts': [0, 1 if step == 25 else 0],
    }
    for step in range(1, 31)
]


def test_a_summary_is_of_the_last_steps_and_the_worst_layer():
    got = summary(RUN, target_loss=3.0)
    assert got['steps'] == 30
    assert got['loss'] == pytest.approx(5 - (11 + 30) / 2 / 10)
    # The mean of twenty losses is that of 9.5 steps before: 3.05 at step 29.
    assert got['step_of_target'] == 30
    assert got['maxvio'] == pytest.approx(2.05)
    assert got['dead_experts'] == 1
    assert summary(RUN, target_loss=0.0)['step_of_target'] is None


def test_runs_stand_in_one_table_and_one_plot():
    table = markdown({'a': summary(RUN), 'b': {'steps': 3, 'loss': 2.5}}).splitlines()
    assert table[0] == '| run | steps | loss | maxvio | dead experts |'
    assert table[2:] == ['| a | 30 | 2.950 | 2.050 | 1 |', '| b | 3 | 2.500 | - | - |']
    assert plot({'a': RUN}, ['loss', 'maxvio']).startswith(b'\x89PNG')


def test_a_run_without_a_loss_is_refused():
    with pytest.raises(ValueError, match='a run without a logged loss'):
        summary([{'step': 3, 'held_out_loss': 1.0}])
