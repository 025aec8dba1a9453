"""The page docs/tour.md as it goes here: `millrace up MODEL`, a person with thumbs, and the console in a browser.

The model, the person and the settings are those of ``thumbs``. The browser is Debian's Chromium, and looks from the
first start to the first policy that was promoted. A copy of the page, ``tour.md`` in the folder, gets new pictures
and new text in the blocks between ``<!-- make tour: NAME -->`` and ``<!-- end -->``: what was typed, and what was
printed. Only the folder and the port are written as a reader has them. With ``--write-docs`` docs/tour.md and its
pictures are replaced too. Neither page is written unless all of it went well; a page of the console that runs into an
error, or asks another host for something, fails the tour.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from loadtests.server import MILLRACE, Server, free_port
from loadtests.thumbs import ANSWERS_COMPARED, OPTIONS, POLITE, Person, Transcript, judged, make_model, names

PAGE: Final = Path(__file__).parent.parent / "docs" / "tour.md"
BLOCK: Final = re.compile(r"(?<=<!-- make tour: )(\w+)( -->\n).*?(<!-- end -->)", re.DOTALL)
PORT: Final = 8000
"""The default, which the page has in place of the one that was free."""

WIDTH, HEIGHT, SHORTEST, TALLEST, PHONE = 1300, 850, 560, 1400, 390
LONGEST_S: Final = 1200.0
MOST_ASKED: Final = 50
MOST_BYTES: Final = 150_000
MOST_TOKENS: Final = "16"
QUESTION: Final = "i am ada"
UNJUDGED: Final = 8
STEPS_SHOWN: Final = 6
WAIT_MS: Final = 60_000
QUERY: Final = """SELECT time_bucket(INTERVAL '30 seconds', created_at) AS at,
    round(avg(value), 2) AS good, count(*) AS thumbs
