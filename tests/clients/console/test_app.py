"""Answers of the console to browsers, with and without a token."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

import httpx
import pytest
from starlette.testclient import TestClient

from tandem.error_codes import PermissionDenied
from tandem_client import Stats
from tandem_console.app import COOKIE, Console, make_app
from tandem_console.headers import HEADERS
from tandem_console.logins import MAX_LOGIN_BYTES, TooManyLogins
from tandem_console.settings import Settings
from tests.clients.console.serving import console
from tests.clients.python.fake_server import fake_server

TOKEN = "a-token-of-an-operator"
PATHS = (
    "/",
    "/main.js",
    "/draw.js",
    "/plots.js",
    "/style.css",
    "/icon.svg",
    "/snapshot",
    "/nothing",
)


@pytest.fixture
def secured(server):
    """A fake scheduler that asks for a token."""
    server.seen.operator_token = TOKEN
    return server


def snapshots(answer: httpx.Response) -> Iterator[dict]:
    """Return the snapshots of a stream of events as they come."""
    lines = answer.iter_lines()
    for line in lines:
        if line == "event: snapshot":
            yield json.loads(next(lines).removeprefix("data: "))


class TestPage:
    @pytest.mark.parametrize("path", PATHS)
    def test_every_answer_forbids_what_the_page_does_not_need(self, http, path):
        """
        The policy of content allows the console's own files alone, and no frame around them.
        """
        answer = http.get(path)
        assert HEADERS.items() <= answer.headers.items()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"unsafe|\*|http", policy)

    def test_page_names_only_files_that_are_served(self, http):
        """
        Each file that the page or a module of it names is there with its type, and none is elsewhere.
        """
        named = {"index": "/"}
        for path in ("/", "/main.js", "/draw.js"):
            for name in re.findall(r'(?:src|href|from)[= ]"([^"]+)"', http.get(path).text):
                named[name] = "/" + name.removeprefix("./")
        kinds = {
            http.get(path).headers["content-type"].partition(";")[0] for path in named.values()
        }
        assert {"text/html", "text/javascript", "text/css", "image/svg+xml"} == kinds
        assert not any("//" in name for name in named)

    def test_scripts_never_make_html_of_text(self, http):
        """
        No script uses what reads a text as HTML or as a program.
        """
        for path in ("/main.js", "/draw.js", "/plots.js"):
            text = http.get(path).text
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)

    def test_other_methods_change_nothing(self, http):
        """
        A snapshot cannot be posted, and a login cannot be got.
        """
        assert [405, 405] == [http.post("/snapshot").status_code, http.get("/login").status_code]


class TestHost:
    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8081", "127.0.0.1.evil.example"]
    )
    def test_name_of_a_stranger_is_refused_on_loopback(self, http, host):
        """
        A page elsewhere whose name means this machine cannot read the console.
        """
        answer = http.get("/snapshot", headers={"host": host})
        assert (421, True) == (answer.status_code, "localhost" in answer.text)

    @pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8081"])
    def test_names_of_this_machine_are_served(self, http, host):
        """
        The names of loopback are served, with and without a port.
        """
        assert 200 == http.get("/snapshot", headers={"host": host}).status_code

    def test_console_for_others_is_served_by_any_name(self, server):
        """
        A console that listens beyond loopback does not know the names that it has there.
        """
        app = make_app(Console(Settings(admin_address=server.address, listen="0.0.0.0:8081")))
        with TestClient(app, base_url="http://console.example") as client:
            assert 200 == client.get("/snapshot").status_code


class TestSnapshots:
    def test_snapshot_has_the_numbers_of_the_server(self, http):
        """
        A snapshot has every field of GetStats, the requests, and no text of them.
        """
        snapshot = http.get("/snapshot").json()
        assert {field.name for field in Stats.DESCRIPTOR.fields} == set(snapshot["view"]["stats"])
        assert (2, ["first", "second"], None) == (
            snapshot["view"]["stats"]["running_requests"],
            [one["request_id"] for one in snapshot["view"]["requests"]],
            snapshot["error"],
        )

    def test_events_come_snapshot_by_snapshot(self, http, server):
        """
        A stream has one event for each snapshot, each newer than the one before, with rates from the second on.
        """
        with http.stream("GET", "/events") as answer:
            seen = [snapshot for snapshot, _ in zip(snapshots(answer), range(3), strict=False)]
        assert "text/event-stream" in answer.headers["content-type"]
        numbers = [snapshot["number"] for snapshot in seen]
        assert numbers == list(range(numbers[0], numbers[0] + 3))
        uptimes = [snapshot["view"]["stats"]["uptime_s"] for snapshot in seen]
        assert sorted(set(uptimes)) == uptimes
        assert seen[-1]["view"]["rates"]["output_tokens_per_s"] == 200.0

    def test_browsers_share_the_snapshots(self, http, server):
        """
        Two pages with the same credential get the same snapshots: the scheduler is asked once.
        """
        with http.stream("GET", "/events") as one, http.stream("GET", "/events") as other:
            first, second = snapshots(one), snapshots(other)
            told = {
                snapshot["number"]: snapshot["at_s"]
                for snapshot, _ in zip(first, range(3), strict=False)
            }
            again = {
                snapshot["number"]: snapshot["at_s"]
                for snapshot, _ in zip(second, range(3), strict=False)
            }
        common = told.keys() & again.keys()
        assert common
        assert all(told[number] == again[number] for number in common)

    def test_lost_scheduler_is_told_beside_the_newest_view(self):
        """
        While the scheduler is gone a stream goes on and tells so, beside what was seen last.
        """
        with contextlib.ExitStack() as running, contextlib.ExitStack() as others:
            url = others.enter_context(console(running.enter_context(fake_server()).address))
            http = others.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=60))
            with http.stream("GET", "/events") as answer:
                told = snapshots(answer)
                assert next(told)["error"] is None
                running.close()
                lost = next(snapshot for snapshot in told if snapshot["error"] is not None)
            assert (False, 2) == (
                lost["error"]["final"],
                lost["view"]["stats"]["running_requests"],
            )
            assert 503 == http.get("/snapshot").status_code


class TestLogin:
    def test_without_a_token_nothing_is_shown(self, secured, http):
        """
        A browser that did not log in gets the scheduler's refusal and no number.
        """
        answer = http.get("/snapshot")
        assert (401, None) == (answer.status_code, answer.json()["view"])
        assert "UNAUTHENTICATED" == answer.json()["error"]["reason"]
        with http.stream("GET", "/events") as stream:
            told = list(snapshots(stream))
        assert [(None, True)] == [
            (snapshot["view"], snapshot["error"]["final"]) for snapshot in told
        ]

    def test_token_opens_the_view_for_its_browser_alone(self, secured, http, url):
        """
        After a login the scheduler gets the token with each snapshot; a browser without the cookie stays outside.
        """
        assert 204 == http.post("/login", json={"token": TOKEN}).status_code
        snapshot = http.get("/snapshot")
        assert (200, True) == (snapshot.status_code, snapshot.json()["logged_in"])
        assert f"Bearer {TOKEN}" == secured.seen.operator_tokens[-1]
        assert 401 == httpx.get(f"{url}/snapshot", trust_env=False).status_code

    def test_cookie_is_a_secret_of_the_browser(self, secured, http):
        """
        The cookie is kept from scripts and from other sites, and holds no part of the token.
        """
        cookie = http.post("/login", json={"token": TOKEN}).headers["set-cookie"]
        assert {"httponly", "samesite=strict", "path=/"} <= set(cookie.lower().split("; "))
        assert TOKEN not in cookie
        assert len(http.cookies[COOKIE]) >= 40

    def test_wrong_token_is_refused_by_the_scheduler(self, secured, http):
        """
        The scheduler's refusal is the answer of the login, and no session is made.
        """
        answer = http.post("/login", json={"token": "guessed"})
        assert (401, "UNAUTHENTICATED") == (answer.status_code, answer.json()["error"]["reason"])
        assert COOKIE not in http.cookies
        assert 401 == http.get("/snapshot", cookies={COOKIE: "guessed"}).status_code

    def test_token_without_the_role_is_forbidden(self, server, http):
        """
        A token that the scheduler knows and that may not operate is 403.
        """
        server.seen.operator_error = PermissionDenied("the role operate is missing")
        answer = http.post("/login", json={"token": TOKEN})
        assert (403, "the role operate is missing") == (
            answer.status_code,
            answer.json()["error"]["message"],
        )

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"", 400),
            (b"[]", 400),
            (b'{"token": ""}', 400),
            (b'{"token": 5}', 400),
            (b'{"token": "a b"}', 400),
            (b"\xff", 400),
            (b"x" * (MAX_LOGIN_BYTES + 1), 413),
        ],
    )
    def test_malformed_login_is_a_typed_error(self, http, body, status):
        """
        A login that is none says what one is, and a large one is not read to its end.
        """
        kind = {"content-type": "application/json"}
        answer = http.post("/login", content=body, headers=kind)
        assert status == answer.status_code
        assert answer.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("headers", "reason"),
        [
            ({"sec-fetch-site": "cross-site"}, "OTHER_SITE"),
            ({"sec-fetch-site": "same-site"}, "OTHER_SITE"),
            ({"content-type": "text/plain"}, "INVALID_LOGIN"),
        ],
        ids=["other-site", "other-host-of-the-site", "form"],
    )
    def test_page_of_another_site_cannot_log_in(self, secured, http, headers, reason):
        """
        A login that another site's page or form can send is refused, although its token is valid.
        """
        kind = {"content-type": "application/json; charset=utf-8"}
        body = json.dumps({"token": TOKEN})
        answer = http.post("/login", content=body, headers=kind | headers)
        assert (True, reason) == (answer.is_client_error, answer.json()["error"]["reason"])
        assert COOKIE not in answer.cookies
        same = {"sec-fetch-site": "same-origin"}
        assert 204 == http.post("/login", content=body, headers=kind | same).status_code

    def test_page_of_another_site_cannot_log_out(self, secured, http):
        """
        A logout that another site's page sends takes no cookie away.
        """
        http.post("/login", json={"token": TOKEN})
        answer = http.post("/logout", headers={"sec-fetch-site": "cross-site"})
        assert (403, 200) == (answer.status_code, http.get("/snapshot").status_code)

    def test_crowd_of_logins_is_told_to_come_again(self, http, monkeypatch):
        """
        A login that would wait behind too many others is 429.
        """

        async def refuse(*_):
            raise TooManyLogins

        monkeypatch.setattr("tandem_console.sessions.Sessions.log_in", refuse)
        answer = http.post("/login", json={"token": TOKEN})
        assert (429, "TOO_MANY_LOGINS") == (answer.status_code, answer.json()["error"]["reason"])

    def test_logout_tells_other_pages_of_the_browser(self, secured, http):
        """
        A page that is open when another one logs out gets a last event that says so.
        """
        http.post("/login", json={"token": TOKEN})
        with http.stream("GET", "/events", timeout=60) as answer:
            told = snapshots(answer)
            assert next(told)["error"] is None
            http.post("/logout")
            last = list(told)[-1]
        assert ("UNAUTHENTICATED", True) == (last["error"]["reason"], last["error"]["final"])

    def test_logout_ends_the_session(self, secured, http):
        """
        After a logout the cookie opens nothing any more.
        """
        http.post("/login", json={"token": TOKEN})
        cookie = http.cookies[COOKIE]
        assert 204 == http.post("/logout").status_code
        assert 401 == http.get("/snapshot", cookies={COOKIE: cookie}).status_code

    def test_token_that_is_withdrawn_ends_the_view(self, secured, http):
        """
        Once the scheduler refuses the token, an open stream says so and ends.
        """
        http.post("/login", json={"token": TOKEN})
        with http.stream("GET", "/events", timeout=60) as answer:
            told = snapshots(answer)
            assert next(told)["error"] is None
            secured.seen.operator_token = "another"
            rest = list(told)
        assert rest[-1]["error"]["final"]

    def test_own_token_of_the_process_vouches_for_no_browser(self, secured, http, monkeypatch):
        """
        A token in the console's environment is not used for browsers that have none.
        """
        monkeypatch.setenv("TANDEM_API_KEY", TOKEN)
        assert 401 == http.get("/snapshot").status_code
