// The page Now, kept as things are.
import { refresh } from "./console.js";

const source = new EventSource("/console/live");
const lost = document.getElementById("lost");

source.onmessage = (event) => {
  const { parts = {}, charts = {}, failed } = JSON.parse(event.data);
  lost.hidden = !failed;
  for (const [name, html] of Object.entries(parts)) {
    const element = document.getElementById(name);
    if (element.dataset.was !== html) { element.dataset.was = html; element.innerHTML = html; }
  }
  put("training", charts.training);
  put("paths", charts.experiment);
  refresh();
};
source.onerror = () => { lost.hidden = false; };
source.addEventListener("ended", () => location.reload());

function put(name, charts) {
  if (!charts) return;
  document.getElementById(name).dataset.charts = JSON.stringify(charts);
  document.getElementById(`${name}-section`).hidden = charts.length === 0;
}