FROM feedback WHERE kind = 'thumb' GROUP BY 1 ORDER BY 1"""
_BOTTOM: Final = """Math.ceil(scrollY + 32 + Math.max(
    ...[...document.querySelectorAll("main *")].map((one) => one.getBoundingClientRect().bottom)))"""
_TOLD: Final = re.compile(r"schedule \| (cycle \d+: |cycle-\d+: (step|policy) |policy \d+: |gate: pass)")
_BRIEF: Final = re.compile(r" took [\d.]+ s$|…$|: step (?!1/)\d*[1-9]/")


class Visitor:
    """Somebody at the console, who takes pictures of it."""

    def __init__(self, browser: Browser, url: str, pictures: Path) -> None:
        self.browser, self.url, self.pictures = browser, url, pictures
        self.wrong: list[str] = []
        self.page = self.look(WIDTH, "light")

    def look(self, width: int, scheme: Literal["light", "dark"]) -> Page:
        """A window of that width, whose complaints are kept."""
        window = self.browser.new_context(
            viewport={"width": width, "height": HEIGHT}, color_scheme=scheme, locale="en-GB", timezone_id="UTC"
        )
        window.set_default_timeout(WAIT_MS)
        page = window.new_page()
        page.on("pageerror", lambda error: self.wrong.append(f"error {error}"))
        page.on("console", lambda line: self.wrong.append(line.text) if line.type == "error" else None)
        page.on("request", lambda one: None if one.url.startswith(self.url) else self.wrong.append(f"asked {one.url}"))
        return page

    def open(self, path: str) -> None:
        self.page.goto(f"{self.url}/console/{path}")

    def picture(self, name: str, tallest: int = TALLEST) -> None:
        """The page from its top, as tall as it is, up to a bound; in 256 colours, which a page has no more of."""
        self.page.mouse.move(0, 0)
        size = self.page.viewport_size
        assert size is not None
        height = min(max(self.page.evaluate(_BOTTOM), SHORTEST), tallest)
        self.page.set_viewport_size({"width": size["width"], "height": height})
        few = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        self.page.set_viewport_size(size)
        path = self.pictures / f"{name}.png"
        few.save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes, and may have {MOST_BYTES}")
        print(f"{path.name}: {few.width} x {few.height}, {path.stat().st_size} bytes", flush=True)

    def ask(self, text: str) -> str:
        """Start a chat in the playground, which is open; the answer."""
        page = self.page
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("Most tokens").fill(MOST_TOKENS)
        page.locator("#ask textarea").fill(text)
        page.locator("#ask textarea").press("Enter")
        expect(page.locator(".answer .tokens span")).not_to_have_count(0)
        return str(page.locator(".answer .tokens").inner_text())

    def ask_until(self, polite: bool) -> None:
        """Ask in the playground until the answer is a polite one, or a curt one."""
        self.open("playground")
        for _ in range(MOST_ASKED):
            if self.ask(QUESTION).startswith(POLITE) == polite:
                return
        raise SystemExit(f"none of {MOST_ASKED} answers to {QUESTION!r} was {'polite' if polite else 'curt'}")

    def first_look(self) -> None:
        """A home of a minute ago."""
        self.open("")
        expect(self.page.locator("h1")).to_have_text("Policy 1 serves")
        self.picture("1-start")

    def thumb(self) -> str:
        """Ask until the answer is a curt one, and say that it is bad; the response's id."""
        self.ask_until(polite=False)
        self.page.locator(".answer .down").click()
        expect(self.page.locator(".answer .outcome")).to_contain_text("learn")
        self.picture("2-playground")
        return str(self.page.locator(".answer").get_attribute("data-id"))

    def label(self) -> None:
        """Judge one response of the queue."""
        self.open("labels")
        expect(self.page.locator("#queue:enabled")).to_be_attached()
        self.page.keyboard.press("ArrowUp" if POLITE in self.page.locator("#item").inner_text() else "ArrowDown")
        expect(self.page.locator("#outcome")).to_contain_text("Recorded")
        self.picture("3-labels")

    def is_training(self) -> bool:
        """Whether a policy's training has drawn a curve by now."""
        self.open("")
        curves = json.loads(self.page.locator("#training").get_attribute("data-charts") or "[]")
        running = self.page.locator(".stages .running").all_inner_texts()
        steps = [len(curve["x"]) for curve in curves if curve["title"] == "Reward"]
        return bool(running) and bool(steps) and steps[0] >= STEPS_SHOWN

    def training(self) -> None:
        """A cycle at work; the page is open."""
        expect(self.page.locator("#training .u-over").first).to_be_visible()
        self.picture("4-training")

    def promoted(self, policy: int, response: str) -> None:
        """The policy that was promoted, and what has become of the thumb."""
        page = self.page
        self.open(f"policies/{policy}")
        expect(page.locator(".charts .u-over").first).to_be_visible()
        self.picture("5-policy")
        self.ask_until(polite=True)
        page.locator(".answer .up").click()
        expect(page.locator(".answer .outcome")).to_contain_text("learn")
        self.picture("6-playground")
        self.open("traffic")
        self.picture("7-traffic")
        self.open(f"traffic/{response}")
        self.picture("8-response")
        self.open("compare/suites")
        self.picture("9-suites")
        self.open("data")
        page.locator("textarea").fill(QUERY)
        page.get_by_label("Name").fill("Thumbs by half minute")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_role("status")).to_contain_text("Saved")
        page.get_by_role("button", name="Run").click()
        expect(page.locator(".charts.results .u-over").first).to_be_visible()
        self.picture("10-data")
        self.page = self.look(PHONE, "dark")
        self.open("")
        expect(self.page.locator("#training .u-over").first).to_be_visible()
        self.picture("11-phone", HEIGHT)


