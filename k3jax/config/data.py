"""Where text comes from."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from k3jax.config.checks import check_seed, not_negative, positive, require


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
        check_seed(f'{where}.seed', self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaDataConfig:
    """Records of text and images, and how many patches of them a row may hold."""

    # Which of the data's sources hold records: .jsonl with image files, or WebDataset .tar.
    sources: tuple[str, ...] = ()
    patches_per_row: int = 4096
    patch_size: int = 14  # pixels of a side; model.vision.patch_size
    in_patch_limit: int = 65536  # of an image, which is scaled down to it
    bad_records: Literal['skip', 'stop'] = 'skip'  # what becomes of a run that meets one
    open_rows: int = 16  # that are filled at the same time; more waste less of them

    def __post_init__(self) -> None:
        where = 'data.media'
        positive(
            where,
            patches_per_row=self.patches_per_row,
            patch_size=self.patch_size,
            in_patch_limit=self.in_patch_limit,
            open_rows=self.open_rows,
        )
        require(
            self.patches_per_row % 4 == 0,
            f'{where}.patches_per_row',
            self.patches_per_row,
            'a multiple of 4, of which a token is made',
        )
        require(
            self.bad_records in ('skip', 'stop'),
            f'{where}.bad_records',
            self.bad_records,
            "'skip' or 'stop'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it becomes batches."""

    # A folder or file, local or gs://, of .txt / .jsonl; or 'python_stdlib'; or 'needles'.
    source: str = 'python_stdlib'
    mixture: tuple[str, ...] = ()  # several such sources instead of `source`
    mixture_weights: tuple[float, ...] = ()  # shares of the tokens, one for each; need not sum to 1
    needles: NeedlesConfig = NeedlesConfig()
    media: MediaDataConfig = MediaDataConfig()
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
        positive(
            'data',
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
            num_streams=self.num_streams,
            max_document_bytes=self.max_document_bytes,
            long_document_repeats=self.long_document_repeats,
            shuffle_rows=self.shuffle_rows,
        )
        not_negative('data', long_document_bytes=self.long_document_bytes)
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
        unknown = sorted(set(self.media.sources) - set(self.mixture or (self.source,)))
        require(
            not unknown,
            'data.media.sources',
            unknown,
            f'some of {list(self.mixture or (self.source,))} (data.mixture or data.source)',
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
        check_seed('data.shuffle_seed', self.shuffle_seed)

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
