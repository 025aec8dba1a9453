// A chat: streamed answers, judged on the spot; then the tokens as they were recorded.
import { events, part, post } from "./api.js";
import { refresh } from "./console.js";

const play = document.getElementById("play"), log = document.getElementById("log");
const ask = document.getElementById("ask"), stop = document.getElementById("stop"), settings = document.getElementById("settings");
const template = document.getElementById("answer"), isChat = play.dataset.chat === "yes";
const session = () => `playground-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
const waiting = new Map(); // where it says what becomes of a judgement that no policy has learned from yet
let chat = [], running = null, conversation = session();

settings.addEventListener("input", show);
function show() { for (const output of settings.querySelectorAll("output")) output.textContent = output.parentElement.querySelector("input").value; }
show();

function sampling(several) {
  const value = (name) => settings.elements[name].value;
  const body = { top_p: Number(value("top_p")), top_k: Number(value("top_k")), max_tokens: Number(value("max_tokens")) };
  const chosen = Number(value("temperature"));
  body.temperature = several && chosen === 0 ? 1 : chosen;
  if (value("seed") !== "") body.seed = Number(value("seed"));
  return body;
}

async function send(count) {
  const text = ask.elements.text.value;
  if (running || !text.trim()) return;
  ask.elements.text.value = "";
  const turn = [...chat, { role: "user", content: text }];
  add(isChat ? "you" : "prompt", text);
  const group = log.appendChild(document.createElement("div"));
  group.className = count > 1 ? "pair" : "";
  const answers = Array.from({ length: count }, () => group.appendChild(template.content.firstElementChild.cloneNode(true)));
  answers[0].scrollIntoView({ block: "nearest" });
  running = new AbortController();
  stop.hidden = false;
  try {
    const prompt = isChat ? { messages: turn } : { prompt: text };
    const body = { ...prompt, ...sampling(count > 1), n: count, stream: true, session_id: conversation };
    for await (const [name, data] of events(await post("/generate", body, running.signal))) {
      if (name === "delta") answers[data.index].querySelector(".said").append(data.text);
      if (name === "error") throw new Error(data.detail);
      if (name === "done") {
        data.responses.forEach((response, i) => finish(answers[i], response, answers));
        chat = [...turn, { role: "assistant", content: data.responses[0].text }];
      }
    }
  } catch (error) {
    for (const answer of answers) if (!answer.dataset.id) answer.querySelector(".of").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    for (const answer of answers) answer.querySelector(".said")?.classList.remove("cursor");
    running = null;
    stop.hidden = true;
  }
}

function add(role, text) {
  const message = log.appendChild(document.createElement("div"));
  message.className = "message";
  message.append(Object.assign(document.createElement("small"), { textContent: role }), Object.assign(document.createElement("p"), { className: "said", textContent: text }));
}

async function finish(answer, response, answers) {
  answer.dataset.id = response.response_id;
  answer.querySelector(".of").textContent = `policy ${response.policy_spans.map((span) => span.policy_version).join(", ")}`;
  const votes = answer.querySelector(".votes"), outcome = answer.querySelector(".outcome");
  votes.hidden = false;
  const details = `/console/traffic/${encodeURIComponent(response.response_id)}`;
  votes.querySelector("a").href = details;
  const judge = async (feedback, pressed) => {
    waiting.delete(outcome);
    outcome.dataset.was = "";
    outcome.textContent = "…";
    try {
      await post("/feedback", { response_id: response.response_id, source: play.dataset.who, ...feedback });
      for (const one of answer.querySelectorAll("[aria-pressed]")) one.setAttribute("aria-pressed", String(one === pressed));
      await follow(outcome, `/console/playground/judged?response_id=${encodeURIComponent(response.response_id)}`);
    } catch (error) { outcome.textContent = error.message; }
  };
  const [up, down, better] = ["up", "down", "better"].map((name) => votes.querySelector(`.${name}`));
  up.onclick = () => judge({ kind: "thumb", value: 1 }, up);
  down.onclick = () => judge({ kind: "thumb", value: 0 }, down);
  better.hidden = answers.length < 2;
  better.onclick = async () => {
    const other = answers.find((one) => one !== answer).dataset.id;
    await judge({ kind: "preference", rejected_response_id: other }, better);
    if (isChat) chat = [...chat.slice(0, -1), { role: "assistant", content: response.text }];
  };
  const form = answer.querySelector(".correction");
  votes.querySelector(".correct").onclick = () => { form.hidden = !form.hidden; form.elements.text.value ||= response.text; form.elements.text.focus(); };
  form.onsubmit = async (event) => { event.preventDefault(); await judge({ kind: "correction", text: form.elements.text.value }); form.hidden = true; };
  try { answer.querySelector(".text").innerHTML = await part(`${details}?part=tokens`); } catch { /* the text stays as it came */ }
}

/** Say what becomes of a judgement; again every minute, until a policy has learned from it or none ever will. */
async function follow(outcome, path) {
  const html = await part(path);
  if (outcome.dataset.was !== html) { outcome.dataset.was = html; outcome.innerHTML = html; }
  refresh(outcome);
  if (outcome.querySelector("[data-final]")) waiting.delete(outcome); else waiting.set(outcome, path);
}
setInterval(async () => {
  if (document.hidden) return;
  for (const [outcome, path] of [...waiting]) {
    if (!outcome.isConnected) { waiting.delete(outcome); continue; }
    try { await follow(outcome, path); } catch { /* in a minute once more */ }
  }
}, 60000);

ask.addEventListener("submit", (event) => { event.preventDefault(); send(1); });
document.getElementById("two").addEventListener("click", () => send(2));
stop.addEventListener("click", () => running?.abort());
document.getElementById("clear").addEventListener("click", () => { chat = []; conversation = session(); log.replaceChildren(); ask.elements.text.focus(); });
ask.elements.text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(1); }
});
play.disabled = false; // nothing is sent before this can hear it
ask.elements.text.focus();
