"""The tokenizer: K3's slots and ids, exact round trips, and errors that name the place."""

import base64
import json
import pathlib
import time

import numpy as np
import pytest
import regex

from k3jax.data import tokenizer as tokenizer_lib
from tests.vocabulary import released_tokenizer

TEXTS = [
    '',
    'def f(x):\n    return x + 1\n',
    'naïve café Ünïcode, "quotes" and it\'s WE\'LL',
    '月之暗面 Kimi 的中文 and 日本語テキスト',
    '🚀👩‍👩‍👧‍👦 emoji \u200d joiners',
    ' ' * 300 + 'x' + '\n\n\r\n\t' * 20,
    '1234567890 3.14159 ٣٤',
    'a\x00b\x1f\x7f',
    '<|open|> [EOS] <|end_of_msg|>',
]


def write_vocab(folder, tokens):
    lines = [b'%s %d\n' % (base64.b64encode(t), i) for i, t in enumerate(tokens)]
    (folder / 'tiktoken.model').write_bytes(b''.join(lines))


def small_tokens():
    return [bytes([b]) for b in range(256)] + [b'th', b'the', b' the', b'in', b'ing', b'aa']


@pytest.fixture
def small(tmp_path):
    write_vocab(tmp_path, small_tokens())
    return tokenizer_lib.load_tokenizer(tmp_path)


@pytest.fixture(scope='module')
def real():
    return released_tokenizer()


def test_byte_tokenizer_has_one_id_a_byte_and_256_special_tokens():
    tok = tokenizer_lib.byte_tokenizer()
    assert tok.vocab_size == 512
    assert tok.encode('aé') == [97, 0xC3, 0xA9]
    assert (tok.bos_id, tok.eos_id, tok.end_of_msg_id, tok.pad_id) == (256, 257, 258, 511)
    assert tok.decode([256, 259, 97, 264]) == '[BOS]<|open|>a<|reserved_token_264|>'


def test_files_of_the_byte_tokenizer_are_read_as_it(tmp_path):
    for name, data in tokenizer_lib.byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / 'config.json').write_text('{"model_type": "kimi_linear"}')  # names others
    got, want = tokenizer_lib.load_tokenizer(tmp_path), tokenizer_lib.byte_tokenizer()
    assert got.special_tokens == want.special_tokens
    assert got.encode('a\x00é<|sep|>') == want.encode('a\x00é<|sep|>')


def test_none_and_bytes_name_the_byte_tokenizer():
    assert tokenizer_lib.load_tokenizer(None).vocab_size == 512
    assert tokenizer_lib.load_tokenizer('bytes').vocab_size == 512


@pytest.mark.parametrize('text', TEXTS)
def test_round_trip_of_bytes_and_of_a_small_vocabulary(small, text):
    for tok in (tokenizer_lib.byte_tokenizer(), small):
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert max(ids, default=0) < tok.num_ranks
        np.testing.assert_array_equal(tok.encode_array(text), ids)
        assert tok.decode(tok.encode(text, allow_special=True)) == text


def test_merges_follow_the_ranks(small):
    assert small.encode('the the') == [257, 258]
    assert small.encode('thing') == [256, 260]


def test_special_text_is_ordinary_unless_allowed(small):
    text = 'a<|open|>b'
    assert small.encode(text, allow_special=True) == [97, small.num_ranks + 3, 98]
    assert small.encode(text) == list(text.encode())


def test_lone_surrogates_are_replaced(small):
    for tok in (tokenizer_lib.byte_tokenizer(), small):
        assert tok.decode(tok.encode('a\ud800b')) == 'a\ufffdb'
        assert tok.decode(tok.encode('a\ud83d\ude80b')) == 'a🚀b'


def test_invalid_utf8_is_replaced_and_bytes_are_kept():
    tok = tokenizer_lib.byte_tokenizer()
    assert tok.decode([0xE6, 97]) == '\ufffda'
    assert tok.decode_bytes([0xE6, 97]) == b'\xe6a'


@pytest.mark.parametrize('bad', [-1, 512, 163_584])
def test_decode_names_an_id_out_of_range(bad):
    with pytest.raises(ValueError, match=rf'position 1: got {bad}, wanted 0\.\.511'):
        tokenizer_lib.byte_tokenizer().decode([5, bad])


def test_token_byte_lengths_add_up_to_the_text(small):
    for tok in (tokenizer_lib.byte_tokenizer(), small):
        lengths = tok.token_byte_lengths()
        assert lengths.shape == (tok.vocab_size,) and lengths.dtype == np.int32
        assert lengths[tok.num_ranks :].sum() == 0
        for text in TEXTS:
            assert lengths[tok.encode_array(text)].sum() == len(text.encode())


