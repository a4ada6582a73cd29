"""Which rows each host of a slice reads, and that they come to lie where they belong."""

import numpy as np
import pytest

from configs import kimi_k3_pod, kimi_linear_pod
from k3jax.aot.compiler import devices_of, has_libtpu
from k3jax.config import DataConfig, MeshConfig
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of
from k3jax.train.placement import Placement


@pytest.mark.parametrize('num_streams', [1, 2, 8])
def test_rows_of_streams_come_to_lie_where_they_belong(num_streams):
    mesh_config = MeshConfig(expert=2, sequence=2)
    mesh = make_mesh(mesh_config)
    spec = parallel_of(mesh, mesh_config, 'train').batch_spec
    data = DataConfig(batch_size=8, sequence_length=4, num_streams=num_streams)
    placement = Placement(data, mesh, spec)
    assert placement.streams == tuple(range(num_streams))
    rows = np.arange(32, dtype=np.int32).reshape(8, 4)
    for place in (placement.place, placement.place_whole):
        placed = place({'tokens': rows})['tokens']
        np.testing.assert_array_equal(placed, rows)
        assert placed.sharding.spec == spec
    assert placement.place({'tokens': rows})['tokens'].addressable_shards[0].data.shape == (2, 2)


@pytest.mark.aot
@pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup')
@pytest.mark.parametrize(
    ('config', 'topology'),
    [(kimi_linear_pod, 'v5p:2x2x4'), (kimi_k3_pod, 'v5p:8x8x8'), (kimi_k3_pod, 'v5p:16x16x16')],
)
def test_hosts_of_a_slice_read_their_own_rows_and_no_others(config, topology):
    config, devices = config.get_config(), devices_of(topology)
    mesh = make_mesh(config.mesh, devices)
    spec = parallel_of(mesh, config.mesh, 'train').batch_spec
    hosts = sorted({device.process_index for device in devices})
    assert len(hosts) == len(devices) // 4
    read = [Placement(config.data, mesh, spec, host).streams for host in hosts[:: len(hosts) // 4]]
    rows = config.data.batch_size // len(hosts)
    assert config.data.num_streams == config.data.batch_size
    assert all(len(streams) == rows for streams in read)
    assert not set(read[0]) & set(read[1])
