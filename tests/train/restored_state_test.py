"""Where checkpoints lie, and what a restored state is like to the step that goes on from it."""

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from k3jax.train.checkpoint import Checkpoints
from k3jax.train.state import TrainState


def placed(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def test_checkpoints_in_a_relative_workdir_are_saved_and_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = TrainState(jnp.int32(3), {'w': jnp.arange(4.0)}, {'m': jnp.ones(2)})
    checkpoints = Checkpoints(epath.Path('runs/mine'), keep=1)
    checkpoints.save(state, {'position': 7})
    checkpoints.wait()
    again = Checkpoints(epath.Path('runs/mine'))
    found = again.restore_newest(placed(state))
    assert found is not None
    restored, data = found
    assert int(restored.step) == 3 and data == {'position': 7}
    np.testing.assert_array_equal(restored.params['w'], state.params['w'])
    assert (tmp_path / 'runs/mine/checkpoints/3').is_dir()


def test_restored_state_is_compiled_for_once(tmp_path):
    state = TrainState(jnp.int32(3), {'w': jnp.arange(4.0)}, {'m': jnp.ones(2)})
    state = jax.device_put(state, jax.devices()[0])
    checkpoints = Checkpoints(epath.Path(tmp_path), keep=1)
    checkpoints.save(state, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore_newest(placed(state))
    step = jax.jit(lambda s: TrainState(s.step + 1, s.params, s.opt_state))
    after = step(restored)
    assert [x.committed for x in jax.tree.leaves(restored)] == [
        x.committed for x in jax.tree.leaves(after)
    ]
