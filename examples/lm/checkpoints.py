"""Checkpoints with Orbax: the whole training state, and the history of the run beside it."""

import dataclasses
import pathlib
from typing import Any

import orbax.checkpoint as ocp
from lm.report import History


class Checkpoints:
    """The checkpoints in a directory; without one, nothing is saved."""

    def __init__(self, directory: str | None, every: int):
        self.every = every
        self.manager = None
        if directory is not None:
            self.manager = ocp.CheckpointManager(
                pathlib.Path(directory).absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=3),
            )

    def save(self, step: int, state: Any, history: History, *, last: bool):
        """Saves in the background, if a checkpoint is due after `step` steps or it is the last."""
        if self.manager is not None and (last or step % self.every == 0):
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                history=ocp.args.JsonSave(dataclasses.asdict(history)),
            )
            self.manager.save(step, args=items)

    def restore(self, like: Any) -> tuple[int, Any, History]:
        """(steps done, state laid out as `like`, history) of the newest checkpoint."""
        step = self.manager.latest_step()
        if step is None:
            raise SystemExit(f"There is no checkpoint in {self.manager.directory} to resume from.")
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(like), history=ocp.args.JsonRestore()
        )
        restored = self.manager.restore(step, args=items)
        return step, restored.state, History(**restored.history)

    def close(self):
        """Waits for what is still being written."""
        if self.manager is not None:
            self.manager.close()
