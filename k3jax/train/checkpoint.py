"""What survives a stop: checkpoints of parameters, optimizer, data position and step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from k3jax.config import Config, DataConfig, ModelConfig, QuantisationConfig
from k3jax.config_dict import (
    config_from_dict,
    data_config_from_dict,
    model_config_from_dict,
    to_dict,
)
from k3jax.files import write_json
from k3jax.model.plan import depth_plan
from k3jax.train.state import TrainState

CONFIG_FILE = 'run_config.json'
CHECKPOINTS = 'checkpoints'


def _stored(config: Config) -> dict[str, Any]:
    """What a workdir remembers of its run; the plan says how the parameters are stacked."""
    plan = depth_plan(config.model, scan=config.train.scan_layers)
    fields = to_dict(config) | {'plan': [dataclasses.asdict(block) for block in plan]}
    return json.loads(json.dumps(fields))


def _read(workdir: epath.Path) -> dict[str, Any]:
    path = workdir / CONFIG_FILE
    try:
        fields = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f'{path}: not JSON ({error}); was it edited?') from None
    if not isinstance(fields, dict) or not {'model', 'train', 'data', 'plan'} <= fields.keys():
        raise ValueError(f'{path}: not the config of a training run; take another folder')
    return fields


def check_config(workdir: epath.Path, config: Config) -> None:
    """Raises ValueError, naming the fields, if the workdir holds a run of another model or data."""
    if not (workdir / CONFIG_FILE).exists():
        return
    differ = _differences(_read(workdir), _stored(config))
    if differ:
        raise ValueError(
            f'{workdir} holds a run of another config: {"; ".join(differ)}. '
            'Take another --workdir, or the config it was made with'
        )


def write_config(workdir: epath.Path, config: Config) -> None:
    """Stores the config of a run in its workdir, whole or not at all."""
    write_json(workdir / CONFIG_FILE, _stored(config))


_MUST_MATCH = (
    'model',
    'train.scan_layers',
    'plan',
    'data.tokenizer',
    'optimizer.name',
    'optimizer.muon.router',
)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    def walk(a: Any, b: Any, where: str) -> list[str]:
        if isinstance(a, dict) and isinstance(b, dict):
            names = sorted(a.keys() | b.keys())
            return [line for n in names for line in walk(a.get(n), b.get(n), f'{where}.{n}')]
        return [] if a == b else [f'{where} is {a!r} there, {b!r} here']

    lines, must_match = [], list(_MUST_MATCH)
    stored = before['train'].get('quantisation', {})
    if stored.get('weights') or stored.get('activations'):
        # It may be switched on, for the last part of a run, but then stays.
        must_match.append('train.quantisation')
    for path in must_match:
        a, b = before, now
        for name in path.split('.'):
            a, b = ((fields or {}).get(name) for fields in (a, b))
        lines += walk(a, b, path)
    return lines


def is_workdir(path: epath.PathLike) -> bool:
    return (epath.Path(path) / CONFIG_FILE).exists()


class Stored(NamedTuple):
    """What a workdir says of its run."""

    model: ModelConfig
    scan_layers: bool
    data: DataConfig
    quantisation: QuantisationConfig


def read_config(workdir: epath.Path) -> Stored:
    """The configs in a run's workdir that loading it needs."""
    fields = _read(workdir)
    model, train = model_config_from_dict(fields['model']), fields['train']
    quantisation = QuantisationConfig(**train.get('quantisation', {}))
    data = data_config_from_dict(fields['data'])
    return Stored(model, train['scan_layers'], data, quantisation)


def read_run(workdir: epath.Path) -> Config:
    """The whole config of the run in a workdir."""
    fields = _read(workdir)
    del fields['plan']  # follows from the others
    return config_from_dict(fields)