# The words of the release, written with lookaheads instead of class intersections.
CASED_HEAD = r'(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])'
CASED_TAIL = r'(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])'
LEAD = r'[^\r\n\p{L}\p{N}]?'
SUFFIX = r"(?:'(?:[sSſ]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))?"  # ſ is a lower-case S
WORD = regex.compile(
    rf'\p{{Han}}+|{LEAD}{CASED_HEAD}*{CASED_TAIL}+{SUFFIX}|{LEAD}{CASED_HEAD}+{CASED_TAIL}*{SUFFIX}'
    r'|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def merge_one_pair_at_a_time(word, ranks):
    """Byte-pair encoding as its definition reads, slowly."""
    parts = [bytes([byte]) for byte in word]
    while True:
        found = [
            (ranks[a + b], i)
            for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in ranks
        ]
        if not found:
            return [ranks[part] for part in parts]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_words_and_merges_follow_the_definition_on_random_text():
    alphabet = ['a', 'B', 's', "'", '1', '٣', ' ', '\t', '\n', '\r', '!', '中', '々', 'é', 'ʰ', 'ǅ']
    alphabet += ['\u0301', 'あ', '🚀', '\u3000', '<', 'l', 'ſ']
    # Every pair of characters can merge, so that a wrong word border changes the ids.
    pairs = [(x + y).encode() for x in alphabet for y in alphabet]
    merges = dict.fromkeys(pair[:n] for pair in pairs for n in range(2, len(pair) + 1))
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tok = tokenizer_lib.Tokenizer(ranks)
    rng = np.random.default_rng(0)
    for _ in range(400):
        text = ''.join(rng.choice(alphabet, size=rng.integers(1, 30)).tolist())
        text = text.replace('1', '11111')  # numbers longer than the three digits of a word
        words = WORD.findall(text)
        assert ''.join(words) == text
        expected = [i for word in words for i in merge_one_pair_at_a_time(word.encode(), ranks)]
        assert tok.encode(text) == expected, text


def chunks_one_character_at_a_time(text, max_chunk, max_run):
    """The chunking as its definition reads, slowly."""
    for start in range(0, len(text), max_chunk):
        piece = text[start : start + max_chunk]
        begin, run = 0, 0
        for i, c in enumerate(piece):
            run = run + 1 if i and c.isspace() == piece[i - 1].isspace() else 1
            if run > max_run:
                yield piece[begin:i]
                begin, run = i, 1
        yield piece[begin:]


def test_chunks_cut_at_the_25001st_character_of_a_run(monkeypatch):
    def lengths(text):
        return [len(chunk) for chunk in tokenizer_lib._chunks(text)]

    assert lengths('x' * 25_000 + ' ' * 25_000) == [50_000]
    assert lengths('x' * 25_001) == [25_000, 1]
    assert lengths('ab ' + ' ' * 60_000) == [25_002, 25_000, 10_001]
    assert lengths('a b' * 300_000) == [400_000, 400_000, 100_000]

    monkeypatch.setattr(tokenizer_lib, '_MAX_CHUNK', 29)
    monkeypatch.setattr(tokenizer_lib, '_MAX_RUN', 4)
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = ''.join(rng.choice(list('ab \n\x1f\u3000'), size=rng.integers(1, 90)).tolist())
        text = text.replace('a', 'aaa').replace(' ', '   ')
        expected = list(chunks_one_character_at_a_time(text, 29, 4))
        assert list(tokenizer_lib._chunks(text)) == expected


def test_a_run_is_not_merged_across_its_cut(small):
    # Token 261 is 'aa'; 25,001 letters would otherwise end in 12,500 pairs and a single letter.
    ids = small.encode('a' * 25_003)
    assert ids == [261] * 12_500 + [261, 97]
    ids = small.encode('b' + 'a' * 25_002)
    assert ids == [98] + [261] * 12_499 + [97, 261, 97]


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tiktoken\.model here.*ask for 'bytes'"):
        tokenizer_lib.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    'line, wrong',
    [
        (b'IQ==', 'IQ=='),
        (b'!!! 3', '!!! 3'),
        (b'IQ== three', 'three'),
        (b'IQ== 7', 'got rank 7, wanted 3'),
        (b'AA== 3', 'no earlier line'),
    ],
)
def test_a_damaged_vocabulary_names_the_line(tmp_path, line, wrong):
    write_vocab(tmp_path, [bytes([b]) for b in range(3)])
    path = tmp_path / 'tiktoken.model'
    path.write_bytes(path.read_bytes() + line + b'\n')
    with pytest.raises(ValueError, match=f'line 4.*{wrong}'):
        tokenizer_lib.load_tokenizer(tmp_path)


def test_a_truncated_vocabulary_misses_bytes(tmp_path):
    write_vocab(tmp_path, [bytes([b]) for b in range(200)])
    with pytest.raises(ValueError, match='no token for byte 0xc8'):
        tokenizer_lib.load_tokenizer(tmp_path)
    (tmp_path / 'tiktoken.model').write_bytes(b'')
    with pytest.raises(ValueError, match='got no tokens'):
        tokenizer_lib.load_tokenizer(tmp_path)


