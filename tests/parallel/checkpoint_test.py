"""A state saved on one mesh is restored on others, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from k3jax.config import MeshConfig, OptimizerConfig
from k3jax.model.kimi import Kimi
from k3jax.model.run import Run
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.optim import make_optimizer
from k3jax.train.state import abstract_state, fresh_state
from tests import tiny


def test_eight_devices_then_four_then_one_hold_the_same_bits(tmp_path):
    config = tiny.k3((1,), (2,), num_experts=8)
    before = None
    for number, axes in enumerate(({'expert': 4, 'sequence': 2}, {'expert': 2}, {})):
        mesh_config = MeshConfig(whole_below=0, **axes)
        mesh = make_mesh(mesh_config, jax.devices()[: (8, 4, 1)[number]])
        run = Run(jnp.float32, jnp.float32, implementation='xla')
        run = run._replace(parallel=parallel_of(mesh, mesh_config, 'train'))
        model = Kimi(config, run)
        optimizer = make_optimizer(OptimizerConfig(), 1000, model, mesh)
        waits = 'pinned_host' if number == 1 else 'device'
        abstract = abstract_state(model, optimizer, mesh, waits)
        if before is None:
            shardings = jax.tree.map(lambda x: x.sharding, abstract)
            fresh = lambda: fresh_state(model, optimizer, jax.random.key(0))  # noqa: B023, E731
            state = jax.jit(fresh, out_shardings=shardings)()
        else:
            state, _ = Checkpoints(epath.Path(tmp_path / str(number - 1))).restore_newest(abstract)
            jax.tree.map(
                lambda x, want: np.testing.assert_equal(x.sharding, want.sharding),
                state.params,
                abstract.params,
            )
            jax.tree.map(np.testing.assert_array_equal, state, before)
        checkpoints = Checkpoints(epath.Path(tmp_path / str(number)), keep=1)
        checkpoints.save(state, {})
        checkpoints.wait()
        before = jax.device_get(state)
