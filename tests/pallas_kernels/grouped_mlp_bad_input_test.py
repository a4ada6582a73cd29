"""What routed experts refuse, by name and before anything runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_mlp import SiTU, grouped_mlp, quantise_mxfp4, token_mlp
from tests.pallas_kernels.grouped_mlp_arguments import packed_arguments, random_arguments


@pytest.mark.parametrize(('x', 'sizes'), [((4, 7), 5), ((4, 12), 4), ((2, 4, 12), 5)])
def test_a_wrong_shape_is_an_error(x, sizes):
    _, experts, _ = random_arguments()
    with pytest.raises(ValueError, match=r'wanted \[M, 12\] and \(5,\)'):
        grouped_mlp(np.zeros(x, np.float32), experts, np.zeros(sizes, np.int32), SiTU())


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [([3, 1, 0, 0, 1], 'sum to 5, wanted none negative and the 4 rows'), ([5, -1, 0, 0, 0], '-1')],
)
def test_known_group_sizes_that_do_not_add_up_are_refused(sizes, message):
    _, experts, _ = random_arguments()
    with pytest.raises(ValueError, match=message):
        grouped_mlp(np.zeros((4, 12), np.float32), experts, np.array(sizes, np.int32), SiTU())


def test_what_the_kernels_do_not_support_is_refused_by_name_and_falls_back_otherwise():
    packed, _, _ = packed_arguments()
    x, sizes = jnp.ones((2, 128), jnp.float32), np.array([1, 0, 1], np.int32)
    with pytest.raises(NotImplementedError, match='rows in float32, wanted bfloat16'):
        grouped_mlp(x, packed, sizes, SiTU(), implementation='pallas')
    assert grouped_mlp(x, packed, sizes, SiTU()).shape == x.shape
    with pytest.raises(NotImplementedError, match='rows in float16'):
        grouped_mlp(x.astype(jnp.float16), packed, sizes, SiTU(), implementation='pallas')
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        grouped_mlp(x, packed, sizes, SiTU(), implementation='cuda')
    many = jnp.ones((65, 128), jnp.bfloat16)
    ids = np.zeros((65, 1), np.int32)
    with pytest.raises(NotImplementedError, match='65 tokens, wanted at most 64'):
        token_mlp(many, packed, ids, np.ones((65, 1)), SiTU(), implementation='pallas')


def test_token_mlp_refuses_known_ids_out_of_range_and_shapes_that_disagree():
    _, experts, _ = random_arguments()
    x = np.zeros((2, 12), np.float32)
    with pytest.raises(ValueError, match='reach from 0 to 5, wanted 0 to 4'):
        token_mlp(x, experts, np.array([[0], [5]], np.int32), np.ones((2, 1)), SiTU())
    with pytest.raises(ValueError, match=r'wanted \[T, 12\] and \[T, k\] twice'):
        token_mlp(x, experts, np.zeros((3, 1), np.int32), np.ones((3, 1)), SiTU())


def test_weights_whose_shapes_disagree_are_an_error():
    _, experts, _ = random_arguments()
    swapped = experts._replace(w2=np.swapaxes(experts.w2, 1, 2))
    with pytest.raises(ValueError, match='w1, w3, w2 have shapes'):
        grouped_mlp(np.zeros((0, 12), np.float32), swapped, np.zeros(5, np.int32), SiTU())


def test_quantisation_refuses_a_part_of_a_group_and_an_unknown_rule():
    with pytest.raises(ValueError, match='has 40 numbers, wanted a multiple of 32'):
        quantise_mxfp4(jnp.ones((2, 40)))
    with pytest.raises(ValueError, match="rule is 'floor', wanted 'ocp_floor' or 'ceil'"):
        quantise_mxfp4(jnp.ones((2, 32)), 'floor')
