"""The pictures of docs/tour.md: `millrace up MODEL`, a person with thumbs, and the console in a browser meanwhile.

The model, the person and the settings are those of ``thumbs``. The browser is Debian's Chromium, and looks from the
first start to the first policy that was promoted. What was typed and printed is in ``transcript.txt`` of the folder.
A page that runs into an error, or asks another host for something, fails the tour.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from loadtests.server import MILLRACE, Server, free_port
from loadtests.thumbs import LONGEST_S, OPTIONS, Person, Transcript, judged, make_model, names

PICTURES: Final = Path(__file__).parent.parent / "docs" / "tour"
WIDTH, TALLEST = 1300, 1400
MOST_BYTES: Final = 150_000
MOST_TOKENS: Final = "16"
QUESTION: Final = "i am ada"
UNJUDGED: Final = 8
STEPS_SHOWN: Final = 6
WAIT_MS: Final = 60_000
QUERY: Final = """SELECT time_bucket(INTERVAL '30 seconds', created_at) AS at, avg(value) AS good, count(*) AS thumbs
FROM feedback WHERE kind = 'thumb'
GROUP BY 1 ORDER BY 1"""


class Visitor:
    """Somebody at the console, who takes pictures of it."""

    def __init__(self, page: Page, url: str, pictures: Path) -> None:
        self.page, self.console, self.pictures = page, f"{url}/console", pictures
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error {error}"))
        page.on("console", lambda line: self.wrong.append(line.text) if line.type == "error" else None)
        page.on("request", lambda one: None if one.url.startswith(url) else self.wrong.append(f"asked {one.url}"))

    def open(self, path: str) -> None:
        self.page.goto(f"{self.console}/{path}")

    def picture(self, name: str) -> None:
        """The page from its top, as tall as it is, up to a bound; in 256 colours, which a page has no more of."""
        self.page.mouse.move(0, 0)
        height = min(self.page.evaluate("document.documentElement.scrollHeight"), TALLEST)
        taken = self.page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
        few = Image.open(io.BytesIO(taken)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        path = self.pictures / f"{name}.png"
        few.save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:
            raise SystemExit(f"{path} has {path.stat().st_size} bytes, and may have {MOST_BYTES}")
        print(f"{path.name}: {WIDTH} x {height}, {path.stat().st_size} bytes", flush=True)

    def ask(self, text: str) -> str:
        """Start a chat in the playground, which is open; the answer."""
        page = self.page
        page.get_by_role("button", name="New chat").click()
        page.get_by_label("Most tokens").fill(MOST_TOKENS)
        page.locator("#ask textarea").fill(text)
        page.locator("#ask textarea").press("Enter")
        expect(page.locator(".answer .tokens span")).not_to_have_count(0)
        return str(page.locator(".answer .said").inner_text())

    def first_look(self) -> None:
        """A home of a minute ago."""
        self.open("")
        expect(self.page.locator("h1")).to_have_text("Policy 1 serves")
        self.picture("1-start")

    def thumb(self) -> str:
        """Ask until the answer is a curt one, and say that it is bad; the response's id."""
        self.open("playground")
        while self.ask(QUESTION).startswith("hello"):
            pass
        self.page.locator(".answer .down").click()
        expect(self.page.locator(".answer .outcome")).to_contain_text("learn")
        self.picture("2-playground")
        return str(self.page.locator(".answer").get_attribute("data-id"))

    def label(self) -> None:
        """Judge one response of the queue."""
        self.open("labels")
        expect(self.page.locator("#queue:enabled")).to_be_attached()
        self.page.keyboard.press("ArrowUp" if "hello" in self.page.locator("#item").inner_text() else "ArrowDown")
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
        self.open("playground")
        while not self.ask(QUESTION).startswith("hello"):
            pass
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

        until(lambda: person.check() or visitor.is_training(), "a training", 1)
        visitor.training()
        cycle = until(promotion, "a promotion", 10)
        print(f"promoted after {time.monotonic() - began:.0f} s and {person.thumbs} thumbs", flush=True)
        seen = person.thumbs
        until(lambda: person.check() or person.thumbs > seen + 100, "thumbs on the new policy", 1)
    visitor.promoted(cycle["candidate"], response)
    return {"thumbs": person.thumbs, "polite": {"before": before, "after": person.polite_share()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/tour"), help="a folder of its own; emptied first")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="where the pictures are put")
    parser.add_argument("--model", type=Path, help="a model that an earlier run made, to begin with")
    options = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        raise SystemExit("there is no chromium on PATH (Debian: apt-get install chromium; else set CHROMIUM)")
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options.pictures.mkdir(parents=True, exist_ok=True)
    if options.model:
        shutil.copytree(options.model, folder / "model")
    else:
        make_model(folder / "model")
    transcript, port = Transcript(folder), free_port()
    settings = OPTIONS | {"serve.port": str(port)}
    command = ["up", "./model", *itertools.chain(*((f"--{name}", value) for name, value in settings.items()))]
    transcript.write(f"$ millrace {' '.join(command)}\n")
    with (
        Server([MILLRACE, *command], port, folder / "up.log") as server,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]) as browser,
    ):
        context = browser.new_context(
            viewport={"width": WIDTH, "height": 850}, color_scheme="light", locale="en-GB", timezone_id="UTC"
        )
        context.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        visitor = Visitor(context.new_page(), server.url, options.pictures)
        found = walk(visitor, Person(server.url), folder)
        for arguments in (("status", "--serve.port", str(port)), ("policies",), ("decisions", "list")):
            transcript.run(*arguments)
    print(json.dumps(found | {"wrong": visitor.wrong}))
    sys.exit(1 if visitor.wrong else 0)


if __name__ == "__main__":
    main()
