"""What can be configured: frozen dataclasses; validation says got, wanted and where."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

HiddenAct = Literal['situ', 'silu']
ExpertsFormat = Literal['bf16', 'mxfp4']
Dtype = Literal['float32', 'bfloat16']
Remat = Literal['none', 'layer']
Family = Literal['kimi_k3', 'kimi_linear']
Mixer = Literal['kda', 'mla']
StateMemory = Literal['device', 'pinned_host']
OptimizerName = Literal['adamw', 'muon']
ExpertParallel = Literal['moon', 'plain']
ScaleRule = Literal['ocp_floor', 'ceil']
NonFinitePolicy = Literal['stop', 'skip', 'roll_back']
SpikePolicy = Literal['none', 'stop', 'skip', 'roll_back']
FailedSavePolicy = Literal['stop', 'go_on']
# Values inside a layer that a run may keep, or send to the host, where it recomputes the others.
ACTIVATIONS = ('layer_input', 'mixer_input', 'mixer_output', 'ffn_input', 'ffn_output')


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field."""


def require(ok: bool, where: str, got: Any, wanted: str) -> None:
    """Raises ConfigError with what came, and what was wanted, unless `ok`."""
    if not ok:
        raise ConfigError(f'{where}: got {got!r}, wanted {wanted}')


def _positive(where: str, **fields: int | float) -> None:
    for name, value in fields.items():
        require(math.isfinite(value), f'{where}.{name}', value, 'a finite number')
        require(value > 0, f'{where}.{name}', value, 'a number above 0')


def _not_negative(where: str, **fields: int | float) -> None:
    for name, value in fields.items():
        require(math.isfinite(value), f'{where}.{name}', value, 'a finite number')
        require(value >= 0, f'{where}.{name}', value, '0 or more')


