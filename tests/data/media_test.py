"""Records of text and images: what a row holds, which targets count, what bad files do."""

import dataclasses
import io
import itertools
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from k3jax.config import ConfigError, DataConfig, MediaDataConfig
from k3jax.config_dict import data_config_from_dict, to_dict
from k3jax.data import loader
from k3jax.data.images import ImageConfig, image_patches
from k3jax.data.media import media_tokens
from k3jax.data.pack import IGNORE
from k3jax.data.records import RecordError, Text, all_records, open_records
from k3jax.data.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
SIZE = 4  # pixels of a patch
PAD = TOKENIZER.special_tokens['<|media_pad|>']
END = TOKENIZER.special_tokens['<|media_end|>']


def picture(number):
    """1 to 3 tokens wide, of one gray, which tells it."""
    shape = 8, 8 * (1 + number % 3), 3
    return Image.fromarray(np.full(shape, 10 + number, np.uint8))


def png(image):
    out = io.BytesIO()
    image.save(out, 'PNG')
    return out.getvalue()


def content(number, image):
    """Even records have one image, odd ones two; what comes before them is not predicted."""
    images = [{'type': 'image', 'image': image}] * (1 + number % 2)
    before = {'type': 'text', 'text': f'<{number}>', 'loss': False}
    return {'content': [before, *images, {'type': 'text', 'text': f'={number}'}]}


@pytest.fixture(scope='module')
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp('lines')
    (folder / 'images').mkdir()
    for number in range(40):
        picture(number).save(folder / 'images' / f'{number}.png')
    records = [json.dumps(content(n, f'images/{n}.png')) for n in range(40)]
    (folder / 'a.jsonl').write_text('\n'.join(records) + '\n')
    return folder


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    """The same records; two files, and one sample that has a caption and no JSON."""
    folder = tmp_path_factory.mktemp('shards')
    for shard in range(2):
        with tarfile.open(folder / f'{shard}.tar', 'w') as tar:
            for n in range(20 * shard, 20 * shard + 20):
                add(tar, f'x/{n:02}.0.png', png(picture(n)))
                add(tar, f'x/{n:02}.json', json.dumps(content(n, '0.png')).encode())
    with tarfile.open(folder / '2.tar', 'w') as tar:
        add(tar, 'y.txt', b'a gray square\n')
        add(tar, 'y.b.png', png(picture(3)))
        add(tar, 'y.a.png', png(picture(4)))
        add(tar, 'y.cls', b'7')
    return folder


def config_of(folder, **fields):
    media = dict(sources=(str(folder),), patches_per_row=32, patch_size=SIZE, open_rows=3)
    media |= fields.pop('media', {})
    options = dict(sequence_length=96, batch_size=4, held_out_every=10, shuffle_rows=8)
    return DataConfig(source=str(folder), media=MediaDataConfig(**media), **(options | fields))


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def documents(batches):
    """Of all rows: the text of each document, its targets' text, its images as (grid, gray)."""
    for batch in batches:
        for row in range(len(batch['tokens'])):
            grids = [tuple(g) for g in batch['grids'][row].tolist() if any(g)]
            starts = np.cumsum([0, *(t * h * w for t, h, w in grids)])
            images = iter(
                (grid, round(float(batch['pixels'][row, start].max() + 1) * 127.5))
                for grid, start in zip(grids, starts, strict=False)
            )
            for number in range(1, batch['segment_ids'][row].max() + 1):
                here = batch['segment_ids'][row] == number
                tokens, targets = batch['tokens'][row][here], batch['targets'][row][here]
                found = [next(images) for _ in range(np.sum(tokens == END))]
                yield (
                    TOKENIZER.decode([t for t in tokens.tolist() if t < 256]),
                    TOKENIZER.decode([t for t in targets.tolist() if t != IGNORE]),
                    found,
                    int(np.sum(tokens == PAD)),
                )
            assert next(images, None) is None


