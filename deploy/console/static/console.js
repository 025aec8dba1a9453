// What every page has: the token on requests, times as people say them, keys, charts, rows that lead somewhere.
import { draw } from "./charts.js";

export const token = document.querySelector("meta[name=csrf]").content;

document.addEventListener("htmx:configRequest", (event) => { event.detail.headers["X-CSRF-Token"] = token; });
document.addEventListener("htmx:afterSwap", (event) => refresh(event.detail.target));

const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });
const units = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

/** Write how long ago each time was; its title has the time itself. */
export function refresh(root = document) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const seconds = (new Date(element.dateTime) - Date.now()) / 1000;
    if (!Number.isFinite(seconds)) continue;
    const [unit, size] = units.find(([, size]) => Math.abs(seconds) >= size) ?? units.at(-1);
    element.title ||= `${element.dateTime.replace("T", " ").replace("+00:00", "")} UTC`;
    element.textContent = relative.format(Math.round(seconds / size), unit);
  }
  for (const element of root.querySelectorAll("[data-charts]")) draw(element, JSON.parse(element.dataset.charts));
}

// g and a page's letter go there; / goes to the search.
let went = 0;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  if (event.key === "g" && Date.now() - went > 1200) { went = Date.now(); return; }
  if (event.key === "/") { const search = document.querySelector("[type=search]"); if (search) { event.preventDefault(); search.focus(); } }
  if (Date.now() - went < 1200) {
    const link = document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`);
    if (link) location.assign(link.href);
  }
});
document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (row && !event.target.closest("a, button") && !String(getSelection())) location.assign(row.dataset.href);
});

document.querySelector("nav a[aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
refresh();
setInterval(() => refresh(), 15000);
