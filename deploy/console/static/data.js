// The page Data: Ctrl+Enter runs the query, and what runs says so.
const form = document.getElementById("query"), run = document.getElementById("run");

form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(run); }
});
form.addEventListener("submit", (event) => { if (event.submitter === run) run.textContent = "Running…"; });
run.setAttribute("aria-keyshortcuts", "Control+Enter Meta+Enter");
addEventListener("pageshow", () => { run.textContent = "Run"; });
