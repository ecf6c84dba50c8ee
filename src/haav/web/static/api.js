/* Calls of the server's API. */

let key = sessionStorage.getItem("key") || ""; // where the server demands one

export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status; // 0: the server did not answer
  }
}

export function useKey(value) {
  key = value;
  sessionStorage.setItem("key", key);
}

export function hasKey() {
  return key !== "";
}

export async function call(path, options = {}) {
  try {
    return await fetch(path, key ? { ...options, headers: { Authorization: `Bearer ${key}` } } : options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it still running?");
  }
}

/* Sends a photo with fields. A server that is busy is asked again when it says so. */
export async function post(path, photo, fields, signal) {
  const form = new FormData();
  form.append("image", photo.blob, photo.name);
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  for (let attempt = 1; ; attempt++) {
    const response = await call(path, { method: "POST", body: form, signal });
    if (response.ok) return response;
    if (response.status !== 429 || attempt === 20) throw new Problem(await reasonOf(response), response.status);
    await new Promise((resolve) => setTimeout(resolve, 1000 * Number(response.headers.get("Retry-After") || 1)));
  }
}

async function reasonOf(response) {
  const body = await response.json().catch(() => ({}));
  return body.error || `The server answered with status ${response.status}.`;
}

/* The server-sent events of a response, as [name, data] */
export async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const [name, data] = text.slice(0, end).split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
      text = text.slice(end + 2);
      yield [name, JSON.parse(data)];
    }
  }
}
