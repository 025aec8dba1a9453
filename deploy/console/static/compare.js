// Two answers: a choice writes a preference, and then says whose they were.
import { part, post } from "./api.js";

const queue = document.getElementById("queue"), outcome = document.getElementById("outcome");
const seen = [];
let busy = false;

async function choose(choice) {
  const item = document.getElementById("item");
  if (!item || busy) return;
  busy = true;
  item.classList.add("waiting");
  const { first, second } = item.dataset;
  const [better, worse] = choice === "second" ? [second, first] : [first, second];
  try {
    if (choice !== "neither") await post("/feedback", { response_id: better, rejected_response_id: worse, kind: "preference", source: queue.dataset.who });
    seen.push([first, second].sort().join("~"));
    queue.innerHTML = await part(`/console/compare/next?skipped=${encodeURIComponent(seen.slice(-200).join(","))}&chosen=${encodeURIComponent(`${first}~${second}`)}`);
    const whose = document.getElementById("whose")?.textContent ?? "";
    outcome.textContent = choice === "neither" ? `Skipped. ${whose}` : `Recorded: the ${choice} is better. ${whose}`;
  } catch (error) {
    outcome.textContent = error.message;
    item.classList.remove("waiting");
  } finally { busy = false; }
}

const keys = { 1: "first", ArrowLeft: "first", 2: "second", ArrowRight: "second", 3: "neither", ArrowDown: "neither" };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  if (event.key in keys) { event.preventDefault(); choose(keys[event.key]); }
});
queue.addEventListener("click", (event) => { const button = event.target.closest("[data-choice]"); if (button) choose(button.dataset.choice); });
queue.disabled = false; // nothing is judged before this can hear it
