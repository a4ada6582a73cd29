"""The order of the runs, and what they come to, on losses that follow known laws."""

import json

import pytest

from configs import scaling_law as grid_config
from k3jax.config import MuonConfig
from k3jax.model.flops import active_parameters
from k3jax.train.scaling_law import (
    Grid,
    Point,
    Result,
    markdown,
    plot,
    report,
    seconds_for,
)

GRID = Grid((64, 80, 96, 112, 128), (1, 2, 4), ('attn_res', 'situ'))


def result_of(point):
    """K3 saves 2.5 of compute, attention residuals 1.25 of it, the activation none."""
    flops = 1e12 * (point.width / 64) ** 4
    worse = {'k2': 2.5, 'attn_res': 1.25}.get(point.recipe, 1.0)
    loss = 2.0 * (flops / worse / 1e12) ** -0.1 * (1 if point.rate == 2 else 1.1)
    return Result(point, flops, 1 << 20, 10, loss, 30.0, flops / 1e10)


def run_all():
    results = []
    while (point := GRID.next_point(results)) is not None:
        results.append(result_of(point))
    return results


def test_small_runs_come_first_and_all_take_the_best_rate():
    points = [result.point for result in run_all()]
    assert points[:6] == [Point(r, 64, rate) for rate in (1, 2, 4) for r in ('k2', 'k3')]
    rest = [('k2', 80), ('k3', 80), ('k2', 96), ('k3', 96), ('attn_res', 80), ('situ', 80)]
    rest += [(r, width) for width in (112, 128) for r in ('k2', 'k3')]
    assert points[6:] == [Point(*point, 2) for point in rest]
    assert GRID.next_point([result_of(p) for p in points[1:]]) == points[0]


@pytest.mark.parametrize('num_runs', [10, 16])
def test_the_ratios_are_those_of_the_laws_after_ten_runs_and_after_all(num_runs):
    results = run_all()[:num_runs]
    found = json.loads(json.dumps(report(GRID, results)))
    assert found['whole_recipe']['value'] == pytest.approx(2.5)
    assert found['laws']['k3']['exponent'] == pytest.approx(0.1)
    assert found['rates'] == {'k2': 2, 'k3': 2}
    assert len(found['runs']) == num_runs
    ablations = {name: x['ratio']['value'] for name, x in found['ablations'].items()}
    wanted = {'attn_res': 1.25, 'situ': 1.0} if num_runs == 16 else {}
    assert ablations == pytest.approx(wanted)
    assert '| whole recipe | 2.50 (2.50 to 2.50) | 2.5 |' in markdown(found)
    assert plot(found).startswith(b'\x89PNG')


def test_a_rate_at_which_a_run_diverged_is_not_taken():
    results = [r._replace(loss=None) if r.point.rate == 2 else r for r in run_all()[:6]]
    assert GRID.rate_of('k3', results) == 1
    with pytest.raises(ValueError, match='k2 diverged at every learning rate of 1, 2, 4; lower'):
        GRID.next_point([r._replace(loss=None) for r in results])


def test_too_few_runs_are_refused():
    with pytest.raises(ValueError, match='got 2 runs of k2, wanted three sizes'):
        report(GRID, run_all()[:8])


def test_a_run_takes_the_time_to_compile_and_that_of_its_flops():
    assert seconds_for(1e12, []) == 0
    assert seconds_for(5e12, run_all()[:4]) == pytest.approx(30 + 500)


def test_the_recipes_differ_by_what_they_say_and_ablations_by_one_thing():
    def config(recipe):
        return grid_config.recipe_config(recipe, 96, 1 << 20)

    k2, k3 = config('k2'), config('k3')
    assert not any(map(k2.model.is_kda, range(5))) and any(map(k3.model.is_kda, range(5)))
    assert k2.model.routed_expert_hidden_size is None and k2.model.attn_res_block_size is None
    assert (k2.model.hidden_act, k3.model.hidden_act) == ('silu', 'situ')
    assert k2.optimizer.sign_balance_step and not k2.optimizer.quantile_balance.enabled
    assert not k2.optimizer.muon.per_head and k3.optimizer.muon.per_head
    assert k2.data == k3.data and k2.train == k3.train
    assert 0.7 < active_parameters(k2.model) / active_parameters(k3.model) < 1.0
    for name in grid_config.ABLATIONS:
        ablated = config(name)
        changed = [f for f in ('model', 'optimizer') if getattr(ablated, f) != getattr(k3, f)]
        assert len(changed) == 1 and ablated.data == k3.data
    assert config('per_head_muon').optimizer.muon == MuonConfig(update_rms=0.4, per_head=False)
    with pytest.raises(ValueError, match="recipe: got 'k4', wanted k2, k3 or one of attn_res"):
        config('k4')
