"""What the console is served with, and how people sign in to it; its look is tried in a browser."""

import hmac
from hashlib import sha256

import httpx2
import orjson
import pytest

from opencode_a2a.web import browser
from tests.support.caller import Caller
from tests.support.front import Serve
from tests.support.opencode import FakeOpenCode
from tests.support.program import run
from tests.support.service import TOKEN, Running

pytestmark = pytest.mark.asyncio(loop_scope="module")

GUESSABLE = "short"
PERSON = {"Accept": "text/html,application/xhtml+xml;q=0.9", "Authorization": ""}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


async def code_of(service: Running) -> str:
    return (await service.http.post("/console/codes")).json()["code"]


async def exchange(service: Running, code: str) -> httpx2.Response:
    return await service.http.post("/console/session", headers={"Authorization": f"Bearer {code}"})


async def health(service: Running, token: str) -> int:
    answer = await service.http.get("/health", headers={"Authorization": f"Bearer {token}"})
    return answer.status_code


@pytest.mark.parametrize(
    ("path", "place"),
    [("/", "console"), ("/docs", "console#/docs"), ("/console/", "../console")],
)
async def test_a_browser_is_led_to_the_console_and_nobody_else(
    service: Running, path: str, place: str
) -> None:
    person = await service.http.get(path, headers=PERSON)
    client = await service.http.get(path, headers={"Authorization": ""})

    assert (person.status_code, person.headers["location"]) == (307, place)
    assert client.status_code == 401


async def test_every_file_of_the_console_keeps_the_browser_strict(service: Running) -> None:
    for path, (content, *_) in browser.static_files().items():
        answer = await service.http.get(path, headers={"Authorization": ""})
        again = await service.http.get(path, headers={"If-None-Match": answer.headers["etag"]})

        assert (answer.status_code, answer.content) == (200, content)
        assert (again.status_code, again.content) == (304, b"")
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-opener-policy"] == "same-origin"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert (await service.http.get("/console/../auth.py")).status_code == 404


async def test_a_browser_is_sent_less_than_64_kb_for_the_whole_console(service: Running) -> None:
    """The budget is what goes over the wire: compressed, as every browser asks for it.

    A quarter of it is the reader of Markdown.
    """
    headers = {"Authorization": "", "Accept-Encoding": "gzip, deflate, br"}
    sent = 0
    for path in browser.static_files():
        async with service.http.stream("GET", path, headers=headers) as answer:
            sent += len(b"".join([piece async for piece in answer.aiter_raw()]))

    assert 0 < sent < 64_000


async def test_the_console_makes_no_markup_of_text() -> None:
    contents = {path: content for path, (content, *_) in browser.static_files().items()}

    for path, content in contents.items():
        for word in (
            b"innerHTML",
            b"outerHTML",
            b"insertAdjacentHTML",
            b"document.write",
            b"eval(",
            b"new Function",
            b'"style"',
            b"http-equiv",
            b"localStorage",
        ):
            vendored = path.endswith("/marked.js") and word == b'"style"'  # the name of an element
            assert vendored or word not in content, (path, word)


async def test_a_code_is_exchanged_once_for_a_credential_of_the_same_caller(
    service: Running, opencode: FakeOpenCode
) -> None:
    task = await Caller(service).send("hello")
    code = await code_of(service)

    assert await health(service, code) == 401  # it is good for the exchange alone
    first, second = await exchange(service, code), await exchange(service, code)
    token = first.json()["token"]

    assert (first.status_code, second.status_code) == (200, 401)
    assert first.json()["expires_in"] == 12 * 3600
    assert (await Caller(service, token=token).get(task.id)).text == task.text
    forged = token[:-1] + ("0" if token[-1] != "0" else "1")
    later = token.replace(token.split(".")[1], "ffffffff")
    assert [await health(service, one) for one in (token, forged, later)] == [200, 401, 401]
    assert (await exchange(service, TOKEN)).status_code == 401

    headers = {"Authorization": f"Bearer {token}"}
    assert (await service.http.delete("/console/session", headers=headers)).status_code == 204
    assert await health(service, token) == 401


async def test_an_old_code_and_an_old_session_are_refused(
    service: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser, "CODE_SECONDS", 0)
    assert (await exchange(service, await code_of(service))).status_code == 401

    monkeypatch.undo()
    monkeypatch.setattr(browser, "SESSION_SECONDS", -5)
    token = (await exchange(service, await code_of(service))).json()["token"]
    assert await health(service, token) == 401


async def test_a_session_outlives_a_restart_but_not_its_credential(serve: Serve) -> None:
    first = await serve()
    token = (await exchange(first, await code_of(first))).json()["token"]

    again = await serve()
    changed = await serve(A2A_BEARER_TOKEN=TOKEN[::-1])

    assert await health(again, token) == 200
    assert await health(changed, token) == 401


async def test_a_session_ends_with_the_very_secret_that_it_came_from(serve: Serve) -> None:
    secrets = {name: f"{name}-token-of-the-same-caller-in-all" for name in ("first", "second")}

    def credentials(*names: str) -> str:
        alike = {"scheme": "bearer", "principal": "ann"}
        return orjson.dumps([alike | {"token": secrets[name]} for name in names]).decode()

    both = await serve(A2A_STATIC_AUTH_CREDENTIALS=credentials("first", "second"))
    headers = {"Authorization": f"Bearer {secrets['second']}"}
    code = (await both.http.post("/console/codes", headers=headers)).json()["code"]
    token = (await exchange(both, code)).json()["token"]

    kept = await serve(A2A_STATIC_AUTH_CREDENTIALS=credentials("second"))
    removed = await serve(A2A_STATIC_AUTH_CREDENTIALS=credentials("first"))

    assert (await health(kept, token), await health(removed, token)) == (200, 401)


