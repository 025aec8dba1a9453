// The server's API, with the session's proof.
import { token } from "./console.js";

export async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRF-Token": token }, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Error(problem.detail ?? `the server answered ${response.status}`);
}

/** Events of a response of /generate: [name, data]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.event) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

/** A part of a page, as text of HTML that the server has escaped. */
export async function part(path) {
  const response = await fetch(path, { headers: { "HX-Request": "true" } });
  if (response.status === 401) location.assign(response.headers.get("HX-Redirect") ?? "/console/login");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response.text();
}
