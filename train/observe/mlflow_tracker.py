"""``train.trackers: [mlflow]``: MLflow. In ``mlflow.db`` of the folder of runs, unless you name a store or a server.

MLflow's own variables count: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME`` and all others.
``mlflow ui --backend-store-uri sqlite:///RUNS/mlflow.db`` shows the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib import import_module
from time import time
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from feedback.processes.signals import handlers_deferred
from train.observe.hooks import RunInfo
from train.observe.trackers import Tracker

_FOLDER: Final = "millrace.folder"
"""The tag by which a run that goes on finds the one that was killed."""

_INSTALL: Final = "pip install 'millrace[mlflow]', or pip install mlflow-skinny sqlalchemy alembic"
_PARAMS: Final = 100  # of a request, at most
_LONGEST: Final = 6000  # characters of one
_PATIENCE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Of each request. By MLflow's own, 7 and 120 s, a server that is gone would hold a run for a quarter of an hour."""


class Mlflow(Tracker):
    """An MLflow run. One that was killed and goes on is another, and begins with the steps so far: MLflow keeps both
    numbers of a step that comes twice. The one before is then marked as killed."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing is sent unless you name a server
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient

            if "MLFLOW_TRACKING_URI" not in os.environ:
                import_module("alembic")  # with which MLflow keeps an SQLite file, and does not require
        except ImportError as error:
            raise ImportError(f"{error}; install it with: {_INSTALL}") from error
        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.folder.parent / 'mlflow.db'}")
        uri = _without_credentials(uri)
        # A handler's exception would leave a file half made. A request to a server has to be ended by one.
        self._whole = nullcontext if uri.startswith("http") else handlers_deferred
        self._status = "FINISHED"
        with self._whole():
            self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            experiment = _experiment(self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", "millrace"))
            for other in self._client.search_runs([experiment], "attributes.status = 'RUNNING'"):
                if other.data.tags.get(_FOLDER) == str(run.folder):
                    self._client.set_terminated(other.info.run_id, "KILLED")
            tags = {_FOLDER: str(run.folder), "millrace.parent": str(run.parent)}
            self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = [Param(_name(name), value) for name, value in _flat("train", run.config.model_dump(mode="json"))]
            for start in range(0, len(params), _PARAMS):
                self._client.log_batch(self._id, params=params[start : start + _PARAMS])
        for step, metrics in enumerate(run.history):
            self.log(step, metrics)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        at = int(1000 * metrics.get("time", time()))
        with self._whole():
            found = [self._metric(_name(f"train/{name}"), value, at, step) for name, value in metrics.items()]
            self._client.log_batch(self._id, metrics=found)

    def fail(self, error: BaseException) -> None:
        self._status = "FAILED"

    def close(self) -> None:
        with self._whole():
            self._client.set_terminated(self._id, self._status)


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)


def _without_credentials(uri: str) -> str:
    """Those of a server's address go where MLflow has them from too: it quotes the address in its errors."""
    parts = urlsplit(uri)
    if not uri.startswith("http") or parts.username is None:
        return uri
    os.environ.setdefault("MLFLOW_TRACKING_USERNAME", unquote(parts.username))
    os.environ.setdefault("MLFLOW_TRACKING_PASSWORD", unquote(parts.password or ""))
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _name(name: str) -> str:
    """One that MLflow takes, which would else refuse the metrics of a step, and end the run."""
    return re.sub(r"[^\w\-. :/]|(?<=/)/|(?<![^/])\.+(?![^/])", "_", name)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The settings below a section, by their dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    else:
        yield name, json.dumps(value)[:_LONGEST]