@pytest.mark.parametrize('kind', ['lines', 'shards'])
def test_every_record_is_whole_in_one_row_with_its_own_patches(kind, request):
    config = config_of(request.getfixturevalue(kind), shuffle_rows=1)
    seen = {}
    for text, targets, images, num_pads in documents(
        take(loader.train_iterator(config, TOKENIZER), 10)
    ):
        if text.startswith('image'):
            continue  # the sample with a caption
        number = int(text[1 : text.index('>')])
        width = 8 * (1 + number % 3)
        shown = f'image {width}x8' * (1 + number % 2)
        assert text == f'<{number}>{shown}={number}'
        assert targets == f'={number}[EOS]'
        pixels = 10 + number
        assert images == [((1, 2, width // SIZE), pixels)] * (1 + number % 2)
        assert num_pads == sum(t * h * w for (t, h, w), _ in images) // 4
        seen[number] = seen.get(number, 0) + 1
    assert set(seen) == {n for n in range(40) if n % 10 != 9}


def test_a_sample_without_json_is_its_images_by_name_then_its_caption(shards):
    config = config_of(shards, held_out_every=41)
    record = open_records(str(shards), config, 'held_out')[0]
    first, second, text = record.parts
    assert text.text == 'a gray square'
    grays = [
        np.asarray(Image.open(io.BytesIO(x.read(ImageConfig())))).max() for x in (first, second)
    ]
    assert grays == [14, 13]


def sample(tmp_path, *members):
    """The parts of each record of a .tar, texts as they are and images as sizes, or the fault."""
    with tarfile.open(tmp_path / 'a.tar', 'w') as tar:
        for name, data in members:
            if isinstance(data, tarfile.TarInfo):
                data.name = name
                tar.addfile(data)
            else:
                add(tar, name, data)
    records = all_records(str(tmp_path))

    def shown(part):
        if isinstance(part, Text):
            return part.text
        return Image.open(io.BytesIO(part.read(ImageConfig()))).size

    for index in range(len(records)):
        try:
            yield [shown(part) for part in records[index].parts]
        except RecordError as error:
            yield str(error).split('a.tar:')[1]


def link(kind, target):
    member = tarfile.TarInfo()
    member.type, member.linkname = kind, target
    return member


def test_samples_as_others_make_them(tmp_path):
    image, notes = png(picture(0)), b'{"caption": "x", "url": "y"}'
    got = sample(
        tmp_path,
        ('./a.png', image),  # as of `tar c .`
        ('a.txt', b'A'),
        ('b.JPG', image),
        ('b.json', json.dumps({'content': [{'type': 'image', 'image': 'JPG'}]}).encode()),
        ('c.png', image),
        ('c.json', notes),
        ('c.txt', b'C'),
        ('d.png', image),
        ('d.caption.txt', b'D'),
        ('e.png', link(tarfile.LNKTYPE, './a.png')),
        ('e.txt', b'E'),
        ('f.png', link(tarfile.SYMTYPE, 'a.png')),
        ('f.txt', b'F'),
        ('g.meta.json', notes),
        ('h.json', notes),
        ('a.png', image),  # another sample of this name
        ('a.txt', b'A2'),
    )
    size = (8, 8)
    *good, f, g, h, again = got
    assert [*good, again] == [
        [size, 'A'],
        [size],
        [size, 'C'],
        [size, 'D'],
        [size, 'E'],
        [size, 'A2'],
    ]
    assert f == 'f.png: a link, wanted a file; make the archive with tar --dereference'
    assert g == "g: wanted an image, a .txt or a .json, got ['meta.json']"
    assert h.startswith('h: got b') and 'wanted an object' in h


def test_no_end_of_a_tar_is_lost_silently(tmp_path, shards, caplog):
    whole = (shards / '0.tar').read_bytes()
    path = tmp_path / 'a.tar'
    with tarfile.open(shards / '0.tar') as tar:
        head = tar.getmembers()[8].offset
    damaged = whole[:head] + b'\xff' * 99 + whole[head + 99 :]
    for data in (damaged, whole[: head + 200], whole + whole):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r'a.tar: not a whole, .* \(not a member at byte'):
            all_records(str(tmp_path))
    path.write_bytes(whole[:head])
    assert len(all_records(str(tmp_path))) == 4 and 'has no end mark' in caplog.text


def test_a_resumed_iterator_goes_on_exactly(lines):
    config = config_of(lines)
    whole = take(loader.train_iterator(config, TOKENIZER), 12)
    first = loader.train_iterator(config, TOKENIZER)
    take(first, 5)
    state = json.loads(json.dumps(first.get_state()))
    resumed = loader.train_iterator(config, TOKENIZER)
    resumed.set_state(state)
    for want, got in zip(whole[5:], take(resumed, 7), strict=True):
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_streams_hold_the_same_rows_whoever_reads_them(lines):
    config = config_of(lines, num_streams=2)
    whole = take(loader.train_iterator(config, TOKENIZER), 3)
    second = take(loader.train_iterator(config, TOKENIZER, streams=(1,)), 3)
    for want, got in zip(whole, second, strict=True):
        np.testing.assert_array_equal(want['pixels'][2:], got['pixels'])


def test_rows_of_text_in_a_mixture_have_no_patches(lines, tmp_path):
    (tmp_path / 'a.jsonl').write_text(
        '\n'.join(json.dumps({'text': 'word ' * 9}) for _ in range(30))
    )
    config = config_of(lines)
    config = dataclasses.replace(
        config, source='', mixture=(str(lines), str(tmp_path)), mixture_weights=(1, 1)
    )
    batches = take(loader.train_iterator(config, TOKENIZER), 4)
    has_pads = np.concatenate([(b['tokens'] == PAD).any(axis=1) for b in batches])
    has_media = np.concatenate([b['grids'].any(axis=(1, 2)) for b in batches])
    np.testing.assert_array_equal(has_pads, has_media)
    assert has_media.sum() == 8
    held_out = take(loader.held_out_batches(config, TOKENIZER), 9)
    assert {b['pixels'].shape for b in held_out} == {(4, 32, 3, SIZE, SIZE)}


def bad_folder(tmp_path, lines, *bad):
    good = [json.dumps(content(n, str(lines / f'images/{n}.png'))) for n in range(20)]
    (tmp_path / 'a.jsonl').write_text('\n'.join([*good[:5], *bad, *good[5:]]))
    return tmp_path


def test_a_bad_record_is_passed_over_and_named_and_the_others_are_kept(tmp_path, lines, caplog):
    (tmp_path / 'empty.png').write_bytes(b'')
    (tmp_path / 'cut.png').write_bytes(png(picture(1))[:40])
    bad = [json.dumps(content(0, name)) for name in ('empty.png', 'cut.png', 'none.png')]
    folder = bad_folder(tmp_path, lines, '{"content": [{"type": "film"}]}', *bad, '{')
    batches = take(loader.train_iterator(config_of(folder), TOKENIZER), 10)
    seen = {text for text, *_ in documents(batches) if text}
    assert len(seen) == 19  # of 25 records two are held out, one of them bad
    for fault in ('film', 'empty.png: an empty file', 'cut.png', 'none.png: cannot be read'):
        assert caplog.text.count(fault) == 1


ODD = {  # image -> what is told of it
    'a\0.png': 'embedded null byte',
    'https://x.org/a.png': "no 'https://' here",
    '\ud800.png': 'surrogates not allowed',
    'images': 'a folder or a device, wanted an image file',
    'large.png': 'begins with an image of 114 tokens and 400 patches, wanted at most 96',
}


def test_no_odd_record_takes_others_with_it(tmp_path, lines, caplog):
    Image.new('RGB', (80, 80)).save(tmp_path / 'large.png')
    (tmp_path / 'images').mkdir()
    bad = [{'content': [{'type': 'image', 'image': name}]} for name in ODD]
    bad += [
        {'content': [{'type': 'text', 'text': 'a', 'los': False}]},
        {'content': [{'type': 'text', 'text': 'a'}], 'text': 'b'},
    ]
    lines_of = [json.dumps(record) for record in bad]
    folder = bad_folder(tmp_path, lines, *lines_of, '{"text": %s}' % ('9' * 5000))
    config = config_of(folder, held_out_every=28)
    seen = {text for text, *_ in documents(take(loader.train_iterator(config, TOKENIZER), 12))}
    assert {text[: text.index('>') + 1] for text in seen if text} == {f'<{n}>' for n in range(19)}
    caplog.text.encode()  # what a log is written as
    for fault in (*ODD.values(), "'los': False", 'or else a string in "text"', 'not JSON'):
        assert caplog.text.count(fault) == 1, fault


def test_a_bad_record_ends_the_run_where_the_config_says_so(tmp_path, lines):
    config = config_of(bad_folder(tmp_path, lines, '{'), media={'bad_records': 'stop'})
    with pytest.raises(RecordError, match=r'a.jsonl:6: got .*not JSON'):
        take(loader.train_iterator(config, TOKENIZER), 10)


def test_a_source_without_a_good_record_ends(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{\n' * 12)
    with pytest.raises(ValueError, match='none of 11 records can be used; .*not JSON'):
        take(loader.train_iterator(config_of(tmp_path), TOKENIZER), 1)


def test_a_record_longer_than_a_row_loses_whole_images(lines, caplog):
    config = config_of(lines, media={'patches_per_row': 8})
    for text, _, images, num_pads in documents(take(loader.train_iterator(config, TOKENIZER), 9)):
        assert num_pads == sum(t * h * w for (t, h, w), _ in images) // 4
        assert text.count('image') == len(images)
    assert 'loses its end' in caplog.text


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'sources': ('elsewhere',)}, r"data.media.sources: got \['elsewhere'\], wanted some of"),
        ({'patches_per_row': 6}, 'data.media.patches_per_row: got 6, wanted a multiple of 4'),
        ({'bad_records': 'fix'}, "data.media.bad_records: got 'fix'"),
    ],
)
def test_config_mistakes_are_named(lines, fields, message):
    with pytest.raises(ConfigError, match=message):
        config_of(lines, media=fields)


@pytest.mark.parametrize(
    ('files', 'message'),
    [
        ({}, r'where no .jsonl or .tar file of records is'),
        ({'a.jsonl': b'{"text": "a"}\n'}, 'with 1 records, wanted at least 10'),
        ({'a.tar': b'no tar' * 200}, 'a.tar: not a whole, single, uncompressed tar'),
        ({'a.tar.gz': b''}, 'a.tar.gz has to be unpacked first'),
    ],
)
def test_sources_that_cannot_be_used_are_named(tmp_path, files, message):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        loader.train_iterator(config_of(tmp_path), TOKENIZER)


def test_a_config_with_media_survives_a_file(lines):
    config = config_of(lines)
    assert data_config_from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_medium_has_as_many_pads_as_tokens():
    patches = image_patches(Image.new('RGB', (640, 480)), ImageConfig())
    tokens = media_tokens('<|media_begin|>x<|media_pad|><|media_end|>', 414, TOKENIZER)
    assert np.sum(tokens == PAD) == len(patches.pixels) // 4 == 414
    assert tokens[-1] == END
