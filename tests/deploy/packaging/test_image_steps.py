"""The steps of the Dockerfile, run: what it installs, makes a home, serves, is healthy and stops; without a container.

Below a folder instead of the root, in a virtual environment of its own and with the image's variables alone. What needs
to be root, or Debian's packages, is left out: this machine has them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import httpx
import pytest

from loadtests.server import free_port
from tests.deploy.packaging.test_images import STEPS
from tests.paths import ROOT

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of Debian's image
OF_ROOT = {"apt-get", "rm", "useradd", "ln"}
"""Commands that are left out: Debian's packages, a user, links for login shells."""
FOR_PIP = re.compile(r"pip_.*|(https?|no|all)_proxy|ssl_cert_(file|dir)|requests_ca_bundle", re.IGNORECASE)


class Image:
    """What the Dockerfile's steps make below a folder; steps of the stages in their order."""

    def __init__(self, root: Path, device: str) -> None:
        self.root = root
        self.device = device
        self.context = root / "context"
        self.folder = root
        self.variables: dict[str, str] = {"PATH": PATH}
        self.settings: dict[str, str] = {}
        """What the last step of a kind said, by kind: ENTRYPOINT, CMD, HEALTHCHECK, STOPSIGNAL, USER."""

    def build(self) -> None:
        """Run the steps of the stages ``build`` and ``final``."""
        copy_context(self.context)
        stages: dict[str, list[tuple[str, str]]] = {}
        for step in STEPS:
            kind, _, rest = step.partition(" ")
            if kind == "FROM":
                stages[rest.rpartition(" AS ")[2]] = steps = []
            elif stages:
                steps.append((kind, rest))
        assert list(stages) == ["cpu", "gpu", "build", "final"]
        installing = dict(self.variables)
        for kind, rest in stages["build"]:
            self._step(kind, rest, installing | of_pip())
        for kind, rest in [*(stages["gpu"] if self.device == "gpu" else []), *stages["final"]]:
            self._step(kind, rest, self.variables)

    def inside(self, text: str) -> str:
        """A text in which paths of the image are those below the folder."""
        return re.sub(r"(?<![\w.:/])/(opt|src|var)\b", rf"{self.root}/\1", text)

    def _step(self, kind: str, rest: str, variables: Mapping[str, str]) -> None:
        text = self.inside(rest.replace("${DEVICE}", self.device))
        if kind == "RUN":
            for command in text.split(" && "):
                self._command(shlex.split(command), variables)
        elif kind == "COPY" and not text.startswith("--from"):  # what is copied from a stage is there already
            *sources, target = text.split()
            for source in sources:
                found, to = self.context / source, self.folder / target
                if found.is_dir():
                    shutil.copytree(found, to)
                else:
                    shutil.copy2(found, to / found.name if to.is_dir() else to)
        elif kind == "ENV":
            for pair in shlex.split(text):
                name, _, value = pair.partition("=")
                self.variables[name] = value.replace("$PATH", self.variables["PATH"])
        elif kind == "WORKDIR":
            self.folder = Path(text)
            self.folder.mkdir(parents=True, exist_ok=True)
        else:
            assert kind in {
                *("ARG", "LABEL", "USER", "VOLUME", "EXPOSE", "COPY"),
                *("STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
            }
            self.settings[kind] = text

    def _command(self, words: list[str], variables: Mapping[str, str]) -> None:
        if words[0] in OF_ROOT:
            return
        if words[0] == "install":
            mode = next(int(word.removeprefix("--mode="), 8) for word in words if word.startswith("--mode="))
            for folder in (word for word in words[1:] if not word.startswith("--")):
                Path(folder).mkdir(parents=True)
                Path(folder).chmod(mode)
            return
        assert words[1:3] in (["-m", "venv"], ["-m", "pip"]), f"a step that this test does not know: {words}"
        if words[0] == "python3.11":
            words[0] = str(Path(sys.base_prefix) / "bin" / "python3.11")
        done = subprocess.run(words, cwd=self.folder, env=dict(variables), capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    def words(self, *arguments: str | Path) -> list[str]:
        """What the image's entry point runs; ``tini`` is left out, whose process this test's is."""
        entry = json.loads(self.settings["ENTRYPOINT"])
        assert entry[:2] == ["tini", "--"]
        program = shutil.which(entry[2], path=self.variables["PATH"])
        assert program == str(self.root / "opt" / "millrace" / "bin" / "millrace")
        return [program, *map(str, arguments)]

    def run(self, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the image, as ``docker run --env`` does."""
        environment = self.variables | variables
        return subprocess.run(words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600)


def of_pip() -> dict[str, str]:
    """Where this machine's pip finds packages, as variables, with what it takes to reach them."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=60)
    found = {name: value for name, value in os.environ.items() if FOR_PIP.fullmatch(name)}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.partition(".")
        if section in ("global", "install"):
            text = shlex.split(value)[0].replace("\\n", " ").strip()
            found.setdefault(f"PIP_{option.upper().replace('-', '_')}", text)
    return found


def copy_context(target: Path) -> None:
    """The build context: the files of this checkout that .dockerignore lets in, the last line that matches deciding."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [(line[0] != "!", pattern(line.lstrip("!"))) for line in lines if line and line[0] != "#"]
    assert "deploy/compose" in lines  # where an operator's secrets are
    for found in files_of(ROOT, {line[1:] for line in lines if line.startswith("!")}):
        above = [found, *found.parents][:-1]
        left_out = [ignores for ignores, rule in rules if any(rule.fullmatch(str(path)) for path in above)]
        if not (left_out and left_out[-1]):
            (target / found).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / found, target / found)


def pattern(line: str) -> re.Pattern[str]:
    """A pattern of .dockerignore, of whole paths."""
    return re.compile(re.escape(line.strip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*"))


def files_of(root: Path, let_in: set[str]) -> Iterator[PurePosixPath]:
    """All files below the names that are let in; all else is shut out by ``*``, whatever it holds."""
    for name in sorted(let_in):
        path = root / name
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                yield PurePosixPath(file.relative_to(root))


def listing(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_the_build_context_has_the_packages_and_neither_homes_nor_secrets(tmp_path: Path) -> None:
    copy_context(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("pyproject.toml", "README.md", "LICENSE"),
        *("feedback", "serve", "evaluation", "train", "deploy"),
    }
    assert (tmp_path / "serve" / "app.py").is_file()
    assert (tmp_path / "deploy" / "console" / "templates" / "now" / "loop.html.jinja").is_file()
    assert not (tmp_path / "deploy" / "compose").exists()
    assert not list(tmp_path.rglob("__pycache__"))


@pytest.mark.long
@pytest.mark.timeout(3600)  # it downloads all there is to install
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_images_steps_install_what_makes_a_home_serves_is_healthy_and_stops(
    device: str, model: Path, tmp_path: Path
) -> None:
    image = Image(tmp_path, device)
    image.build()
    python = tmp_path / "opt" / "millrace" / "bin" / "python"
    where = "import deploy, serve, sys; print(deploy.__file__, serve.__file__, sys.prefix)"
    for file in image.run([str(python), "-c", where]).stdout.split():
        assert Path(file).is_relative_to(tmp_path / "opt" / "millrace")  # and not of the checkout
    assert image.run(image.words("--version")).returncode == 0
    if device == "gpu":  # it starts where there is one
        return
    before = listing(tmp_path / "opt")
    home = str(image.folder / "home")
    made = image.run(image.words("init", "--model", model))
    assert made.returncode == 0, made.stdout + made.stderr
    assert Path(home).is_dir()
    few = {
        "MILLRACE__SERVE__PORT": str(free_port()),
        "MILLRACE__SERVE__ENGINE__KV_CACHE_BYTES": str(16 << 20),
        "MILLRACE__SERVE__ENGINE__THREADS": "1",
    }
    command = image.words(*json.loads(image.settings["CMD"]))
    refused = image.run(command, **few)
    assert (refused.returncode, "millrace keys create" in refused.stderr) == (1, True), refused.stderr
    made = image.run(image.words("keys", "create", "--name", "me", "--scope", "generate", "--json"))
    assert made.returncode == 0, made.stderr
    key = {"X-API-Key": json.loads(made.stdout)["secret"]}
    check = json.loads(image.settings["HEALTHCHECK"].partition(" CMD ")[2])
    assert shutil.which(check[0], path=image.variables["PATH"]) == str(python)
    assert image.run(check, **few).returncode != 0  # nothing listens yet
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=image.folder, env=image.variables | few, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 900  # as the health check's start period
        while image.run(check, **few).returncode != 0:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        url = f"http://127.0.0.1:{few['MILLRACE__SERVE__PORT']}"
        body = {"prompt": "1+1=", "max_tokens": 4}
        assert httpx.post(f"{url}/generate", json=body, timeout=120).status_code == 401
        answer = httpx.post(f"{url}/generate", json=body, headers=key, timeout=120)
        assert answer.status_code == 200, answer.text
        server.send_signal(getattr(signal, image.settings["STOPSIGNAL"]))
        assert server.wait(90) == 0, log.read_text()[-4000:]
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    assert image.run(check, **few).returncode != 0
    assert listing(tmp_path / "opt") == before  # so that the root can be read-only