class Checkpoints:
    """The checkpoints of one run: async saves, the newest N kept, whole ones only.

    keep: how many stay when saving; None to read only.
    """

    def __init__(self, workdir: epath.Path, keep: int | None = None):
        folder = workdir / CHECKPOINTS
        # Orbax takes absolute paths only, and resolve() would put gs:// under the current folder.
        self._folder = folder if folder.is_absolute() else folder.resolve()
        self._read_only = keep is None
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=keep is not None,
                read_only=keep is None,
                cleanup_tmp_directories=keep is not None,  # what a kill or a full disk left
            ),
        )

    def steps(self) -> list[int]:
        """Steps with a checkpoint, newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(
                f'{self._folder}: a checkpoint could not be written '
                f'({type(error).__name__}: {_first_line(error)}); newest whole checkpoint: '
                f'{next(iter(self.steps()), "none")}. Make room, then run the same command again'
            ) from error

    def save(self, state: TrainState, data_state: dict[str, Any]) -> None:
        """Starts to save; returns before it is on disk.

        Raises:
          OSError: this or the save before it failed; older checkpoints are untouched.
        """
        with self._writing():
            self._manager.save(
                int(state.step),
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    opt_state=ocp.args.StandardSave(state.opt_state),
                    data=ocp.args.JsonSave(data_state),
                ),
            )

    def drop_unfinished(self) -> None:
        """Removes what a failed save left, which takes room; none may be under way."""
        if jax.process_index() == 0:
            for path in self._folder.glob('*.orbax-checkpoint-tmp*'):
                path.rmtree(missing_ok=True)

    def wait(self) -> None:
        """Returns when what was started is on disk.

        Raises:
          OSError: it could not be written; older checkpoints are untouched.
        """
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def restore_newest(
        self, abstract: TrainState, at_most: int | None = None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """State, without a guard, and data position of the newest checkpoint that can be read.

        One that cannot be read is reported, set aside unless they are only read, and passed over.

        Args:
          abstract: shapes, dtypes and placement, which need not be those of the run that saved it.
          at_most: the newest step to take; None: any.

        Returns:
          None if there is no checkpoint.

        Raises:
          ValueError: there are checkpoints, and none can be read.
        """
        steps = [step for step in self.steps() if at_most is None or step <= at_most]
        for step in steps:
            found = self._restored(
                step,
                params=ocp.args.StandardRestore(abstract.params),
                opt_state=ocp.args.StandardRestore(abstract.opt_state),
                data=ocp.args.JsonRestore(),
            )
            if found is None:
                continue
            if not self._read_only:
                self._set_aside([other for other in steps if other > step])
            number = jax.device_put(jax.numpy.int32(step), abstract.step.sharding)
            return TrainState(number, found.params, found.opt_state), found.data
        if steps:
            raise ValueError(
                f'{self._folder}: none of the checkpoints {steps} can be read; '
                'move the folder away to start anew'
            )
        return None

    def _restored(self, step: int, **args: Any) -> Any | None:
        """What a checkpoint holds, or None where a process cannot read it; all agree on that."""
        found = None
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:
            logging.error(
                'checkpoint of step %d cannot be read (%s: %s); trying the one before',
                step,
                type(error).__name__,
                _first_line(error),
            )
        if jax.process_count() > 1:
            readable = multihost_utils.process_allgather(np.int32(found is not None))
            return found if readable.all() else None
        return found

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        multihost_utils.sync_global_devices('before setting aside')
        for step in steps if jax.process_index() == 0 else ():
            target = self._folder.parent / f'unreadable_checkpoint_{step}'
            if target.exists():
                target.rmtree()
            (self._folder / str(step)).rename(target)
            logging.warning('moved the unreadable checkpoint to %s', target)
        multihost_utils.sync_global_devices('after setting aside')
        self._manager.reload()

    def restore_params(self, abstract: Any) -> tuple[Any, int]:
        """Parameters alone, of the newest checkpoint that can be read, and its step."""
        steps = self.steps()
        for step in steps:
            found = self._restored(step, params=ocp.args.StandardRestore(abstract))
            if found is not None:
                return found.params, step
        raise ValueError(
            f'{self._folder}: no checkpoint that can be read (found {steps or "none"}); '
            'train first, or point --checkpoint at a converted folder'
        )

    def close(self) -> None:
        self._manager.close()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), '')[:200]
