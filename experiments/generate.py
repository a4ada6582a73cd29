"""Continues a prompt: `python -m experiments.generate --checkpoint=DIR --prompt='def '`.

Images and videos come before the text: `--image=FILE --video=FILE`. With `--token_ids` in place of
a text, these hold the markup, and one media token for each row that the files become.
"""

from __future__ import annotations

import json

from absl import flags

from k3jax.flags import activations, define_activations_flags, run_main, token_ids
from k3jax.serve.draft_folder import open_draft
from k3jax.serve.generate import generate
from k3jax.serve.load import Loaded, open_model, use_dtype
from k3jax.serve.media import check_files, see
from k3jax.serve.speculative import generate_speculatively

_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'Converted folder or training workdir.', required=True
)
_PROMPT = flags.DEFINE_string('prompt', None, 'Text to continue.')
_IMAGES = flags.DEFINE_multi_string('image', [], 'Image file to show before the text; repeatable.')
_VIDEOS = flags.DEFINE_multi_string('video', [], 'Video file to show after the images; repeatable.')
_TOKEN_IDS = flags.DEFINE_string('token_ids', None, 'Comma-separated ids to continue instead.')
_MAX_NEW_TOKENS = flags.DEFINE_integer('max_new_tokens', 128, 'Tokens to add at most.')
_TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0: always the most likely token.')
_TOP_P = flags.DEFINE_float('top_p', 1.0, 'Sample from the likeliest tokens with this mass.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of the sampling.')
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'Compute dtype.')
_DRAFT = flags.DEFINE_string(
    'draft', None, 'Workdir of experiments.draft: its guesses make the same text come faster.'
)
_NUM_GUESSES = flags.DEFINE_integer('num_guesses', 7, 'Tokens that a draft guesses at a time.')
define_activations_flags()
_JSON = flags.DEFINE_bool('json', False, 'Print {"token_ids": [...], "text": ...} as last line.')


def _encode(loaded: Loaded) -> list[int]:
    if _PROMPT.value is None:
        return token_ids(_TOKEN_IDS.value)
    if loaded.tokenizer is None:
        raise ValueError(
            f'--prompt: {_CHECKPOINT.value} carries no tokenizer (no tiktoken.model); '
            'give --token_ids'
        )
    return loaded.tokenizer.encode(_PROMPT.value)


def main(argv: list[str]) -> None:
    del argv
    shown = bool(_IMAGES.value or _VIDEOS.value)
    if (_PROMPT.value is None) == (_TOKEN_IDS.value is None):
        files = '; with --image or --video, the text may be empty: --prompt=' if shown else ''
        raise ValueError(f'wanted either --prompt=TEXT or --token_ids=5,17,...{files}')
    if _PROMPT.value == '' and not shown:
        raise ValueError("--prompt: got '', wanted at least one character")
    if shown and _DRAFT.value is not None:
        raise ValueError('--draft: goes with text alone, not with --image or --video')
    if _PROMPT.value is None:
        token_ids(_TOKEN_IDS.value)  # a mistake shows before a large model is read
    check_files(_IMAGES.value, _VIDEOS.value)
    use_dtype(_DTYPE.value)
    loaded = open_model(_CHECKPOINT.value, _DTYPE.value, **activations())
    tokenizer, stop_ids = loaded.tokenizer, {loaded.model.config.eos_token_id}
    if tokenizer is not None:
        stop_ids |= {tokenizer.eos_id, tokenizer.end_of_msg_id}
    options = dict(
        max_new_tokens=_MAX_NEW_TOKENS.value,
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        seed=_SEED.value,
        stop_ids=frozenset(stop_ids),
        num_ids=None if tokenizer is None else tokenizer.vocab_size,
    )
    model, params, prompt = loaded.model, loaded.params, _encode(loaded)
    if shown:
        seen = see(loaded, _IMAGES.value, _VIDEOS.value)
        options['media_rows'] = seen.rows
        # Ids are taken as they are, with a media token for each row.
        prompt = prompt if _PROMPT.value is None else seen.tokens + prompt
    if _DRAFT.value is None:
        stream = generate(model, params, prompt, **options)
    else:
        model, draft = open_draft(_DRAFT.value, model)
        options['num_guesses'] = _NUM_GUESSES.value
        stream = generate_speculatively(model, params, draft, prompt, **options)
    new = list(stream)
    text = None if tokenizer is None else tokenizer.decode(new)
    if _JSON.value:
        print(json.dumps({'token_ids': new, 'text': text}))
    else:
        print(','.join(map(str, new)) if text is None else f'{_PROMPT.value or ""}{text}')


if __name__ == '__main__':
    run_main(main)
