"""What a --checkpoint is: a converted folder or a training workdir, as a model ready to run."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from k3jax.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    QuantisationConfig,
    ScaleRule,
    check_quantisation,
)
from k3jax.convert.converted import CONVERSION_FILE, STATE_FILE, open_params, read_conversion
from k3jax.convert.files import read_json_object
from k3jax.data.images import ImageConfig
from k3jax.data.media import processor as processor_of
from k3jax.data.processor import PROCESSOR_FILE, image_config, video_config
from k3jax.data.tokenizer import VOCAB_FILE, Tokenizer, load_tokenizer
from k3jax.data.video import VideoConfig
from k3jax.model.kimi import Kimi, init_params
from k3jax.model.layout import Leaf
from k3jax.model.plan import unstack_params
from k3jax.model.run import Run
from k3jax.parallel.shard import parallel_of
from k3jax.serve.expert_tiles import as_held, in_tiles
from k3jax.serve.placement import place_params, serving_mesh
from k3jax.train.checkpoint import CONFIG_FILE, Checkpoints, is_workdir, read_config
from k3jax.train.host_memory import HOST
from pallas_kernels.common.platform import implementation_on
from pallas_kernels.grouped_mlp import fake_quantise_mxfp4

UNROLL_UP_TO = 32  # layers


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    tokenizer: the one it was made for; None where the checkpoint carries none.
    data: what it was trained on, if here; None for a converted release.
    images, videos: how files become patches, by the release's preprocessor_config.json or the data.
    mesh: that the parameters are cut over; None for a single device.
    """

    model: Kimi
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    data: DataConfig | None
    images: ImageConfig = ImageConfig()
    videos: VideoConfig = VideoConfig()
    mesh: Mesh | None = None


def workdir_params(path: epath.Path, config: ModelConfig, scan_layers: bool) -> dict[str, Any]:
    """The float32 masters of a workdir's newest checkpoint, by layer, on the host."""
    trained = Kimi(config, Run(jnp.dtype('float32'), jnp.dtype('float32')), scan_layers)
    # Whatever mesh it was trained on; a chip may be too small for it.
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        jax.eval_shape(lambda key: init_params(trained, key), jax.random.key(0)),
    )
    checkpoints = Checkpoints(path)
    try:
        params, _ = checkpoints.restore_params(abstract)
    finally:
        checkpoints.close()
    return unstack_params(jax.device_get(params), trained.plan)


def use_dtype(dtype: str) -> None:
    """For scripts: with float32, matmuls of this process are float32 on TPU and GPU too."""
    if dtype == 'float32':
        jax.config.update('jax_default_matmul_precision', 'highest')


def open_model(
    path: str,
    dtype: str = 'bfloat16',
    *,
    activations: str | None = None,
    scale_rule: ScaleRule | None = None,
    mesh: MeshConfig | None = None,
    scan_layers: bool | None = None,
) -> Loaded:
    """The model at `path`, on the default device or cut over a mesh of all devices.

    A converted folder is read leaf by leaf, by each chip what it holds; a workdir's parameters pass
    through the host's memory.

    The experts' weights of a workdir that was trained with them in MXFP4 are quantised as they were
    in training.

    Args:
      path: what `convert` made, or a workdir of `train`; local or gs://.
      dtype: of activations and matmul operands; what the release stores as float32 stays so.
      activations: 'mxfp8' rounds what enters the experts' products, 'none' does not; None: as the
        workdir was trained, and 'none' for a converted folder.
      scale_rule: of these; None: as the workdir was trained; 'ocp_floor' for a converted folder.
      mesh: for an engine, whose steps cut heads and experts; other functions take no mesh.
      scan_layers: whether equal layers are one program, which compiles faster than it runs: a
        decode step then copies each layer's experts. None: in models deeper than `UNROLL_UP_TO`.

    Raises:
      ValueError: there is no such checkpoint, it is not whole, or the mesh does not fit it.
    """
    folder, data, trained = epath.Path(path), None, QuantisationConfig()
    images, videos = ImageConfig(), VideoConfig()
    if (folder / CONVERSION_FILE).exists() or (folder / STATE_FILE).exists():
        conversion = read_conversion(folder)
        config, release = conversion.model_config, conversion.release_path
        tokenizer = load_tokenizer(release) if (release / VOCAB_FILE).exists() else None
        params = open_params(folder)
        if config.vision is not None:
            images = ImageConfig(patch_size=config.vision.patch_size)
        if (release / PROCESSOR_FILE).exists():
            processor = read_json_object(release / PROCESSOR_FILE)
            images, videos = image_config(processor), video_config(processor)
    elif is_workdir(folder):
        config, scan_layers, data, trained = read_config(folder)
        tokenizer = load_tokenizer(data.tokenizer)
        params = workdir_params(folder, config, scan_layers)
        images = processor_of(data)
    elif next(folder.glob('*.safetensors'), None) is not None:
        raise ValueError(
            f'--checkpoint: {path} is a release in safetensors; convert it first: '
            f'python -m experiments.convert --source={path} --target=DIR'
        )
    else:
        raise ValueError(
            f'--checkpoint: {path} is neither a converted folder (no {CONVERSION_FILE}) nor a '
            f'training workdir (no {CONFIG_FILE}); make one with experiments.convert or '
            'experiments.train'
        )
    scan = config.num_hidden_layers > UNROLL_UP_TO if scan_layers is None else scan_layers
    implementation = implementation_on(jax.devices()[0].platform)
    given = trained.activations if activations is None else activations
    made = None if mesh is None else serving_mesh(mesh, config)
    run = Run(
        jnp.dtype(dtype),
        implementation=implementation,
        quantisation=QuantisationConfig(
            activations=None if given == 'none' else given,
            scale_rule=scale_rule or trained.scale_rule,
        ),
        parallel=None if mesh is None else parallel_of(made, mesh, 'decode'),
    )
    check_quantisation(config, run.quantisation)
    if implementation is None:
        config = in_tiles(config, run.dtype)
    model = Kimi(config, run, scan)
    arrive = functools.partial(_arrive, dtype, trained)
    params = place_params(params, model, made, arrive)
    return Loaded(model, params, tokenizer, data, images, videos, made)


def _arrive(dtype: str, trained: QuantisationConfig, leaf: Leaf, array: jax.Array) -> jax.Array:
    """In the compute dtype, so that no step converts it again, unless kept wider."""
    if leaf.packs is not None:
        return as_held(leaf, array)
    if leaf.quantisable and trained.weights is not None:
        array = fake_quantise_mxfp4(array, trained.scale_rule)
    return array.astype(jnp.promote_types(dtype, leaf.dtype))