def until(done: Callable[[], Any], what: str, pause_s: float) -> Any:
    """What ``done`` gives as soon as it is something. Raises SystemExit after ``LONGEST_S``."""
    deadline = time.monotonic() + LONGEST_S
    while not (found := done()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {LONGEST_S:.0f} s")
        time.sleep(pause_s)
    return found


def walk(visitor: Visitor, person: Person, folder: Path) -> dict[str, Any]:
    """From the first look to the promoted policy, and what a person needed for it."""
    began = time.monotonic()
    visitor.first_look()
    response = visitor.thumb()
    before = person.polite_share()
    for name in itertools.islice(names(4), UNJUDGED):
        person.answer(name, user="maria")
    with person:
        time.sleep(2)  # the first rows reach the lake
        visitor.label()

        def promotion() -> dict[str, Any] | None:
            person.check()
            return next((cycle for cycle in judged(folder) if cycle["status"] == "promoted"), None)

        def training() -> bool:
            person.check()
            return visitor.is_training()

        def judged_anew() -> bool:
            person.check()
            return person.thumbs > found["thumbs"] + 100

        until(training, "a training", 1)
        visitor.training()
        print("waiting for a promotion: some minutes", flush=True)
        cycle = until(promotion, "a promotion", 5)
        found = {"seconds": round(time.monotonic() - began), "thumbs": person.thumbs}
        until(judged_anew, "thumbs on the new policy", 1)
    visitor.promoted(cycle["candidate"], response)
    return found | {"polite": {"before": before, "after": person.polite_share()}}


def command_of(settings: Mapping[str, str]) -> str:
    """`millrace up` with settings, in lines that a page holds."""
    words = ["millrace up ./model", *(f"--{name} {value}" for name, value in settings.items())]
    lines = textwrap.wrap("\0".join(word.replace(" ", "\1") for word in words).replace("\0", " "), 100)
    return " \\\n    ".join(line.replace("\1", " ") for line in lines)


def told(log: Iterable[str]) -> tuple[str, str]:
    """What `millrace up` says of itself, and what its scheduler says of the cycles: how each came out, and why."""
    lines = [line.strip() for line in log]
    loop = [line for line in lines if _TOLD.match(line) and not _BRIEF.search(line)]
    last = next(i for i, line in enumerate(loop) if re.search(r"cycle \d+: promoted$", line))
    said = [line for line in lines if line.startswith("up | ")]
    ready = next(i for i, line in enumerate(said) if "serving on" in line)
    return "\n".join(said[: ready + 1]), "\n".join(loop[:last])


def written(page: str, blocks: Mapping[str, str], as_read: Mapping[str, str]) -> str:
    """A page with its blocks filled anew; ``as_read``: what stands for what. Raises SystemExit if they don't match."""
    known = [found[1] for found in BLOCK.finditer(page)]
    if sorted(known) != sorted(blocks):
        raise SystemExit(f"the page has the blocks {', '.join(known)}, and there are {', '.join(blocks)}")

    def fill(found: re.Match[str]) -> str:
        text = blocks[found[1]]
        for one, other in as_read.items():
            text = text.replace(one, other)
        return f"{found[1]}{found[2]}{text}\n{found[3]}"

    return BLOCK.sub(fill, page)


def _narrow(text: str, indent: int) -> str:
    """Lines that a page holds, what goes on after the first ``indent`` columns."""
    return "\n".join(textwrap.fill(line, 120, subsequent_indent=" " * indent) for line in text.splitlines())


def _fenced(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip()}\n```"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tour"), help="a folder of its own; emptied first")
    parser.add_argument("--write-docs", action="store_true", help="replace docs/tour.md and docs/tour/ too")
    parser.add_argument("--model", type=Path, help="a model that an earlier run made, to begin with")
    options = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium on PATH (Debian: apt-get install chromium; else set CHROMIUM)")
    folder = options.folder.absolute()
    page = folder / PAGE.name
    pictures = page.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    pictures.mkdir(parents=True)
    if options.model:
        shutil.copytree(options.model, folder / "model")
    else:
        print("training the tiny model: about half a minute", flush=True)
        make_model(folder / "model")
    transcript, port = Transcript(folder), free_port()
    settings = OPTIONS | {"serve.port": str(port)}
    command = ["up", "./model", *itertools.chain(*((f"--{name}", value) for name, value in settings.items()))]
    transcript.write(f"$ millrace {' '.join(command)}\n")
    print(f"starting the server: about half a minute; its log is {folder / 'up.log'}", flush=True)
    printed = {}
    with (
        Server([MILLRACE, *command], port, folder / "up.log") as server,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]) as browser,
    ):
        expect.set_options(timeout=WAIT_MS)
        print(f"the console is {server.url}/console/", flush=True)
        visitor = Visitor(browser, server.url, pictures)
        found = walk(visitor, Person(server.url), folder)
        for arguments in (("status", "--serve.port", str(port)), ("policies",), ("decisions", "list")):
            printed[arguments[0]] = transcript.run(*arguments)
    if visitor.wrong:
        raise SystemExit(f"the console's pages complained: {'; '.join(visitor.wrong)}")
    up, loop = told((folder / "up.log").read_text().splitlines())
    polite = found["polite"]
    blocks = {
        "command": _fenced(command_of(OPTIONS), "sh"),
        "up": _fenced(up),
        "loop": _fenced(_narrow(loop, 11)),
        "result": f"It took {found['seconds']} seconds and {found['thumbs']} thumbs from the first look to the "
        f"promotion. Of {ANSWERS_COMPARED} answers to new names, {polite['before']:.0%} were polite before, and "
        f"{polite['after']:.0%} after.",
    } | {name: _fenced(text) for name, text in printed.items()}
    blocks["status"] = _fenced(_narrow(printed["status"], 14))
    as_read = {str(folder): "…", f":{port}": f":{PORT}"}
    page.write_text(written(PAGE.read_text(), blocks, as_read))
    if options.write_docs:
        shutil.rmtree(PAGE.with_suffix(""), ignore_errors=True)
        shutil.copytree(pictures, PAGE.with_suffix(""))
        shutil.copy(page, PAGE)
    print(f"the page is {PAGE if options.write_docs else page}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
