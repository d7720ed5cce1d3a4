"""Where the figures of a training are shown, beside metrics.jsonl: TensorBoard, wandb, trackio, mlflow.

Each is imported when a training starts, not before; all but TensorBoard's are the user's to install and to log in to,
by their own environment variables. A tracker changes no result: one that fails is left out from there on.

A run is called by the draft's digest, so that a training that goes on goes on in the same curves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3lib.errors import UserError

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


@dataclass(frozen=True)
class Run:
    """The training that is shown. `steps`: those that it has done, where it goes on; its settings are plain values."""

    name: str
    project: str
    folder: Path
    settings: Mapping[str, Any]
    steps: int = 0


class Tracker(Protocol):
    def log(self, scalars: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run: Run):
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.steps + 1 if run.steps else None)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, number in scalars.items():
            self.board.add_scalar(name, number, step)

    def flush(self) -> None:
        self.board.flush()

    def close(self) -> None:
        self.board.close()


class Wandb:
    def __init__(self, run: Run):
        import wandb

        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.run.log(dict(scalars), step=step)

    def flush(self) -> None:
        """It sends on its own."""

    def close(self) -> None:
        self.run.finish()


class Trackio:
    def __init__(self, run: Run):
        import trackio

        self.trackio = trackio
        trackio.init(project=run.project, name=run.name, resume="allow", config=dict(run.settings))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.trackio.log(dict(scalars), step=step)

    def flush(self) -> None:
        """It writes on its own."""

    def close(self) -> None:
        self.trackio.finish()


class Mlflow:
    """mlflow makes up the ids of its runs: ours is kept in the training's folder."""

    def __init__(self, run: Run):
        import mlflow

        self.mlflow, kept = mlflow, run.folder / "mlflow_run_id"
        mlflow.set_experiment(run.project)
        if kept.exists():
            mlflow.start_run(run_id=kept.read_text())
            return
        kept.write_text(mlflow.start_run(run_name=run.name).info.run_id)
        mlflow.log_params(dict(run.settings))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(scalars), step=step)

    def flush(self) -> None:
        """It writes as it is told."""

    def close(self) -> None:
        self.mlflow.end_run()


KINDS: dict[str, Callable[[Run], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}


def check(names: Sequence[str]) -> None:
    """Can all of them be imported? UserError for the first that cannot: asked before a training starts."""
    for name in names:
        try:
            importlib.import_module(MODULES[name])
        except ImportError as error:
            remedy = "`make venv` installs it" if name == "tensorboard" else f"install {name} into this environment"
            raise UserError(
                f"training.trackers: {name} cannot be imported ({error}); {remedy}, or take it out of the list"
            ) from None


class Trackers:
    """Several trackers as one, which never raises."""

    def __init__(self, names: Sequence[str], run: Run):
        self.trackers: dict[str, Tracker] = {}
        for name in names:
            if tracker := self._guarded(name, lambda kind: kind(run), KINDS[name]):
                self.trackers[name] = tracker

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._all(lambda tracker: tracker.log(scalars, step))

    def flush(self) -> None:
        self._all(lambda tracker: tracker.flush())

    def close(self) -> None:
        self._all(lambda tracker: tracker.close())
        self.trackers = {}

    def _all(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._guarded(name, act, tracker)

    def _guarded(self, name: str, act: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return act(argument)
        except Exception as error:  # a server that is away, a full disk: curves for the eye must not end a training
            self.trackers.pop(name, None)
            print(f"training.trackers: {name} is left out from here on ({type(error).__name__}: {error})")
            return None
