"""What survives a stop: checkpoints of parameters, optimizer, data position and step."""

from __future__ import annotations

import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from k3jax import config as config_lib
from k3jax.config import Config, ModelConfig
from k3jax.model.plan import depth_plan
from k3jax.train.step import TrainState

CONFIG_FILE = 'config.json'
CHECKPOINTS = 'checkpoints'


def write_config(workdir: epath.Path, config: Config) -> None:
    """Stores the config of a run, or checks that the workdir holds the same model.

    Raises:
      ValueError: the workdir belongs to another model, layout or data; names the fields.
    """
    path = workdir / CONFIG_FILE
    now = json.loads(json.dumps(config_lib.to_dict(config)))
    if path.exists():
        before = json.loads(path.read_text())
        differ = _differences(before, now)
        if differ:
            raise ValueError(
                f'{workdir} holds a run of another config: {"; ".join(differ)}. '
                'Take another --workdir, or the config it was made with'
            )
    temporary = workdir / f'{CONFIG_FILE}.tmp'
    temporary.write_text(json.dumps(now, indent=1))
    temporary.replace(path)


_MUST_MATCH = ('model', 'train.scan_layers', 'data.tokenizer')


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    def walk(a: Any, b: Any, where: str) -> list[str]:
        if isinstance(a, dict) and isinstance(b, dict):
            names = sorted(a.keys() | b.keys())
            return [line for n in names for line in walk(a.get(n), b.get(n), f'{where}.{n}')]
        return [] if a == b else [f'{where} is {a!r} there, {b!r} here']

    lines = []
    for path in _MUST_MATCH:
        a, b = before, now
        for name in path.split('.'):
            a, b = a.get(name), b.get(name)
        lines += walk(a, b, path)
    return lines


def read_config(workdir: epath.Path) -> tuple[ModelConfig, bool, str]:
    """Model config, scan_layers and tokenizer of a run's workdir."""
    fields = json.loads((workdir / CONFIG_FILE).read_text())
    model = config_lib.model_config_from_dict(fields['model'])
    return model, fields['train']['scan_layers'], fields['data']['tokenizer']


class Checkpoints:
    """The checkpoints of one run: async saves, the newest N kept, whole ones only."""

    def __init__(self, workdir: epath.Path, keep: int | None = None):
        folder = workdir / CHECKPOINTS
        # Orbax takes absolute paths only, and resolve() would put gs:// under the current folder.
        self._folder = folder if folder.is_absolute() else folder.resolve()
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    def steps(self) -> list[int]:
        """Steps with a checkpoint, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(self, state: TrainState, data_state: dict[str, Any]) -> None:
        """Starts to save; an error of an earlier save surfaces here or in `wait`."""
        self._manager.save(
            int(state.step),
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.StandardSave(state.opt_state),
                data=ocp.args.JsonSave(data_state),
            ),
        )

    def wait(self) -> None:
        """Returns when what was started is on disk.

        Raises:
          OSError: it could not be written; the checkpoints before it are untouched.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise OSError(
                f'{self._folder}: the checkpoint could not be written '
                f'({type(error).__name__}: {_first_line(error)}); '
                f'newest whole checkpoint: {next(iter(self.steps()), "none")}'
            ) from error

    def restore_newest(self, abstract: TrainState) -> tuple[TrainState, dict[str, Any]] | None:
        """State and data position of the newest checkpoint that can be read, or None.

        One that cannot be read is reported, set aside and passed over.

        Raises:
          ValueError: there are checkpoints, and none can be read.
        """
        steps = self.steps()
        for step in steps:
            try:
                found = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        params=ocp.args.StandardRestore(abstract.params),
                        opt_state=ocp.args.StandardRestore(abstract.opt_state),
                        data=ocp.args.JsonRestore(),
                    ),
                )
            except Exception as error:
                logging.error(
                    'checkpoint of step %d cannot be read (%s: %s); trying the one before',
                    step,
                    type(error).__name__,
                    _first_line(error),
                )
                continue
            self._set_aside([other for other in steps if other > step])
            # Placed as the rest is: a step of another placement would be compiled a second time.
            place = jax.tree.leaves(found.params)[0].sharding
            number = jax.device_put(jax.numpy.int32(step), place)
            return TrainState(number, found.params, found.opt_state), found.data
        if steps:
            raise ValueError(
                f'{self._folder}: none of the checkpoints {steps} can be read; '
                'move the folder away to start anew'
            )
        return None

    def _set_aside(self, steps: list[int]) -> None:
        for step in steps:
            target = self._folder.parent / f'unreadable_checkpoint_{step}'
            if target.exists():
                target.rmtree()
            (self._folder / str(step)).rename(target)
            logging.warning('moved the unreadable checkpoint to %s', target)
        if steps:
            self._manager.reload()

    def restore_params(self, abstract: Any) -> tuple[Any, int]:
        """Parameters alone, of the newest checkpoint that can be read, and its step."""
        steps = self.steps()
        for step in steps:
            try:
                args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
                return self._manager.restore(step, args=args).params, step
            except Exception as error:
                logging.error(
                    'checkpoint of step %d cannot be read (%s: %s); trying the one before',
                    step,
                    type(error).__name__,
                    _first_line(error),
                )
        raise ValueError(
            f'{self._folder}: no checkpoint that can be read (found {steps or "none"}); '
            'train first, or point --checkpoint at a converted folder'
        )

    def close(self) -> None:
        self._manager.close()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), '')[:200]


def restore_plan(config: ModelConfig, scan_layers: bool):
    """The plan by which a run's parameters are stacked."""
    return depth_plan(config, scan=scan_layers)
