// Decides what the page shows: the form for a token, or looks as they come.

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

function show(look) {
  const { error, view } = look;
  byId("login").hidden = true;
  if (view) {
    byId("view").hidden = false;
    draw(look);
  }
  const since = look.at_s ? ` The values below are from ${new Date(1000 * look.at_s).toLocaleTimeString()}.` : "";
  trouble(error ? `Reconnecting to ${look.address}: ${error.message}.${since}` : "");
}

function follow() {
  stop();
  events = new EventSource("events");
  events.addEventListener("look", (event) => {
    const look = JSON.parse(event.data);
    if (look.error?.reason === "UNAUTHENTICATED") {
      start(true); // another page of this browser may have logged in anew
    } else if (look.error?.final) {
      askForToken(look.error.message);
    } else {
      show(look);
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

// A first look by itself, since a stream of events does not tell why it was refused.
async function start(isNew = false) {
  stop();
  let answer;
  let look;
  try {
    answer = await fetch("look", { credentials: "same-origin" });
    look = await answer.json();
  } catch {
    startLater();
    return;
  }
  if (answer.status === 401 || answer.status === 403) {
    askForToken(isNew ? look.error?.message : "");
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
