// The page Now, kept as things are.
import { refresh } from "./console.js";

const lost = document.getElementById("lost");
let late;

function follow() {
  const source = new EventSource("/console/live");
  source.onmessage = (event) => {
    clearTimeout(late);
    const { parts = {}, charts = {}, run, failed } = JSON.parse(event.data);
    lost.hidden = !failed;
    for (const [name, html] of Object.entries(parts)) {
      const element = document.getElementById(name);
      if (element.dataset.was !== html) { element.dataset.was = html; element.innerHTML = html; }
    }
    put("training", charts.training);
    if (run) document.getElementById("run").textContent = run;
    put("paths", charts.experiment);
    refresh();
  };
  source.onerror = () => { // the server ends each stream after a minute, and the browser asks again
    clearTimeout(late);
    late = setTimeout(() => { lost.hidden = false; }, 5000);
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 15000); // it was refused
  };
  source.addEventListener("ended", () => location.reload());
}
follow();

function put(name, charts) {
  if (!charts) return;
  document.getElementById(name).dataset.charts = JSON.stringify(charts);
  document.getElementById(`${name}-section`).hidden = charts.length === 0;
}
