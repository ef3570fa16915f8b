"""The page's main script in node, with a console that answers as a test says."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

from tests.programs import is_missing

SNAPSHOT = {"status": 200, "body": {"error": None, "view": None, "logged_in": True, "at_s": 0}}
ENDED = {"error": {"reason": "UNAUTHENTICATED", "message": "this session has ended", "final": True}}
REFUSED = {"status": 401, "body": {"error": {"reason": "UNAUTHENTICATED", "message": "no token"}}}
HTML = {"status": 502, "body": None}
CLOSED, CONNECTING = 2, 0
DRIVER = """
const [answers, events] = JSON.parse(process.argv[2]);
const parts = {};
const part = () => ({ textContent: "", hidden: true, value: "", addEventListener() {} });
globalThis.document = { getElementById: (id) => (parts[id] ??= part()) };
const streams = [];
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor() { this.on = {}; this.readyState = 1; streams.push(this); }
  addEventListener(name, call) { this.on[name] = call; }
  close() { this.readyState = 2; }
};
let timers = [];
globalThis.setTimeout = (call) => { timers.push(call); return timers.length; };
globalThis.clearTimeout = (number) => { if (number) timers[number - 1] = null; };
let asked = 0;
globalThis.fetch = async () => {
  const { status, body } = answers[Math.min(asked++, answers.length - 1)];
  return { status, ok: status < 300, json: async () => {
    if (body === null) throw new SyntaxError("no JSON");
    return body;
  } };
};
const settle = async () => { for (let turn = 0; turn < 20; turn++) await null; };
const seen = () => ({
  trouble: parts.trouble?.textContent ?? "", login: parts.login?.hidden === false,
  refusal: parts.refusal?.textContent ?? "", asked, streams: streams.length,
  timers: timers.filter((one) => one).length,
});
await import("./main.js");
await settle();
const told = [seen()];
for (const event of events) {
  const stream = streams.at(-1);
  if (event.timer) {
    const due = timers;
    timers = [];
    due.forEach((call) => call?.());
  } else if (event.snapshot) {
    stream.on.snapshot({ data: JSON.stringify(event.snapshot) });
  } else {
    stream.readyState = event.state;
    stream.on.error();
  }
  await settle();
  told.push(seen());
}
console.log(JSON.stringify(told));
"""


@pytest.fixture
def play(tmp_path):
    """Run the script with these answers to /snapshot and these events; return what is seen after each."""
    node = shutil.which("node")
    if node is None:
        is_missing("node is not here; Debian's package `nodejs` has it")
    script = (files("tandem_console") / "pages" / "main.js").read_text(encoding="utf-8")
    (tmp_path / "main.js").write_text(script, encoding="utf-8")
    (tmp_path / "draw.js").write_text("export function draw() {}", encoding="utf-8")
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "driver.js").write_text(DRIVER, encoding="utf-8")

    def run(answers: list[dict], events: list[dict]) -> list[dict]:
        command = [node, "driver.js", json.dumps([answers, events])]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert 0 == ended.returncode, ended.stderr
        return json.loads(ended.stdout)

    return run


def test_page_asks_again_after_an_answer_that_is_no_snapshot(play):
    """
    An error page of a proxy is shown as trouble, and the page asks until it gets a snapshot.
    """
    first, second, third = play([HTML, HTML, SNAPSHOT], [{"timer": True}, {"timer": True}])
    assert first["trouble"].startswith("Reconnecting")
    assert [1, 1, 0] == [one["timers"] for one in (first, second, third)]
    assert ("", 3, 1) == (third["trouble"], third["asked"], third["streams"])


def test_page_follows_again_after_a_stream_that_was_refused(play):
    """
    A browser gives up a stream whose answer is not 200; the page then begins anew.
    """
    _, closed, again = play([SNAPSHOT], [{"state": CLOSED}, {"timer": True}])
    assert (True, 1) == (closed["trouble"].startswith("Reconnecting"), closed["timers"])
    assert ("", 2, 2) == (again["trouble"], again["asked"], again["streams"])


def test_browser_that_reconnects_by_itself_is_left_alone(play):
    """
    While the browser connects again the page says so, and opens no second stream.
    """
    _, lost = play([SNAPSHOT], [{"state": CONNECTING}])
    assert (True, 0) == (lost["trouble"].startswith("Reconnecting"), lost["timers"])


@pytest.mark.parametrize(
    ("answer", "asks_for_token", "num_streams"), [(SNAPSHOT, False, 2), (REFUSED, True, 1)]
)
def test_page_whose_session_ended_looks_for_another(play, answer, asks_for_token, num_streams):
    """
    After a login in another page the browser has a new session, which the page follows; else it asks for a token.
    """
    _, after = play([SNAPSHOT, answer], [{"snapshot": ENDED}])
    assert (asks_for_token, num_streams) == (after["login"], after["streams"])
    assert ("no token" if asks_for_token else "") == after["refusal"]
