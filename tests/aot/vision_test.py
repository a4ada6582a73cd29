"""The full-size tower takes the largest images on TPU chips that are not there, and fits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import kimi_k3
from k3jax.aot.chips import chip_of
from k3jax.aot.compiler import devices_of, has_libtpu
from k3jax.config import MeshConfig, VisionConfig
from k3jax.model.layout import vision_leaves
from k3jax.model.run import Run
from k3jax.model.vision import Media, MediaInputs, media_rows
from k3jax.parallel.mesh import make_mesh
from k3jax.parallel.shard import parallel_of

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed: make setup'),
]

TOPOLOGY = 'v5p:2x2x1'
CONFIG = kimi_k3.get_config().model
VISION = VisionConfig()


@functools.cache
def compiled_bytes(num_patches, num_chips, backward=False):
    """Bytes of HBM a chip: arguments, temporaries. An image of so many patches, patches cut."""

    config = dataclasses.replace(CONFIG, vision=VISION)
    mesh_config = MeshConfig(sequence=num_chips)
    mesh = make_mesh(mesh_config, devices_of(TOPOLOGY)[:num_chips])
    parallel = parallel_of(mesh, mesh_config, 'train')
    run = Run(jnp.dtype('bfloat16'), None, 'layer', parallel=parallel)
    leaves = vision_leaves(VISION, config.hidden_size)

    def is_leaf(x):
        return not isinstance(x, dict)

    specs = jax.tree.map(
        lambda leaf: PartitionSpec() if parallel is None else parallel.spec(leaf),
        leaves,
        is_leaf=is_leaf,
    )
    cut = PartitionSpec() if parallel is None else parallel.batch_spec

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(
        lambda leaf, spec: abstract(leaf.shape, leaf.dtype, spec), leaves, specs, is_leaf=is_leaf
    )
    fields = [abstract((1, num_patches), jnp.int32, cut)] * 7
    merged = abstract((1, num_patches // 4, 4, 4), jnp.int32, cut)
    pixels = abstract((1, num_patches, 3, 14, 14), jnp.float32, cut)
    inputs = MediaInputs(pixels, Media(*fields, merged))

    def rows(params, inputs):
        return media_rows(params, inputs, config, run)

    def gradient(params, inputs):
        return jax.grad(lambda p: jnp.sum(rows(p, inputs).astype(jnp.float32)))(params)

    function = gradient if backward else rows
    if parallel is not None:
        out = specs if backward else PartitionSpec()
        function = jax.shard_map(
            function, mesh=mesh, in_specs=(specs, cut), out_specs=out, check_vma=False
        )
    memory = jax.jit(function).lower(params, inputs).compile().memory_analysis()
    print(
        f'{num_patches} patches, {num_chips} chips, {"backward" if backward else "forward"}: '
        f'arguments {memory.argument_size_in_bytes / 2**30:.2f} GiB, '
        f'temporaries {memory.temp_size_in_bytes / 2**30:.2f} GiB'
    )
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize('num_chips', [1, 4])
@pytest.mark.parametrize('backward', [False, True])
def test_the_largest_image_fits_and_memory_grows_with_the_patches_alone(num_chips, backward):
    few = compiled_bytes(16384, num_chips, backward)
    many = compiled_bytes(65536, num_chips, backward)
    assert sum(many) < chip_of(TOPOLOGY).hbm_bytes
    assert many[1] < 5 * few[1]  # 4 times the patches; their square would make it 16
