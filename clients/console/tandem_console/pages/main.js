// Decides what the page shows: the form for a token, or looks as they come.

import { draw } from "./draw.js";

const AGAIN_MS = 2000;

const byId = (id) => document.getElementById(id);
let events = null;

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

function askForToken(text = "") {
  events?.close();
  events = null;
  trouble("");
  byId("view").hidden = true;
  byId("logout").hidden = true;
  byId("login").hidden = false;
  byId("refusal").textContent = text;
}

function show(look) {
  const { error, view } = look;
  byId("login").hidden = true;
  if (view) {
    byId("view").hidden = false;
    draw(look);
  }
  const since = look.at_s ? ` What stands below is of ${new Date(1000 * look.at_s).toLocaleTimeString()}.` : "";
  trouble(error ? `Reconnecting to ${look.address}: ${error.message}.${since}` : "");
}

function follow() {
  events?.close();
  events = new EventSource("events");
  events.addEventListener("look", (event) => {
    const look = JSON.parse(event.data);
    if (look.error?.final) {
      askForToken(look.error.message);
    } else {
      show(look);
    }
  });
  events.addEventListener("error", () => trouble("Reconnecting to this console."));
}

// A first look by itself, since a stream of events does not tell why it was refused.
async function start(isNew = false) {
  let answer;
  try {
    answer = await fetch("look", { credentials: "same-origin" });
  } catch {
    trouble("Reconnecting to this console.");
    setTimeout(start, AGAIN_MS);
    return;
  }
  const look = await answer.json();
  if (answer.status === 401 || answer.status === 403) {
    askForToken(isNew ? look.error.message : "");
    return;
  }
  byId("logout").hidden = !look.logged_in;
  show(look);
  follow();
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  const answer = await fetch("login", {
    method: "POST", credentials: "same-origin",
    headers: { "content-type": "application/json" }, body: JSON.stringify({ token }),
  });
  if (answer.ok) {
    start(true);
  } else {
    byId("refusal").textContent = (await answer.json()).error.message;
  }
});

byId("logout").addEventListener("click", async () => {
  await fetch("logout", { method: "POST", credentials: "same-origin" });
  askForToken("");
});

start();