def _seed(where: str, value: int) -> None:
    require(0 <= value < 2**32, where, value, 'a whole number in 0..2**32 - 1')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttnConfig:
    """KDA geometry. Source: the release's `linear_attn_config`."""

    num_heads: int
    head_dim: int  # of q, k and v alike
    kda_layers: tuple[int, ...]  # 1-based, as in the release
    full_attn_layers: tuple[int, ...]  # 1-based: the MLA layers
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None  # None: the unbounded softplus gate of Kimi Linear
    use_full_rank_gate: bool = False  # the OUTPUT gate; the decay projection is always low rank

    def __post_init__(self) -> None:
        where = 'model.linear_attn_config'
        _positive(where, num_heads=self.num_heads, head_dim=self.head_dim)
        require(
            self.short_conv_kernel_size >= 2,
            f'{where}.short_conv_kernel_size',
            self.short_conv_kernel_size,
            'at least 2',
        )
        require(
            self.gate_lower_bound is None or self.gate_lower_bound < 0,
            f'{where}.gate_lower_bound',
            self.gate_lower_bound,
            'a negative number, or None for the softplus gate',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model. Field names are the release's own (`config.json: text_config`)."""

    name: str
    family: Family  # whose release layout: tensor names, prefixes and stored dtypes
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int  # of the dense layers
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    max_position_embeddings: int = 4096

    hidden_act: HiddenAct = 'situ'
    activation_situ_beta: float | None = 4.0  # None: 1.0
    activation_situ_linear_beta: float | None = 25.0  # None: the up branch is the identity
    attn_res_block_size: int | None = None  # in layers; None: plain residual adds

    # Multi-head latent attention without positions.
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # present but never rotated
    v_head_dim: int
    mla_use_output_gate: bool = False
    # UNCONFIRMED: the reference uses its norm class's default here, some ports 1e-5.
    mla_latent_norm_eps: float = 1e-6

    linear_attn_config: LinearAttnConfig

    # Mixture of experts.
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None = None  # None: experts at full width (no latent)
    latent_moe_use_norm: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    experts_format: ExpertsFormat = 'bf16'  # how the routed experts' weights are held

    # Multi-token prediction, in training only: 1 adds a layer that predicts the token after next.
    # K3's release has 0 (the layer became its draft). Which mixer that had is UNCONFIRMED.
    num_nextn_predict_layers: int = 0
    mtp_mixer: Mixer = 'mla'

    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839

    def __post_init__(self) -> None:
        _positive(
            'model',
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            intermediate_size=self.intermediate_size,
            rms_norm_eps=self.rms_norm_eps,
            num_attention_heads=self.num_attention_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            num_experts=self.num_experts,
            moe_intermediate_size=self.moe_intermediate_size,
            moe_layer_freq=self.moe_layer_freq,
        )
        require(
            self.family in ('kimi_k3', 'kimi_linear'),
            'model.family',
            self.family,
            "'kimi_k3' or 'kimi_linear'",
        )
        kda, mla = self.linear_attn_config.kda_layers, self.linear_attn_config.full_attn_layers
        layers = list(range(1, self.num_hidden_layers + 1))
        require(
            sorted(kda + mla) == layers,
            'model.linear_attn_config.kda_layers + full_attn_layers',
            sorted(kda + mla),
            f'each layer 1..{self.num_hidden_layers} exactly once',
        )
        require(
            1 <= self.num_experts_per_token <= self.num_experts,
            'model.num_experts_per_token',
            self.num_experts_per_token,
            f'1..num_experts ({self.num_experts})',
        )
        require(
            self.num_shared_experts >= 0,
            'model.num_shared_experts',
            self.num_shared_experts,
            '0 or more',
        )
        require(
            self.hidden_act in ('situ', 'silu'),
            'model.hidden_act',
            self.hidden_act,
            "'situ' or 'silu'",
        )
        require(
            self.experts_format in ('bf16', 'mxfp4'),
            'model.experts_format',
            self.experts_format,
            "'bf16' or 'mxfp4'",
        )
        require(
            self.attn_res_block_size is None or self.attn_res_block_size > 0,
            'model.attn_res_block_size',
            self.attn_res_block_size,
            'a positive number of layers, or None for plain residual adds',
        )
        require(
            self.num_nextn_predict_layers in (0, 1),
            'model.num_nextn_predict_layers',
            self.num_nextn_predict_layers,
            '0 or 1',
        )
        require(
            self.mtp_mixer in get_args(Mixer), 'model.mtp_mixer', self.mtp_mixer, "'kda' or 'mla'"
        )
        require(
            not (self.latent_moe_use_norm and self.routed_expert_hidden_size is None),
            'model.latent_moe_use_norm',
            self.latent_moe_use_norm,
            'False when routed_expert_hidden_size is None',
        )
        if self.experts_format == 'mxfp4':
            _whole_groups(self, 'the MXFP4 group size')

    @property
    def expert_input_size(self) -> int:
        """L: the width at which the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """F of the fused shared-expert MLP."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_kda(self, layer: int) -> bool:
        """Whether 0-based `layer` mixes tokens by KDA (otherwise by MLA)."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has experts (otherwise a dense MLP)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def _whole_groups(model: ModelConfig, why: str) -> None:
    latent = model.routed_expert_hidden_size is not None
    for field, width in (
        ('routed_expert_hidden_size' if latent else 'hidden_size', model.expert_input_size),
        ('moe_intermediate_size', model.moe_intermediate_size),
    ):
        require(width % 32 == 0, f'model.{field}', width, f'a multiple of 32, {why}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and its projector. Source: K3's `vision_config`."""

    hidden_size: int = 1024
    num_hidden_layers: int = 27
    num_attention_heads: int = 12
    qkv_hidden_size: int = 1536  # of all heads, unlike hidden_size
    intermediate_size: int = 4096
    patch_size: int = 14
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_interpolation_mode: Literal['bilinear', 'bicubic'] = 'bilinear'
    norm: Literal['rms', 'layer'] = 'rms'  # 'layer': of K2.5, with a norm before the projector
    # UNCONFIRMED: the reference leaves it to PyTorch, for which two values are told.
    norm_eps: float = 1.1920929e-07
    projector_eps: float = 1e-5
    bias: bool = False  # of every linear map

    def __post_init__(self) -> None:
        where = 'model.vision'
        values = dataclasses.asdict(self)
        _positive(where, **{k: v for k, v in values.items() if type(v) in (int, float)})
        require(self.norm in ('rms', 'layer'), f'{where}.norm', self.norm, "'rms' or 'layer'")
        require(
            self.pos_emb_interpolation_mode in ('bilinear', 'bicubic'),
            f'{where}.pos_emb_interpolation_mode',
            self.pos_emb_interpolation_mode,
            "'bilinear' or 'bicubic'",
        )
        require(
            self.qkv_hidden_size % (4 * self.num_attention_heads) == 0,
            f'{where}.qkv_hidden_size',
            self.qkv_hidden_size,
            f'a multiple of 4 x {self.num_attention_heads} heads, whose channels turn in two '
            'directions',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many chips share each axis of the work; the product is the number of chips."""

    data: int = -1  # rows of a batch; -1: all chips that the other axes leave
    expert: int = 1  # rows of a batch too, and each chip is home to its share of the experts
    sequence: int = 1  # tokens of a row
    tensor: int = 1  # heads and inner widths; serving only
    slices: int = 1  # of `data`: groups of chips joined by the data centre's network
    whole_below: int = 1 << 18  # parameters with fewer elements are whole on every chip
    expert_parallel: ExpertParallel = 'moon'  # balanced by replicas; or 'plain', at home only

    def __post_init__(self) -> None:
        require(
            self.data > 0 or self.data == -1, 'mesh.data', self.data, 'above 0, or -1 for the rest'
        )
        _positive(
            'mesh',
            expert=self.expert,
            sequence=self.sequence,
            tensor=self.tensor,
            slices=self.slices,
        )
        _not_negative('mesh', whole_below=self.whole_below)
        require(
            self.expert_parallel in ('moon', 'plain'),
            'mesh.expert_parallel',
            self.expert_parallel,
            "'moon' or 'plain'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Per-head Muon. Of K3's own, the report says only that heads are apart: the rest is K2's."""

    per_head: bool = True  # False: matrices are whole, as in K2
    momentum: float = 0.95
    nesterov: bool = False
    coefficients: tuple[float, ...] = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz polynomial
    steps: int = 5  # of Newton-Schulz
    dtype: Dtype = 'bfloat16'  # of its products' operands and what chips exchange
    update_rms: float = 0.2  # of an update, before the learning rate: that of Adam
    split_kv_b: bool = True  # keys and values of a head are two blocks
    router: bool = True  # False: AdamW moves the router

    def __post_init__(self) -> None:
        where = 'optimizer.muon'
        require(0 <= self.momentum < 1, f'{where}.momentum', self.momentum, 'a number in [0, 1)')
        _positive(where, update_rms=self.update_rms)
        require(1 <= self.steps <= 100, f'{where}.steps', self.steps, '1 to 100')
        require(
            len(self.coefficients) == 3 and all(map(math.isfinite, self.coefficients)),
            f'{where}.coefficients',
            self.coefficients,
            'three finite numbers',
        )
        require(
            self.dtype in get_args(Dtype), f'{where}.dtype', self.dtype, "'float32' or 'bfloat16'"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileBalanceConfig:
    """How the experts' selection biases are set. Source: report section 2.3.3, appendix D."""

    enabled: bool = True  # False: the biases stay as they are
    bins: int = 1000  # of the histogram of required biases
    momentum: float = 0.0  # of the old bias in the new one; UNCONFIRMED whether K3 had any

    def __post_init__(self) -> None:
        where = 'optimizer.quantile_balance'
        require(2 <= self.bins <= 1 << 20, f'{where}.bins', self.bins, '2 to 2^20')
        require(0 <= self.momentum < 1, f'{where}.momentum', self.momentum, 'a number in [0, 1)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Muon or AdamW with linear warm-up and cosine decay; with Muon, AdamW moves the rest."""

    name: OptimizerName = 'adamw'
    muon: MuonConfig = MuonConfig()
    learning_rate: float = 3e-4  # peak
    final_learning_rate_ratio: float = 0.1  # of the peak, at the last step
    warmup_steps: int = 100
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on matrices only
    state_memory: StateMemory = 'device'  # 'pinned_host': moments and masters wait there
    grad_clip_norm: float = 1.0
    quantile_balance: QuantileBalanceConfig = QuantileBalanceConfig()
    # Instead of it, how far each selection bias moves in a step, towards an equal load; 0: no such
    # rule. 1e-3 is DeepSeek-V3's, whose method K2 takes over.
    sign_balance_step: float = 0.0
    # Heads with a larger attention logit are clipped; None: none. 100 is K2's; UNCONFIRMED for K3.
    qk_clip_threshold: float | None = 100.0

    def __post_init__(self) -> None:
        _positive(
            'optimizer',
            learning_rate=self.learning_rate,
            eps=self.eps,
            grad_clip_norm=self.grad_clip_norm,
        )
        if self.qk_clip_threshold is not None:
            _positive('optimizer', qk_clip_threshold=self.qk_clip_threshold)
        require(
            self.name in get_args(OptimizerName), 'optimizer.name', self.name, "'adamw' or 'muon'"
        )
        require(
            self.state_memory in ('device', 'pinned_host'),
            'optimizer.state_memory',
            self.state_memory,
            "'device' or 'pinned_host'",
        )
        _not_negative(
            'optimizer',
            warmup_steps=self.warmup_steps,
            weight_decay=self.weight_decay,
            sign_balance_step=self.sign_balance_step,
        )
        require(
            not (self.sign_balance_step and self.quantile_balance.enabled),
            'optimizer.sign_balance_step',
            self.sign_balance_step,
            '0, or optimizer.quantile_balance.enabled=false: one rule sets the biases',
        )
        for name in ('b1', 'b2'):
            value = getattr(self, name)
            require(0 <= value < 1, f'optimizer.{name}', value, 'a number in [0, 1)')
        require(
            0 <= self.final_learning_rate_ratio <= 1,
            'optimizer.final_learning_rate_ratio',
            self.final_learning_rate_ratio,
            'a number in [0, 1]',
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeedlesConfig:
    """Windows that the source 'needles' makes: facts among real text, at the end a question."""

    facts: int = 8  # scattered over a window
    asked: int = 4  # of them, at the end; the answer needs each of these
    text: str = 'python_stdlib'  # a source as data.source, of the documents in between
    answers_only: bool = True  # of all tokens, the answers alone are targets
    seed: int = 0

    def __post_init__(self) -> None:
        where = 'data.needles'
        require(1 <= self.facts <= 676, f'{where}.facts', self.facts, '1 to 676, two letters each')
        require(
            1 <= self.asked <= self.facts,
            f'{where}.asked',
            self.asked,
            f'1 to {self.facts} ({where}.facts)',
        )
        require(self.text != 'needles', f'{where}.text', self.text, 'a source of real text')
        _seed(f'{where}.seed', self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes batches."""

    # A folder or file, local or gs://, of .txt / .jsonl; or 'python_stdlib'; or 'needles'.
    source: str = 'python_stdlib'
    mixture: tuple[str, ...] = ()  # several such sources instead of `source`
    mixture_weights: tuple[float, ...] = ()  # shares of the tokens, one for each; need not sum to 1
    needles: NeedlesConfig = NeedlesConfig()
    tokenizer: str = 'bytes'  # or a folder with tiktoken.model
    sequence_length: int = 512
    batch_size: int = 8  # sequences a step, over all processes and accumulation steps
    # Before step ramp_steps[i], a step has ramp_batch_sizes[i] sequences; each size is compiled.
    ramp_steps: tuple[int, ...] = ()
    ramp_batch_sizes: tuple[int, ...] = ()
    num_streams: int = 1  # the documents are dealt out to; processes read different ones
    held_out_every: int = 20  # every n-th document is held out
    max_document_bytes: int = 1 << 20  # longer documents are cut into pieces of this size
    long_document_bytes: int = 0  # a document is long from this size on; 0: none is
    long_document_repeats: int = 2  # times that an epoch of training has a long document
    shuffle_seed: int = 0
    shuffle_rows: int = 1024  # rows shuffled together after packing; 1: as they come

    def __post_init__(self) -> None:
        _positive(
            'data',
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            num_streams=self.num_streams,
            max_document_bytes=self.max_document_bytes,
            long_document_repeats=self.long_document_repeats,
            shuffle_rows=self.shuffle_rows,
        )
        _not_negative('data', long_document_bytes=self.long_document_bytes)
        require(
            len(set(self.mixture)) == len(self.mixture) and all(self.mixture),
            'data.mixture',
            self.mixture,
            'different sources',
        )
        require(
            len(self.mixture_weights) == len(self.mixture),
            'data.mixture_weights',
            self.mixture_weights,
            f'as many as data.mixture ({len(self.mixture)})',
        )
        require(
            all(math.isfinite(weight) and weight > 0 for weight in self.mixture_weights),
            'data.mixture_weights',
            self.mixture_weights,
            'finite numbers above 0; leave a source out to give it no weight',
        )
        require(
            self.batch_size % self.num_streams == 0,
            'data.batch_size',
            self.batch_size,
            f'a multiple of data.num_streams ({self.num_streams})',
        )
        steps, sizes = self.ramp_steps, self.ramp_batch_sizes
        require(
            all(a < b for a, b in zip((0, *steps), steps, strict=False)),
            'data.ramp_steps',
            steps,
            'steps above 0, each later than the one before',
        )
        require(
            len(steps) == len(sizes),
            'data.ramp_batch_sizes',
            sizes,
            f'as many as data.ramp_steps ({len(steps)})',
        )
        require(
            all(size > 0 and size % self.num_streams == 0 for size in sizes),
            'data.ramp_batch_sizes',
            sizes,
            f'multiples of data.num_streams ({self.num_streams})',
        )
        require(self.held_out_every >= 2, 'data.held_out_every', self.held_out_every, '2 or more')
        _seed('data.shuffle_seed', self.shuffle_seed)

    @property
    def shares(self) -> dict[str, float]:
        """Source -> its share of the tokens, summing to 1."""
        if not self.mixture:
            return {self.source: 1.0}
        total = sum(self.mixture_weights)
        return {
            source: weight / total
            for source, weight in zip(self.mixture, self.mixture_weights, strict=True)
        }

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every size that a training batch may have, in the order of the steps."""
        return (*self.ramp_batch_sizes, self.batch_size)

    def batch_size_at(self, step: int) -> int:
        """Sequences of the step after `step` updates."""
        return self.batch_sizes[sum(step >= end for end in self.ramp_steps)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisationConfig:
    """In what the routed experts are computed, for four-bit weights and eight-bit activations.

    Source: K3 report section 4.1.4: weights MXFP4, the activations that enter them MXFP8.
    """

    weights: Literal['mxfp4'] | None = None  # once a step, from the float32 masters
    activations: Literal['mxfp8'] | None = None  # that enter each of the experts' products
    scale_rule: ScaleRule = 'ocp_floor'  # of both; UNCONFIRMED which one K3 was trained with

    def __post_init__(self) -> None:
        where = 'train.quantisation'
        require(
            self.weights in ('mxfp4', None), f'{where}.weights', self.weights, "'mxfp4' or None"
        )
        require(
            self.activations in ('mxfp8', None),
            f'{where}.activations',
            self.activations,
            "'mxfp8' or None",
        )
        require(
            self.scale_rule in get_args(ScaleRule),
            f'{where}.scale_rule',
            self.scale_rule,
            "'ocp_floor' or 'ceil'",
        )


def check_quantisation(model: ModelConfig, quantisation: QuantisationConfig) -> None:
    """Raises ConfigError for no experts, or ones whose rows are no whole groups of 32."""
    if quantisation.weights or quantisation.activations:
        has_experts = any(map(model.is_moe, range(model.num_hidden_layers)))
        wanted = 'none: no layer of the model has experts'
        require(has_experts, 'train.quantisation', dataclasses.asdict(quantisation), wanted)
        _whole_groups(model, 'which train.quantisation shares scales in')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train, in what precision, and what to write."""

    num_steps: int = 1000
    stages: tuple[StageConfig, ...] = ()  # all of them, in order; (): the run has one, as it is
    grad_accum_steps: int = 1
    mtp_loss_weight: float = 0.1  # of a model with multi-token prediction; UNCONFIRMED for K3
    z_loss: float = 0.0  # times the mean squared log of the softmax's denominator, beside the loss
    seed: int = 0
    dtype: Dtype = 'bfloat16'  # of matmul operands and the residual stream; masters are float32
    remat: Remat = 'layer'  # 'layer': the backward pass recomputes each layer from its input
    keep: tuple[str, ...] = ()  # with 'layer': of ACTIVATIONS, kept instead of recomputed
    offload: tuple[str, ...] = ()  # with 'layer': of ACTIVATIONS, kept in the host's memory
    scan_layers: bool = True
    quantisation: QuantisationConfig = QuantisationConfig()  # of the routed experts
    log_every: int = 10
    eval_every: int = 0  # steps; 0: not during training
    eval_batches: int = 64  # of the held-out split
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    failed_save: FailedSavePolicy = 'stop'  # 'go_on': to the next save; the last must succeed
    # A loss or gradient that is no number: 'stop' ends the run before its next save; the others
    # undo that update: 'skip' goes on with the next batch, 'roll_back' does so from the newest
    # checkpoint.
    non_finite_policy: NonFinitePolicy = 'stop'
    # The same for a loss more than `spike_deviations` above the median of the last `spike_window`
    # losses that were no spikes; a deviation is 1.4826 times the median distance from the median.
    spike_policy: SpikePolicy = 'none'
    spike_window: int = 128
    spike_deviations: float = 10.0
    max_skipped_steps: int = 10  # in a row; one more ends the run
    max_roll_backs: int = 3  # to one checkpoint; one more ends the run
    # Seconds without a finished step after which the process ends with exit code 75, so that its
    # launcher starts it again; 0: never. The other is for compiling, restoring, saving, evaluating.
    watchdog_step_s: float = 0.0
    watchdog_pause_s: float = 3600.0
    sample_tokens: int = 128  # printed after the last step; 0: none
    sample_prompt: str = 'def '

    def __post_init__(self) -> None:
        _positive(
            'train',
            num_steps=self.num_steps,
            grad_accum_steps=self.grad_accum_steps,
            log_every=self.log_every,
            eval_batches=self.eval_batches,
            checkpoint_every=self.checkpoint_every,
            keep_checkpoints=self.keep_checkpoints,
            spike_deviations=self.spike_deviations,
            max_skipped_steps=self.max_skipped_steps,
            max_roll_backs=self.max_roll_backs,
            watchdog_pause_s=self.watchdog_pause_s,
        )
        _not_negative(
            'train',
            watchdog_step_s=self.watchdog_step_s,
            eval_every=self.eval_every,
            sample_tokens=self.sample_tokens,
            z_loss=self.z_loss,
            mtp_loss_weight=self.mtp_loss_weight,
        )
        _seed('train.seed', self.seed)
        for name, choices in (
            ('non_finite_policy', get_args(NonFinitePolicy)),
            ('spike_policy', get_args(SpikePolicy)),
            ('failed_save', get_args(FailedSavePolicy)),
        ):
            value = getattr(self, name)
            require(value in choices, f'train.{name}', value, f'one of {", ".join(choices)}')
        window = self.spike_window
        require(4 <= window <= 1 << 16, 'train.spike_window', window, '4 to 2^16 losses')
        starts = [stage.first_step for stage in self.stages]
        require(
            not starts or starts[0] == 0 and all(a < b for a, b in itertools.pairwise(starts)),
            'train.stages: first_step',
            tuple(starts),
            '0 for the first stage, and each later than the one before',
        )
        require(
            bool(self.sample_prompt) or not self.sample_tokens,
            'train.sample_prompt',
            self.sample_prompt,
            'at least one character to go on from, or train.sample_tokens=0',
        )
        require(
            self.dtype in ('float32', 'bfloat16'),
            'train.dtype',
            self.dtype,
            "'float32' or 'bfloat16'",
        )
        require(self.remat in ('none', 'layer'), 'train.remat', self.remat, "'none' or 'layer'")
        for field in ('keep', 'offload'):
            for name in getattr(self, field):
                known = f'one of {", ".join(ACTIVATIONS)}'
                require(name in ACTIVATIONS, f'train.{field}', name, known)
        both = sorted(set(self.keep) & set(self.offload))
        require(not both, 'train.keep and train.offload', both, 'no name in both')
        named = self.keep + self.offload
        require(
            self.remat == 'layer' or not named,
            'train.keep and train.offload',
            named,
            "none, or train.remat='layer': without it nothing is recomputed",
        )


def _changes(of: type, names: Iterable[str]) -> Any:
    """A field that changes some fields of another config: name -> value."""
    return dataclasses.field(default_factory=dict, metadata={'of': of, 'names': tuple(names)})


def _names(of: type, *but: str) -> Iterable[str]:
    return (field.name for field in dataclasses.fields(of) if field.name not in but)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A part of a run: what it changes of the run's data, mesh and of what makes a step fit.

    State, schedule and the count of steps go on from the stage before. The data of a stage begin
    anew, in an order of their own: `data.shuffle_seed` is the run's plus the stage's number where
    it is not given.
    """

    first_step: int  # updates done when it begins; 0 for the first stage
    data: Mapping[str, Any] = _changes(
        DataConfig, _names(DataConfig, 'tokenizer', 'held_out_every')
    )
    mesh: Mapping[str, Any] = _changes(MeshConfig, _names(MeshConfig))
    train: Mapping[str, Any] = _changes(
        TrainConfig, ('grad_accum_steps', 'remat', 'keep', 'offload')
    )

    def __post_init__(self) -> None:
        _not_negative('train.stages', first_step=self.first_step)
        for field in dataclasses.fields(self):
            if 'of' not in field.metadata:
                continue
            names, where = field.metadata['names'], f'train.stages: {field.name}'
            changes = getattr(self, field.name)
            require(isinstance(changes, Mapping), where, changes, 'a dict of fields and values')
            for name, value in changes.items():
                require(name in names, f'{where}.{name}', value, f'one of {", ".join(names)}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything one run needs."""

    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        for size in self.data.batch_sizes:
            require(
                size % self.train.grad_accum_steps == 0,
                'data.batch_size' if size == self.data.batch_size else 'data.ramp_batch_sizes',
                size,
                f'a multiple of train.grad_accum_steps ({self.train.grad_accum_steps})',
            )
        require(
            self.optimizer.warmup_steps < self.train.num_steps,
            'optimizer.warmup_steps',
            self.optimizer.warmup_steps,
            f'fewer than train.num_steps ({self.train.num_steps})',
        )
        check_quantisation(self.model, self.train.quantisation)