async def test_guessing_codes_counts_as_failed_attempts(serve: Serve) -> None:
    service = await serve()

    refused = [(await exchange(service, f"guess-{n}")).status_code for n in range(25)]

    assert refused[:20] == [401] * 20
    assert 429 in refused


@pytest.mark.requirement("I12")
async def test_a_session_tells_nothing_of_the_secret_that_it_came_from(serve: Serve) -> None:
    """Whoever finds a session and guesses the secret must not be able to check the guess on it."""
    service = await serve(A2A_BEARER_TOKEN=GUESSABLE, A2A_ALLOW_SHORT_TOKENS="true")
    secret = {"Authorization": f"Bearer {GUESSABLE}"}
    code = (await service.http.post("/console/codes", headers=secret)).json()["code"]
    token: str = (await exchange(service, code)).json()["token"]

    claims, _, signature = token.rpartition(".")
    key = sha256(GUESSABLE.encode()).digest()

    assert hmac.new(key, claims.encode(), sha256).hexdigest() != signature
    kept = service.service.settings.a2a.state_dir / "console-key"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.read_text().strip() not in token


async def test_a_sign_out_is_remembered_over_a_restart(serve: Serve) -> None:
    first = await serve()
    gone, stays = [(await exchange(first, await code_of(first))).json()["token"] for _ in range(2)]
    headers = {"Authorization": f"Bearer {gone}"}
    assert (await first.http.delete("/console/session", headers=headers)).status_code == 204

    again = await serve()

    assert [await health(again, one) for one in (gone, stays)] == [401, 200]


async def test_codes_of_one_caller_leave_room_for_another(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browser, "MOST_CODES", 3)
    another = {"scheme": "bearer", "principal": "ann", "token": TOKEN[::-1]}
    service = await serve(A2A_STATIC_AUTH_CREDENTIALS=orjson.dumps([another]).decode())

    mine = [(await service.http.post("/console/codes")).status_code for _ in range(4)]
    theirs = await service.http.post(
        "/console/codes", headers={"Authorization": f"Bearer {TOKEN[::-1]}"}
    )

    assert (mine, theirs.status_code) == ([200, 200, 200, 429], 200)


async def test_the_prefix_without_a_slash_leads_to_the_console_below_it(serve: Serve) -> None:
    service = await serve(A2A_PATH_PREFIX="/agents/coder")

    for path in ("/agents/coder", "/agents/coder/"):
        answer = await service.http.get(path, headers=PERSON, follow_redirects=True)
        assert (answer.status_code, answer.url.path) == (200, "/agents/coder/console")


async def test_the_console_may_call_a_service_that_was_given_no_public_url(serve: Serve) -> None:
    service = await serve(A2A_HOST="0.0.0.0")  # noqa: S104 - not bound here
    host = {"Host": "box.local:8000"}

    own = await service.http.get("/health", headers={**host, "Origin": "http://box.local:8000"})
    foreign = await service.http.get("/health", headers={**host, "Origin": "http://evil.example"})

    assert (own.status_code, foreign.status_code) == (200, 403)


async def test_a_session_of_the_console_gets_no_further_session(service: Running) -> None:
    token = (await exchange(service, await code_of(service))).json()["token"]

    again = await service.http.post("/console/codes", headers={"Authorization": f"Bearer {token}"})

    assert again.status_code == 401


async def test_the_command_prints_a_link_that_signs_in(service: Running) -> None:
    status, link = await run(
        "console", service.url, "--print", A2A_CLIENT_BEARER_TOKEN=TOKEN, A2A_CLIENT_BASIC_AUTH=""
    )
    place, _, code = link.strip().partition("#code=")

    assert (status, place) == (0, f"{service.url}/console")
    assert TOKEN not in link
    assert (await exchange(service, code)).status_code == 200


@pytest.mark.parametrize(
    ("url", "token", "expected"),
    [
        (None, "", (1, "you have no running service here")),
        ("http://127.0.0.1:9", "", (1, "cannot be reached")),
        ("", "", (1, "requires a token")),
        ("", "wrong-token-of-nobody-at-all-000000", (1, "requires a token")),
        ("not a url", "", (2, "neither an address nor a name")),
    ],
)
async def test_the_command_says_what_is_missing(
    service: Running,
    tmp_path_factory: pytest.TempPathFactory,
    url: str | None,
    token: str,
    expected: tuple[int, str],
) -> None:
    state = str(tmp_path_factory.mktemp("nobody"))
    arguments = [] if url is None else [url or service.url]
    given = {"A2A_CLIENT_BEARER_TOKEN": token} if token else {}

    status, output = await run("console", *arguments, "--print", A2A_STATE_DIR=state, **given)

    assert (status, expected[1] in output) == (expected[0], True), output
    assert "Traceback" not in output


async def test_health_names_the_workspace_the_model_and_the_cost_of_today(
    service: Running, opencode: FakeOpenCode, stranger: str
) -> None:
    headers = {"Authorization": f"Bearer {stranger}"}
    before = (await service.http.get("/health", headers=headers)).json()
    task = await Caller(service, token=stranger).send("hello")
    after = (await service.http.get("/health", headers=headers)).json()

    assert before["workspace"] == str(opencode.workspace)
    assert before["model"] == "fake/fake-1"
    assert before["cost_today"] == 0
    assert after["cost_today"] == task.raw["metadata"]["shared"]["usage"]["cost"]
