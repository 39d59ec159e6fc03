"""How often a run was begun again without a commit in between: `runtime.max_restarts` bounds it."""

import json
from pathlib import Path

from flows.run.training import RunFailed
from rlhf_tasks.checkpoint.commits import newest_step
from rlhf_tasks.system.durable import replace_file
from rlhf_tasks.system.reading import ConfigError, read_json, reading

RESTARTS = "restarts.json"


class Restarts:
    """The count of attempts and rebuilds since the newest commit, also across processes of one flow run that Prefect
    starts again: the run folder has it."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most

    def begin(self, started_again: bool) -> int:
        """A process takes the run up; gives the count. Raises RunFailed when it is one too many.

        started_again  by Prefect: its process before was killed, or left
        """
        if not started_again:
            self.forget()
        count = self._so_far() + 1 if started_again else 0
        self.count(count, "its process has ended")
        return count

    def count(self, count: int, why: str) -> None:
        """Write down that an attempt begins. Raises RunFailed when it is one too many."""
        if count > self._most:
            self.forget()
            raise RunFailed(
                f"{why} (after runtime.max_restarts={self._most} restarts without a commit in between). Resume to go "
                "on from the last commit."
            )
        record = {"step": newest_step(self._folder), "rebuilds": count}
        replace_file(self._folder / RESTARTS, json.dumps(record) + "\n")

    def forget(self) -> None:
        """The run was left in order."""
        (self._folder / RESTARTS).unlink(missing_ok=True)

    def _so_far(self) -> int:
        """-1 where the process before this one has left in order; a damaged record counts nothing."""
        path = self._folder / RESTARTS
        if not path.exists():
            return -1
        try:
            with reading(path, "no count of restarts"):
                record = read_json(path)
                return int(record["rebuilds"]) if record["step"] == newest_step(self._folder) else 0
        except ConfigError:
            return 0
