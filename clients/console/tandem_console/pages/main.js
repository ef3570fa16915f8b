// Decides what the page shows: the form for a token, or snapshots as they come.

import { draw } from "./draw.js";

const AGAIN_MS = 2000;
const LOST = "Reconnecting to this console.";

const byId = (id) => document.getElementById(id);
let events = null;
let waiting = null;

function stop() {
  events?.close();
  events = null;
  clearTimeout(waiting);
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = !text;
}

function askForToken(text = "") {
  stop();
  trouble("");
  byId("view").hidden = true;
  byId("logout").hidden = true;
  byId("login").hidden = false;
  byId("refusal").textContent = text;
}

function show(snapshot) {
  const { error, view } = snapshot;
  byId("login").hidden = true;
  if (view) {
    byId("view").hidden = false;
    draw(snapshot);
  }
  const since = snapshot.at_s ? ` The values below are from ${new Date(1000 * snapshot.at_s).toLocaleTimeString()}.` : "";
  trouble(error ? `Reconnecting to ${snapshot.address}: ${error.message}.${since}` : "");
}

function follow() {
  stop();
  events = new EventSource("events");
  events.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data);
    if (snapshot.error?.reason === "UNAUTHENTICATED") {
      start(true); // another page of this browser may have logged in anew
    } else if (snapshot.error?.final) {
      askForToken(snapshot.error.message);
    } else {
      show(snapshot);
    }
  });
  events.addEventListener("error", () => {
    if (events?.readyState === EventSource.CLOSED) {
      startLater(); // the browser does not connect again after any other answer than a stream
    } else {
      trouble(LOST);
    }
  });
}

function startLater() {
  stop();
  trouble(LOST);
  waiting = setTimeout(start, AGAIN_MS);
}

// A first snapshot by itself, since a stream of events does not tell why it was refused.
async function start(isNew = false) {
  stop();
  let answer;
  let snapshot;
  try {
    answer = await fetch("snapshot", { credentials: "same-origin" });
    snapshot = await answer.json();
  } catch {
    startLater();
    return;
  }
  if (answer.status === 401 || answer.status === 403) {
    askForToken(isNew ? snapshot.error?.message : "");
    return;
  }
  byId("logout").hidden = !snapshot.logged_in;
  show(snapshot);
  follow();
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const token = byId("token").value.trim();
  byId("token").value = "";
  try {
    const answer = await fetch("login", {
      method: "POST", credentials: "same-origin",
      headers: { "content-type": "application/json" }, body: JSON.stringify({ token }),
    });
    if (answer.ok) {
      start(true);
    } else {
      byId("refusal").textContent = (await answer.json()).error.message;
    }
  } catch {
    byId("refusal").textContent = "This console does not answer: try again.";
  }
});

byId("logout").addEventListener("click", async () => {
  try {
    await fetch("logout", { method: "POST", credentials: "same-origin" });
    askForToken("");
  } catch {
    trouble("This console does not answer: you are not logged out.");
  }
});

start();
