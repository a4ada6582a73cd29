"""What a request becomes for the engine, and what is too much for it."""

import base64
import dataclasses
import io

import pytest
from PIL import Image

from k3jax.data.images import ImageConfig
from k3jax.serve.api.chat_request import read_chat_request
from k3jax.serve.api.errors import ApiError
from k3jax.serve.api.rules import RULES
from k3jax.serve.prepare import Preparer
from tests.scripted_engine import ScriptedEngine

ENGINE = ScriptedEngine(lambda _: [])
RULE = RULES['open']


def prepare(body, rules=RULE, images=None):
    preparer = Preparer(ENGINE, rules, images, None)
    return preparer.chat(read_chat_request(body, rules))


def image(size, data=None):
    file = io.BytesIO()
    Image.new('RGB', size, 'red').save(file, 'PNG')
    url = f'data:image/png;base64,{base64.b64encode(data or file.getvalue()).decode()}'
    return {'type': 'image_url', 'image_url': url}


def asked(*parts):
    return {'messages': [{'role': 'user', 'content': list(parts)}]}


def test_the_answer_may_fill_the_window():
    body = asked({'type': 'text', 'text': 'x'})
    prepared = prepare(body)
    num_ids = len(prepared.request.prompt_ids)
    assert prepared.num_prompt_tokens == num_ids - 3 and prepared.opened == 'think'
    assert prepared.request.sampling.max_new_tokens == ENGINE.max_length - num_ids
    few = dataclasses.replace(RULE, default_max_tokens=7)
    assert prepare(body, few).request.sampling.max_new_tokens == 7
    assert prepare(body | {'max_tokens': 9}, few).request.sampling.max_new_tokens == 9


def test_images_count_with_all_their_tokens():
    body = asked(image((60, 40)), image((28, 28)))
    plain = prepare(asked({'type': 'text', 'text': ''})).num_prompt_tokens
    wrapper = len('image 60x40') + 4 + len('image 28x28') + 4
    prepared = prepare(body, images=ImageConfig())
    assert prepared.num_prompt_tokens == plain + wrapper - 2 + 6 + 1
    assert [patches.grid for patches in prepared.request.media] == [(1, 4, 6), (1, 2, 2)]


def test_images_beyond_what_a_request_may_have_are_never_decoded(monkeypatch):
    monkeypatch.setattr('k3jax.serve.api.media.read_image', None)
    few = dataclasses.replace(RULE, max_image_tokens=6)
    with pytest.raises(ApiError, match='images of 7 tokens, wanted at most 6'):
        prepare(asked(image((60, 40)), image((28, 28))), few, ImageConfig())
    with pytest.raises(ApiError, match='wanted at most 4096 together'):
        prepare(asked(image((2000, 2000))), RULE, ImageConfig())
    many = dataclasses.replace(RULE, max_image_bytes=100)
    with pytest.raises(ApiError, match='bytes of images'):
        prepare(asked(image((60, 40))), many, ImageConfig())


def test_a_server_that_cannot_constrain_says_so():
    with pytest.raises(ApiError, match='cannot constrain'):
        prepare(asked() | {'response_format': {'type': 'json_object'}})
