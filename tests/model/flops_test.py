"""Parameters and FLOPs by component, against the published counts and sums made by hand."""

import dataclasses

import pytest

from configs import kimi_k3, kimi_k3_vision, kimi_linear_48b, tiny_k3, tiny_kimi_linear
from k3jax.model.flops import (
    COMPONENTS,
    active_parameters,
    count_parameters,
    flops_by_component,
    flops_per_token,
    total_parameters,
)

K3 = kimi_k3.get_config().model


def test_kimi_k3_has_the_published_parameters_by_component():
    assert count_parameters(K3) == {
        'embedding': 1_174_405_120,
        'lm_head': 1_174_405_120,
        'kda': 69 * 443_740_384,
        'mla': 24 * 232_196_096,
        'routed_experts': 92 * 896 * 33_030_144,
        'shared_experts': 92 * 132_120_576,
        'latent': 92 * 51_383_808,
        'router': 92 * 6_423_424,
        'dense_mlp': 726_663_168,
        'layer_norms': 93 * 14_336,
        'attn_res': 93 * 28_672,
        'final': 21_504,
    }
    assert total_parameters(K3) == 2_779_484_476_000
    assert active_parameters(K3) == 104_189_612_640


def test_what_sees_is_counted_apart():
    config = kimi_k3_vision.get_config().model
    vision = {'vision_tower': 401_214_464, 'mm_projector': 46_144_512}
    assert count_parameters(config) == count_parameters(K3) | vision
    assert active_parameters(config) == active_parameters(K3)
    assert flops_by_component(config, 64) == flops_by_component(K3, 64)


def test_kimi_linear_48b_has_the_parameters_of_its_release():
    assert total_parameters(kimi_linear_48b.get_config().model) == 49_122_681_728


def test_packed_experts_count_as_the_weights_they_stand_for():
    packed = dataclasses.replace(K3, experts_format='mxfp4')
    assert count_parameters(packed) == count_parameters(K3)
    assert flops_by_component(packed, 4096) == flops_by_component(K3, 4096)


@pytest.mark.parametrize('config', [K3, tiny_k3.get_config().model])
def test_components_are_all_there_and_in_order(config):
    assert tuple(count_parameters(config)) == COMPONENTS
    assert all(count_parameters(config).values())


def test_kimi_linear_has_no_latent_and_no_attention_residual():
    counts = count_parameters(tiny_kimi_linear.get_config().model)
    assert counts['latent'] == counts['attn_res'] == 0
    assert counts['final'] == tiny_kimi_linear.get_config().model.hidden_size


def test_projections_cost_two_flops_a_weight_that_the_token_meets():
    """All active weights but norms, convolutions, biases and rates are matrices."""
    flops = flops_by_component(K3, 4096)
    vectors = (
        69 * (3 * 4 * 12288 + 96 + 12288 + 128)  # convolutions, A_log, dt_bias, o_norm
        + 24 * (1536 + 512)  # latent norms
        + 92 * (3584 + 896)  # routed_expert_norm, correction bias
        + 93 * (14_336 + 28_672)
        + 21_504
    )
    projections = sum(flops[name] for name in COMPONENTS)
    assert projections == pytest.approx(2 * (active_parameters(K3) - vectors), rel=1e-12)


def test_attention_costs_scores_and_values_at_the_mean_context():
    flops = flops_by_component(K3, 1001)
    assert flops['mla_attention'] == 24 * 96 * 2 * (192 + 128) * 501
    tokens = [2 * (192 + 128) * (t + 1) for t in range(1001)]
    assert flops['mla_attention'] == pytest.approx(24 * 96 * sum(tokens) / 1001)


def test_kda_cost_does_not_grow_with_length_past_a_chunk():
    short, long = (flops_by_component(K3, n)['kda_chunks'] for n in (64, 1 << 20))
    assert short == long
    # A chunk of one: two scores, two values, and the state read twice, written once.
    one = flops_by_component(K3, 1)['kda_chunks']
    assert one == pytest.approx(69 * 96 * (8 * 128 + 6 * 128 * 128))


def test_backward_is_twice_the_forward():
    forward = flops_per_token(K3, 4096, backward=False)
    assert forward == sum(flops_by_component(K3, 4096).values())
    assert flops_per_token(K3, 4096, backward=True) == 3 * forward
    assert forward > 2 * 103e9