def test_tokenizer_config_names_the_special_tokens(tmp_path):
    write_vocab(tmp_path, small_tokens())
    config = tmp_path / 'tokenizer_config.json'
    added = {'262': {'content': '[BOS]'}, '264': {'content': '<|im_end|>', 'special': True}}
    config.write_text(json.dumps({'added_tokens_decoder': added}))
    tok = tokenizer_lib.load_tokenizer(tmp_path)
    assert tok.encode('[BOS]<|im_end|>', allow_special=True) == [262, 264]
    assert tok.decode([265]) == '<|reserved_token_265|>'
    assert tok.end_of_msg_id == 264

    config.write_text(json.dumps({'model_max_length': 1}))
    assert tokenizer_lib.load_tokenizer(tmp_path).decode([264]) == '<|end_of_msg|>'

    config.write_text(json.dumps({'added_tokens_decoder': {'7': {'content': '[BOS]'}}}))
    with pytest.raises(ValueError, match=r"'\[BOS\]': got id 7, wanted 262\.\.517"):
        tokenizer_lib.load_tokenizer(tmp_path)

    twice = {'262': {'content': 'x'}, '263': {'content': 'x'}}
    config.write_text(json.dumps({'added_tokens_decoder': twice}))
    with pytest.raises(ValueError, match="'x': got two ids"):
        tokenizer_lib.load_tokenizer(tmp_path)

    config.write_text('{')
    with pytest.raises(ValueError, match='tokenizer_config.json: not JSON'):
        tokenizer_lib.load_tokenizer(tmp_path)


def test_the_model_type_names_the_special_tokens_where_nothing_else_does(tmp_path):
    write_vocab(tmp_path, small_tokens())
    k2 = {2: '<|im_end|>', 3: '<|im_user|>', 11: '<|tool_calls_section_begin|>', 22: '<think>'}
    k3 = {2: '<|end_of_msg|>', 3: '<|open|>', 11: '<|reserved_token_273|>'}
    configs = [
        ({'model_type': 'kimi_k2'}, k2),
        ({'model_type': 'kimi_linear'}, k2),
        ({'model_type': 'kimi_k3'}, k3),
        ({'model_type': 'kimi_k2', 'architectures': ['KimiK3ForConditionalGeneration']}, k3),
        ({}, k3),
    ]
    for config, slots in configs:
        (tmp_path / 'config.json').write_text(json.dumps(config))
        tok = tokenizer_lib.load_tokenizer(tmp_path)
        for slot, text in slots.items():
            assert tok.special_tokens[text] == tok.num_ranks + slot
        assert tok.stop_ids == {tok.num_ranks + slot for slot in (1, 2, 9)}


def test_released_ids(real):
    assert real.vocab_size == 163_840
    assert real.encode('think') == [39964]
    assert real.encode('response') == [12092]
    assert real.encode('message') == [2778]
    assert real.encode('tools') == [25385]
    assert real.encode(' role') == [6244]
    assert real.encode('="') == [878]
    assert real.encode('user') == [2482]
    assert real.encode('assistant') == [69702]
    assert real.encode('"') == [1]
    assert real.encode(' <|open|> ') == [22652, 4454, 91, 29, 220]
    specials = {
        '[BOS]': 163584,
        '[EOS]': 163585,
        '<|end_of_msg|>': 163586,
        '<|open|>': 163587,
        '<|close|>': 163588,
        '<|sep|>': 163589,
        '[start_header_id]': 163590,
        '[end_header_id]': 163591,
        '<|reserved_token_163592|>': 163592,
        '[EOT]': 163593,
        '<|media_begin|>': 163602,
        '<|media_content|>': 163603,
        '<|media_end|>': 163604,
        '<|media_pad|>': 163605,
        '<osagent_mode>': 163649,
        '[UNK]': 163838,
        '[PAD]': 163839,
    }
    for text, token_id in specials.items():
        assert real.encode(text, allow_special=True) == [token_id]
        assert real.decode([token_id]) == text
    assert (real.eos_id, real.end_of_msg_id, real.pad_id) == (163585, 163586, 163839)


@pytest.mark.parametrize('text', TEXTS)
def test_released_vocabulary_round_trip(real, text):
    assert real.decode(real.encode(text)) == text
    assert real.token_byte_lengths()[real.encode_array(text)].sum() == len(text.encode())


def test_released_vocabulary_cuts_long_runs_where_the_original_does(real):
    for text in ('a' * 60_000, ' ' * 60_000, '字' * 26_000):
        pieces = [text[i : i + 25_000] for i in range(0, len(text), 25_000)]
        assert real.encode(text) == [i for piece in pieces for i in real.encode(piece)]
        assert real.decode(real.encode(text)) == text


def test_released_vocabulary_is_quick_on_long_text(real):
    text = pathlib.Path(tokenizer_lib.__file__).read_text() * 20
    start = time.perf_counter()
    ids = real.encode_array(text)
    assert time.perf_counter() - start < 5
    assert real.decode(ids) == text
