"""A run as a job of Ray's on a cluster: submitted, watched and stopped by a job API that may go and come back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from train.config.training import TrainConfig
from train.context import JobContext
from train.observe.progress import say
from train.run.recovery.failure import KILLED, JobError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_REQUEST_S: Final = 30.0
_STOPPED_S: Final = 60.0
_PAUSE_S: Final = 1.0

T = TypeVar("T")


class Cluster:
    """The job API of ``train.ray_address``, as a run needs it.

    ``patient``: wait ``train.restarts.wait_s`` for its first answer, as for a cluster that has just lost its head; for
    any later one it is waited anyway.
    """

    def __init__(self, config: TrainConfig, context: JobContext, *, patient: bool) -> None:
        self._address, self._wait_s = str(config.ray_address), config.restarts.wait_s
        self._run, self._metadata = context.run, {"run": context.run, "folder": str(context.folder)}
        if not patient:
            self._client.list_jobs()

    @cached_property
    def _client(self) -> JobSubmissionClient:
        from ray.job_submission import JobSubmissionClient

        class Limited(JobSubmissionClient):
            """Ray's waits for an answer for ever (dashboard_sdk.SubmissionClient._do_request, ray 2.60)."""

            def _do_request(self, *request: Any, **options: Any) -> Any:
                return super()._do_request(*request, **options, timeout=_REQUEST_S)

        return Limited(self._address)

    def submit(self, entrypoint: str) -> str:
        """Its id, the same for all tries: one whose answer was lost is not repeated. Raises JobError."""
        job = f"millrace-{uuid.uuid4().hex}"

        def ask(client: JobSubmissionClient) -> str:
            if job in {one.submission_id for one in client.list_jobs()}:
                return job
            return client.submit_job(entrypoint=entrypoint, submission_id=job, metadata=self._metadata)

        return self._call(ask)

    def look(self, job: str) -> tuple[Any, str]:
        """Its status, and its output so far. Raises JobError if it, or the cluster, has gone."""
        return self._call(lambda client: (client.get_job_status(job), client.get_job_logs(job)), job)

    def end_of(self, job: str) -> tuple[int, str]:
        """The exit code of its driver and Ray's message, of one that has failed. Raises JobError."""
        info = self._call(lambda client: client.get_job_info(job), job)
        return info.driver_exit_code or 1, info.message or ""

    def stop(self, job: str) -> None:
        """Stop a job, and wait until it has ended. What fails at that is said."""
        deadline = time.monotonic() + _STOPPED_S
        try:
            self._client.stop_job(job)
            while not self._client.get_job_status(job).is_terminal():
                if time.monotonic() > deadline:
                    say(f"{self._run}: job {job} has not ended {_STOPPED_S:g} s after it was to stop")
                    return
                time.sleep(_PAUSE_S)
        except (OSError, RuntimeError) as error:
            say(f"{self._run}: job {job} can't be stopped: {error}")

    def stop_earlier(self) -> None:
        """Stop the jobs of this run that are at work: whoever waited for them has gone. Raises JobError."""
        for job in self._call(lambda client: client.list_jobs()):
            mine = job.submission_id is not None and (job.metadata or {}).items() >= self._metadata.items()
            if mine and not job.status.is_terminal():
                say(f"{self._run}: job {job.submission_id} is at work on it, and nobody waits for that: it is stopped")
                self.stop(job.submission_id)

    def _call(self, ask: Callable[[JobSubmissionClient], T], job: str | None = None) -> T:
        """What the cluster answers. Raises JobError if it answers nothing in time, or has forgotten ``job``."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                return ask(self._client)
            except (OSError, RuntimeError) as error:  # of requests and Ray, which has no types of its own here
                if isinstance(error, RuntimeError) and job is not None and not self._knows(job):
                    raise JobError(
                        f"{self._run} failed: {self._address} has no job {job} any more", KILLED, "lost"
                    ) from error
                if time.monotonic() > deadline:
                    what = f"{self._address} has not answered for {self._wait_s:g} s (train.restarts.wait_s): {error}"
                    raise JobError(f"{self._run} failed: {what}", KILLED, "lost") from error
            time.sleep(_PAUSE_S)

    def _knows(self, job: str) -> bool:
        """Whether the cluster lists a job; True if it does not say."""
        try:
            return job in {one.submission_id for one in self._client.list_jobs()}
        except (OSError, RuntimeError):
            return True
