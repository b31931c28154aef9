/* The session of a page for this machine's user. The address's fragment holds a key that is valid once: it begins a session, which lasts as long as this tab. */
import {clean} from "/page/{digest}-dom.js";

function kept(value) { try { return value === undefined ? sessionStorage.getItem("session") : sessionStorage.setItem("session", value); } catch { return null; } }
let session = kept();

export async function beginSession() {
  const key = location.hash.slice(1);
  if (!key) return;
  history.replaceState(null, "", location.pathname);
  try { session = (await ask("/v1/session", {key})).session; kept(session); } catch (error) { if (!session) throw error; }
}

/* The answer to a request. An error says whether it is foreign: the page has no session. */
export async function ask(path, body) {
  const answer = await fetch(path, {method: body ? "POST" : "GET", cache: "no-store", headers: {...(session && {Authorization: `Bearer ${session}`}), ...(body && {"Content-Type": "application/json"})}, body: body && JSON.stringify(body)});
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(clean(found.detail, 300) || `The answer is ${answer.status}.`), {isForeign: answer.status === 403});
  return found;
}
