"""Converts a released checkpoint to an Orbax folder; that, or a run, to the released layout.

    python -m experiments.convert --source=Kimi-K3 --target=gs://bucket/k3
    python -m experiments.convert --source=gs://bucket/k3 --target=out --to=safetensors
    python -m experiments.convert --source=runs/mine --target=out --to=safetensors

The converted folder holds `params/` (restorable by plain Orbax), the tokenizer and the other files
of the release, and `conversion.json`, which is written last. Run the same command again after an
interruption: it goes on where it stopped. Of a training workdir the newest checkpoint is exported;
experts that were trained in MXFP4 are packed, quantised from the float32 masters as in training.
"""

import sys

from absl import flags, logging
from etils import epath

from k3jax.convert.converted import CONVERSION_FILE
from k3jax.convert.progress import Progress
from k3jax.convert.to_orbax import convert
from k3jax.convert.to_safetensors import export
from k3jax.flags import run_main
from k3jax.serve.export import export_workdir
from k3jax.train.checkpoint import is_workdir

_SOURCE = flags.DEFINE_string('source', None, 'Folder to read, local or gs://.', required=True)
_TARGET = flags.DEFINE_string('target', None, 'Folder to write, local or gs://.', required=True)
_TO = flags.DEFINE_enum('to', 'orbax', ['orbax', 'safetensors'], 'Layout of the target.')
_EXPERTS = flags.DEFINE_enum(
    'experts',
    None,
    ['bf16', 'mxfp4'],
    'Form of the routed experts in the converted folder; by default that of the source.',
)


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)  # Orbax reports each of its steps
    progress = Progress('convert' if _TO.value == 'orbax' else 'export', stream=sys.stderr)
    if _TO.value == 'safetensors':
        if _EXPERTS.value is not None:
            raise ValueError(
                f'--experts={_EXPERTS.value}: only for --to=orbax; an export writes the experts as '
                'the converted folder holds them'
            )
        if is_workdir(_SOURCE.value):
            config = export_workdir(_SOURCE.value, _TARGET.value, progress)
            print(f'released layout in {_TARGET.value}, experts in {config.experts_format}')
            return
        export(_SOURCE.value, _TARGET.value, progress)
        print(f'released layout in {_TARGET.value}')
        return
    if is_workdir(_SOURCE.value):
        raise ValueError(
            f'--source={_SOURCE.value}: a training workdir, which is exported with --to=safetensors'
        )
    if (epath.Path(_SOURCE.value) / CONVERSION_FILE).exists():
        raise ValueError(
            f'--source={_SOURCE.value}: already a converted folder; add --to=safetensors to write '
            'it in the released layout'
        )
    conversion = convert(_SOURCE.value, _TARGET.value, _EXPERTS.value, progress)
    print(
        f'{conversion.model_config.family} in {_TARGET.value}, experts in '
        f'{conversion.experts_format}, {len(conversion.carried)} tensors carried as they are'
    )


if __name__ == '__main__':
    run_main(main)
