// The label queue: a judgement, and the next response.
import { part, post } from "./api.js";
import { refresh } from "./console.js";

const queue = document.getElementById("queue"), outcome = document.getElementById("outcome");
const seen = [], scale = queue.dataset.scale;
let busy = false;

async function vote(value) {
  const item = document.getElementById("item");
  if (!item || busy) return;
  busy = true;
  item.classList.add("waiting");
  try {
    if (value !== "skip") await post("/feedback", { response_id: item.dataset.id, ...(scale ? { kind: "rating", name: scale } : { kind: "thumb" }), value: Number(value), source: queue.dataset.who });
    seen.push({ id: item.dataset.id, html: queue.innerHTML });
    queue.innerHTML = await part(`/console/labels/next?order=${queue.dataset.order}&scale=${encodeURIComponent(scale)}&skipped=${seen.map((one) => one.id).slice(-200).join(",")}`);
    outcome.textContent = value === "skip" ? "Skipped." : scale ? `Recorded: ${value}.` : value === "1" ? "Recorded: good." : "Recorded: bad.";
    refresh(queue);
  } catch (error) {
    outcome.textContent = error.message;
    item.classList.remove("waiting");
  } finally { busy = false; }
}

function back() {
  const before = seen.pop();
  if (!before || busy) return;
  queue.innerHTML = before.html;
  queue.querySelector("#item").classList.remove("waiting");
  outcome.textContent = "Judge it again: of one person the later judgement counts.";
}

const keys = { ArrowUp: "1", 1: "1", ArrowDown: "0", 2: "0", ArrowRight: "skip", 3: "skip" };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  if (event.key === "ArrowLeft") { event.preventDefault(); back(); }
  const value = scale && event.key !== "ArrowRight" ? queue.querySelector(`[data-vote="${CSS.escape(event.key)}"]`)?.dataset.vote : keys[event.key];
  if (value) { event.preventDefault(); vote(value); }
});
queue.addEventListener("click", (event) => { const button = event.target.closest("[data-vote]"); if (button) vote(button.dataset.vote); });
queue.disabled = false; // nothing is judged before this can hear it
