"""Writes scikit-learn's handwritten digits as records: `python -m experiments.digits --output=DIR`.

1,797 images of 8 x 8, scaled up to 56 x 56; each record is an image and its digit. One in ten is in
DIR/test, the others in DIR/train, which configs/digits_k3.py reads.
"""

from __future__ import annotations

import io
import json

import numpy as np
from absl import flags, logging
from etils import epath
from PIL import Image

from k3jax.files import write_whole
from k3jax.flags import run_main

_OUTPUT = flags.DEFINE_string('output', 'runs/digits', 'Folder to write.')
SIDE = 56  # four patches
TEST_EVERY = 10


def _png(pixels: np.ndarray) -> bytes:
    """Of [8, 8] numbers from 0 to 16."""
    image = Image.fromarray(np.rint(pixels * (255 / 16)).astype(np.uint8))
    out = io.BytesIO()
    image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(out, 'PNG')
    return out.getvalue()


def main(_: list[str]) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError('the digits are in scikit-learn: pip install scikit-learn') from None
    digits, folder = load_digits(), epath.Path(_OUTPUT.value)
    lines: dict[str, list[str]] = {'train': [], 'test': []}
    for part in lines:
        (folder / part / 'images').mkdir(parents=True, exist_ok=True)
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = 'test' if number % TEST_EVERY == TEST_EVERY - 1 else 'train'
        image = f'images/{number:04}.png'
        write_whole(folder / part / image, _png(pixels))
        content = [{'type': 'image', 'image': image}, {'type': 'text', 'text': str(digit)}]
        lines[part].append(json.dumps({'content': content}) + '\n')
    for part, records in lines.items():
        write_whole(folder / part / 'records.jsonl', ''.join(records).encode())
        logging.info('%s: %d records', folder / part / 'records.jsonl', len(records))


if __name__ == '__main__':
    run_main(main)
