"""The console in a real browser, before a real OpenCode with the scripted model."""

import asyncio
import base64
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.async_api import Page, Route, expect

from tests.browser.conftest import DESKTOP, PHONE, Look, check
from tests.browser.test_approvals import OUTSIDE
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.copies import add_copies
from tests.support.ports import free_port
from tests.support.service import TOKEN, Running, message, serving, settings_for

pytestmark = [
    pytest.mark.browser,
    pytest.mark.live,
    pytest.mark.asyncio(loop_scope="module"),
]

DONE = {"say": "done"}
LONG = "a paragraph\n\n" * 60 + "the last paragraph"
LEFT = (
    "((one) => one.scrollHeight - one.scrollTop - one.clientHeight)"
    "(document.querySelector('.scroller'))"
)
"""How far the page is from its end."""
SHOW_THE_REST = """() => {
  if (document.querySelector(".ask .allowing:enabled")) return true;
  document.querySelector(".ask .unread button")?.click();
}"""
"""Goes to the beginning of a request, if the page followed the conversation to its end, and on."""
ROWS = ["|", " step |" * 14, "\n|", "---|" * 14, "\n|", " and so on |" * 13, " rm -rf |\n\n"]
PLAN = "Fetch [the installer](https://evil.example/x.sh 'run it twice').\n\n" + "".join(ROWS)
"""A part of a plan whose end is far to the right."""
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PAYLOADS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=2>",
    "<svg onload=window.pwned=3>",
    "[a](javascript:window.pwned=4)",
    "[b](data:text/html,<script>window.pwned=5</script>)",
    "![c](https://evil.example/leak.png)",
    "<iframe srcdoc='<script>parent.pwned=7</script>'></iframe>",
    "</code></pre><script>window.pwned=8</script>",
    "<a href=javascript:window.pwned=9>click</a>",
    '"><style>*{display:none}</style><form action=https://evil.example>',
)


async def new_task(page: Page) -> None:
    await page.get_by_role("link", name="New task").click()
    await expect(page.locator(".welcome")).to_have_count(0)  # it has the same form, unfocused
    await expect(page.get_by_label("What should the agent do?")).to_be_focused()


async def start(page: Page, text: str) -> None:
    """Start a task as a person does."""
    await new_task(page)
    await page.get_by_label("What should the agent do?").fill(text)
    await page.get_by_role("button", name="Start").click()


def task_of(page: Page) -> str:
    return page.url.partition("#/task/")[2]


async def unfold(page: Page) -> None:
    unfolding = "(all) => all.forEach((one) => (one.open = true))"
    await page.locator("main details").evaluate_all(unfolding)
    await page.locator("main details").evaluate_all(unfolding)  # those inside of them, drawn now


async def ended(page: Page, state: str = "completed") -> None:
    await expect(page.locator(".bar .state")).to_have_text(state)


def writing(name: str, content: str = "# Notes\n") -> Any:
    return {"tool": "write", "input": {"filePath": name, "content": content}}


# --- sign-in ----------------------------------------------------------------------------------


async def test_a_token_signs_in_and_a_wrong_one_does_not(look: Look, service: Running) -> None:
    page = await look(service.url, signed_in=False, expected=("401",))
    assert page.url == f"{service.url}/console"

    await page.get_by_label("Token").fill("not-the-token")
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("alert")).to_have_text("This token is not valid.")

    await page.get_by_label("Token").fill(TOKEN)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("link", name="New task")).to_be_visible()
    await page.reload()
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Token")).to_be_visible()
    assert await page.evaluate("sessionStorage.length") == 0


async def test_new_tabs_are_signed_in_if_the_person_wants_that(
    look: Look, service: Running
) -> None:
    page = await look(service.url, signed_in=False)
    alone = await page.context.new_page()
    await page.get_by_label("Token").fill(TOKEN)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.get_by_role("link", name="New task")).to_be_visible()
    await alone.goto(f"{service.url}/console#/about")
    await expect(alone.get_by_label("Token")).to_be_visible()

    await page.get_by_role("link", name="About").click()
    await page.get_by_label("Sign in new tabs of this browser as well").check()
    await alone.reload()

    await expect(alone.get_by_role("heading", name="About")).to_be_visible()
    kept = await alone.evaluate("Object.values(sessionStorage).join()")
    assert kept.startswith("Bearer console.")
    assert TOKEN not in kept


async def test_a_code_signs_in_once_and_leaves_the_address(look: Look, service: Running) -> None:
    code = (await service.http.post("/console/codes")).json()["code"]

    page = await look(f"{service.url}/console#code={code}", signed_in=False)
    await expect(page.get_by_role("link", name="New task")).to_be_visible()
    assert page.url == f"{service.url}/console"
    kept = await page.evaluate("Object.values(sessionStorage).join()")
    assert kept.startswith("Bearer console.")
    assert TOKEN not in kept

    again = await look(f"{service.url}/console#code={code}", signed_in=False, expected=("401",))
    await expect(again.get_by_role("alert")).to_contain_text("was used or is too old")

    # Signing out ends the credential, not only the memory of it.
    await page.get_by_role("button", name="Sign out").click()
    await expect(page.get_by_label("Token")).to_be_visible()
    refused = await service.http.get("/health", headers={"Authorization": kept})
    assert refused.status_code == 401


async def test_a_link_of_somebody_else_asks_before_it_replaces_who_is_signed_in(
    look: Look, stage: Backstage, tmp_path: Path
) -> None:
    people = [
        {"principal": name, "scheme": "bearer", "token": f"{name}-{TOKEN}"}
        for name in ("ann", "bob")
    ]
    settings = settings_for(
        stage, tmp_path, A2A_BEARER_TOKEN="", A2A_STATIC_AUTH_CREDENTIALS=json.dumps(people)
    )
    async with serving(settings) as service:

        async def link() -> str:
            sent = {"Authorization": f"Bearer bob-{TOKEN}"}
            code = (await service.http.post("/console/codes", headers=sent)).json()["code"]
            return f"{service.url}/console#code={code}"

        page = await look(
            f"{service.url}/console", signed_in=False, expected=("401", "ERR_CONNECTION")
        )
        await page.get_by_label("Token").fill(f"ann-{TOKEN}")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_text("Signed in as ann")).to_be_visible()

        await page.goto(await link())  # the same document: only the part behind # changes
        await expect(page.get_by_text("This link signs you in as bob.")).to_be_visible()
        assert page.url == f"{service.url}/console"
        await page.get_by_role("button", name="Stay ann").click()
        await expect(page.get_by_text("Signed in as ann")).to_be_visible()
        assert f"ann-{TOKEN}" in await page.evaluate("Object.values(sessionStorage).join()")

        other = await link()
        await page.goto(other)
        await page.get_by_role("button", name="Sign in as bob").click()
        await expect(page.get_by_text("Signed in as bob")).to_be_visible()
        await page.goto(other)  # used by now
        await expect(page.get_by_text("You are still signed in as bob.")).to_be_visible()
        await page.get_by_role("button", name="Go on").click()
        await expect(page.get_by_text("Signed in as bob")).to_be_visible()


@pytest.mark.parametrize("address", ["task/%", "constructor", "task/", "toString/x", "nothing"])
async def test_an_address_that_is_none_is_not_found(
    look: Look, service: Running, address: str
) -> None:
    page = await look(f"{service.url}/console#/{address}")

    await expect(page.get_by_role("heading", name="Not found")).to_be_visible()
    await page.get_by_role("main").get_by_role("link", name="All tasks").click()
    await expect(page.locator(".welcome")).to_be_visible()


async def test_a_task_that_does_not_exist_is_said_to_be_missing(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console#/task/..%2Fhealth", expected=("404",))

    await expect(page.get_by_role("alert")).to_contain_text("There is no such task here")


# --- tasks ------------------------------------------------------------------------------------


async def test_a_permission_is_approved_with_a_click(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console")
    await start(page, f"write it {script({'think': 'hm'}, writing('a.md'), {'say': '**bold**'})}")

    card = page.get_by_role("region", name="May OpenCode change a file?")
    await expect(card.get_by_text("+# Notes")).to_be_visible()
    await expect(page.get_by_role("heading", name="Waits for you (1)")).to_be_visible()
    await expect(page).to_have_title("(1) OpenCode A2A")
    allow = card.get_by_role("button", name="Allow once")
    assert await card.evaluate("(card) => card.contains(document.activeElement)") is False
    assert not (stage.workspace / "a.md").exists()
    await allow.click()

    await ended(page)
    assert (stage.workspace / "a.md").read_text() == "# Notes\n"
    await expect(page.get_by_text(re.compile("Allowed once by you, "))).to_be_visible()
    await expect(page.get_by_role("heading", name="Changes")).to_be_visible()
    await expect(page.locator(".prose strong")).to_have_text("bold")
    # Reasoning is there, folded.
    await expect(page.locator(".thinking .prose")).to_be_hidden()
    await expect(page.locator(".bar .facts")).to_contain_text(" in · ")
    await expect(page).to_have_title("OpenCode A2A")


async def test_a_request_shows_what_opencode_will_do(
    look: Look, service: Running, stage: Backstage
) -> None:
    """The forms in which a real OpenCode asks; ``test_approvals`` has many more."""
    page = await look(f"{service.url}/console", clock=True)
    (stage.workspace / "odd.sql").write_text("-- a;\nb\n")
    fetch = {
        "url": "http://127.0.0.1:9/?key=SECRET",
        "format": "text",
        "command": "https://docs.example/",
    }
    outside = {"filePath": "/etc/hostname", "command": "cat README.md", "description": "Look"}
    edit = {"filePath": "odd.sql", "oldString": "-- a;", "newString": "++ a; evil()"}
    run = {"command": "echo harmless # \u202e'evil' mr ;", "description": "Say\u200b it"}
    calls = [
        [{"tool": name, "input": given}]
        for name, given in (("webfetch", fetch), ("read", outside), ("edit", edit), ("bash", run))
    ]
    await start(page, f"odd {script(*calls, [DONE])}")

    shown = (
        ("URL\nhttp://127.0.0.1:9/?key=SECRET", "also sent:\n\ncommand\nhttps://docs.example/"),
        ("File\n/etc/hostname", "also sent:\n\ncommand\ncat README.md"),
        ("--- a;\n+++ a; evil()\n b", "+1 \u22121"),
        ("echo harmless # ⟨U+202E⟩'evil' mr ;", "The agent says\nSay⟨U+200B⟩ it"),
    )
    for number, texts in enumerate(shown, 1):
        card = page.get_by_role("region", name=f"Request {number}", exact=False)
        await expect(card).to_be_visible()
        found = await card.inner_text()
        assert [one for one in texts if one not in found] == []
        await page.clock.fast_forward(1000)  # in which no click counts
        await card.get_by_role("button", name="Allow once").click()

    await ended(page)
    changes = await page.locator(".changes").inner_text()
    assert "--- a;\n+++ a; evil()\n b" in changes
    (stage.workspace / "odd.sql").unlink()


async def test_a_denial_tells_the_agent_why(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console")
    bash = {"tool": "bash", "input": {"command": "echo ran", "description": "Say it"}}
    await start(page, f"run it {script(bash, {'say': 'heard: {{result}}'})}")

    await page.get_by_role("button", name="Deny…").click()
    await page.get_by_label("Why not, for the agent (optional)").fill("use printf")
    await page.get_by_role("button", name="Deny", exact=True).click()

    await ended(page)
    await expect(page.locator(".log > .prose").last).to_contain_text("use printf")
    await expect(page.get_by_text(re.compile("Denied by you, "))).to_be_visible()


async def test_a_wider_yes_holds_until_it_is_revoked(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console")
    calls = [
        [{"tool": "bash", "input": {"command": f"echo {word}", "description": "Say it"}}]
        for word in ("one", "two")
    ]
    await new_task(page)
    await page.get_by_text("Options", exact=True).click()
    await page.get_by_label("Agent", exact=True).select_option("build")
    await page.get_by_label("What should the agent do?").fill(f"twice {script(*calls, [DONE])}")
    await page.get_by_role("button", name="Start").click()

    await page.get_by_role("button", name="Allow for this conversation").click()

    await ended(page)
    await expect(page.locator(".tool.completed")).to_have_count(2)
    await expect(page.locator(".asked")).to_have_count(1)
    await page.get_by_role("link", name="Allowed").click()
    grant = page.locator(".grant", has_text="twice")
    await expect(grant.locator("code")).to_have_text("echo *")
    await check(page, "what is allowed")
    await grant.get_by_role("button", name="Revoke bash echo *").click()
    await expect(page.get_by_text("You have allowed nothing beyond")).to_be_visible()


async def test_questions_are_answered_together(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console")
    options = [{"label": "Red", "description": "warm"}, {"label": "Blue", "description": "cold"}]
    asked: list[Any] = [
        {"question": "Which colour?", "header": "Colour", "options": options},
        {"question": "Which ones?", "header": "Ones", "options": options, "multiple": True},
        {"question": "And why?", "header": "Why", "options": []},
    ]
    ask: Any = {"tool": "question", "input": {"questions": asked}}
    await start(page, f"ask {script(ask, {'say': 'heard: {{result}}'})}")

    card = page.get_by_role("region", name="OpenCode asks 3 questions")
    await card.get_by_role("radio", name="Blue").check()
    await card.get_by_role("checkbox", name="Red").check()
    await card.get_by_role("checkbox", name="Blue").check()
    await card.get_by_label("Your own answer").last.fill("because")
    await card.get_by_role("button", name="Answer").click()

    await ended(page)
    said = page.locator(".log > .prose").last
    for word in ("Blue", "Red, Blue", "because"):
        await expect(said).to_contain_text(word)


async def test_a_conversation_is_one_page_and_what_is_said_reaches_the_agent_at_work(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console")
    prose = page.locator(".log > .prose")
    composer = page.locator(".composer textarea")
    await start(page, f"hang {script({'say': 'begun'}, {'hang': True})}")
    await expect(page.get_by_text("begun", exact=True)).to_be_visible()
    first = task_of(page)
    await page.get_by_role("button", name="Cancel").click()
    await ended(page, "canceled")

    # The next turn, below the first one.
    await composer.fill(script({"say": "second"}, {"gate": "steered"}, {"say": LONG}))
    await page.keyboard.press("Enter")
    await expect(prose).to_have_text(["begun", "second"])
    second = task_of(page)
    assert second != first

    # Enter while it works steers it; what else can be done is a choice.
    await composer.fill("be brief")
    await page.keyboard.press("Enter")
    added = page.locator(".added .person")
    await expect(added).to_have_text("You: be brief")
    assert task_of(page) == second
    await composer.fill("and then this")
    await page.get_by_label("When the agent gets it").select_option("After this turn")
    await page.keyboard.press("Tab")
    await page.get_by_role("button", name="Send").click()
    await expect(added.last).to_have_text("You: and then this")
    await expect(page.locator(".fate").last).to_have_text("Waits for the end of this turn")
    await stage.open("steered")
    await ended(page)
    await expect(page.get_by_text("the last paragraph").first).to_be_visible()

    # The page followed the end; whoever leaves it is not brought back.
    await page.wait_for_function(f"({LEFT}) < 60")
    await page.locator(".scroller").evaluate("(one) => (one.scrollTop = 0)")
    await page.get_by_role("button", name="To the end").click()
    await page.wait_for_function(f"({LEFT}) < 60")
    await expect(page.get_by_role("button", name="To the end")).to_be_hidden()

    # Everything is there again, in its place, at the address of any of the turns.
    await page.goto(f"{service.url}/console#/task/{first}")
    await page.reload()
    await expect(added).to_have_text(["You: be brief", "You: and then this"])
    await expect(prose.first).to_have_text("begun")
    await expect(page.locator(".turn")).to_have_count(2)


async def test_a_message_is_sent_once_and_none_is_lost(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console", expected=("ERR_FAILED",))
    begun = list[str]()
    lost = False

    async def slow(route: Route) -> None:
        sent: Any = route.request.post_data_json
        begun.append(sent["message"]["messageId"])
        answer = await route.fetch()
        await gate.wait()
        if lost:
            await route.abort()
        else:
            await route.fulfill(response=answer)

    await page.route("**/message:send", slow)
    gate = asyncio.Event()
    await new_task(page)
    await page.get_by_label("What should the agent do?").fill(f"once {script({'say': 'one'})}")
    for _ in range(3):
        await page.keyboard.press("Control+Enter")
    gate.set()
    await ended(page)
    assert len(begun) == 1

    # Enter twice is one message; what is written meanwhile is the next.
    gate.clear()
    composer = page.locator(".composer textarea")
    await composer.fill(script({"say": "two"}))
    for _ in range(2):
        await page.keyboard.press("Enter")
    await page.keyboard.insert_text("and next")
    gate.set()
    await expect(page.locator(".turn")).to_have_count(2)
    await ended(page)
    await expect(composer).to_have_value("and next")
    assert len(begun) == 2

    # Whoever looks at something else finds it again; whoever signs out leaves nothing.
    await page.get_by_role("link", name="About").click()
    await expect(page.get_by_role("heading", name="For programs")).to_be_visible()
    await page.go_back()
    await expect(composer).to_have_value("and next")
    here = page.url
    await page.get_by_role("button", name="Sign out").click()
    await page.get_by_label("Token").fill(TOKEN)
    await page.get_by_role("button", name="Sign in").click()
    assert page.url == here
    await expect(page.locator(".turn")).to_have_count(2)
    await expect(composer).to_have_value("")

    # The answer is lost on the way: the text is there again, and sent again it is the same message.
    lost = True
    await composer.fill(script({"say": "three"}))
    await page.keyboard.press("Enter")
    await expect(page.locator(".composer [role=alert]")).to_contain_text("cannot be reached")
    lost = False
    await expect(composer).to_have_value(re.compile("three"))
    async with page.expect_response("**/message:send"):
        await composer.press("Enter")
    await expect(composer).to_have_value("")
    assert begun[2] == begun[3]
    await expect(page.get_by_text("three", exact=True)).to_be_visible()
    await expect(page.locator(".turn")).to_have_count(3)


async def test_an_answer_that_the_model_did_not_end_itself_is_told(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")
    await start(page, script({"say": "half a"}, {"finish": "length"}))
    await ended(page)

    await expect(page.get_by_text("the model reached the limit of its output")).to_be_visible()


async def test_files_are_attached_pasted_and_dropped(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console#/new")
    await page.get_by_label("Files to attach").set_input_files(
        [{"name": "pixel.png", "mimeType": "image/png", "buffer": PIXEL}]
    )
    for kind, field in (("paste", "clipboardData"), ("drop", "dataTransfer")):
        # Pasted where one writes, and dropped anywhere.
        place = page.get_by_label("What should the agent do?" if kind == "paste" else "Views")
        await place.evaluate(
            f"""(box) => {{
              const files = new DataTransfer();
              files.items.add(new File(["text"], "{kind}.txt", {{type: "text/plain"}}));
              const event = new Event("{kind}", {{bubbles: true, cancelable: true}});
              Object.defineProperty(event, "{field}", {{value: files}});
              box.dispatchEvent(event);
            }}"""
        )
    attached = page.get_by_role("list", name="Attached files").get_by_role("listitem")
    await expect(attached).to_have_count(3)
    await expect(attached.first.locator("img")).to_have_js_property("naturalWidth", 1)
    await page.get_by_role("button", name="Remove paste.txt").click()
    await page.get_by_label("What should the agent do?").fill(f"look {script(DONE)}")
    await page.get_by_role("button", name="Start").click()

    await ended(page)
    await expect(page.locator(".person img")).to_have_js_property("naturalWidth", 1)
    await expect(page.locator(".person .file")).to_have_text("[drop.txt]")
    await page.get_by_role("link", name="Session", exact=True).click()
    await expect(page.get_by_role("heading", name="Messages")).to_be_visible()
    await expect(page.locator(".person img")).to_have_js_property("naturalWidth", 1)


async def test_photos_are_made_small_and_what_is_too_large_is_said(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console#/new", expected=("413",))
    photo = await page.evaluate(
        """async () => {
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [3000, 1500];
          const pen = canvas.getContext("2d"), noise = pen.createImageData(1200, 600);
          for (let i = 0; i < noise.data.length; i += 1000)
            crypto.getRandomValues(noise.data.subarray(i, i + 1000));
          pen.putImageData(noise, 0, 0);
          return canvas.toDataURL("image/png").split(",")[1];
        }"""
    )
    attached = page.get_by_role("list", name="Attached files").get_by_role("listitem")
    picker = page.get_by_label("Files to attach")
    await picker.set_input_files(
        [{"name": "photo.png", "mimeType": "image/png", "buffer": base64.b64decode(photo)}]
    )
    await expect(attached).to_contain_text("photo.jpg")
    await expect(attached.locator("img")).to_have_js_property("naturalWidth", 2000)
    await page.get_by_role("button", name="Remove photo.jpg").click()

    await picker.set_input_files(
        [{"name": "big.bin", "mimeType": "application/zip", "buffer": b"x" * 2_000_000}]
    )
    await page.get_by_label("What should the agent do?").fill("read it")
    await page.get_by_role("button", name="Start").click()
    await expect(page.get_by_role("alert")).to_contain_text("too large for one message")
    await expect(attached).to_contain_text("big.bin")


async def test_a_task_is_planned_first_within_a_profile_and_stopped_for_another(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console")
    await new_task(page)
    await page.get_by_text("Options", exact=True).click()
    await page.get_by_label("What the agent may do").select_option("read-only")
    steps = ([writing("forbidden.md")], [{"say": "heard"}])
    await page.get_by_label("What should the agent do?").fill(f"read {script(*steps)}")
    await page.get_by_role("button", name="Start").click()
    await ended(page)  # and nobody was asked
    await expect(page.get_by_text("heard", exact=True)).to_be_visible()
    assert not (stage.workspace / "forbidden.md").exists()

    await new_task(page)
    planned = f"planned {script({'say': 'my **plan**'})}"
    await page.get_by_label("What should the agent do?").fill(planned)
    await page.get_by_role("button", name="Plan first").click()
    card = page.get_by_role("region", name="Carry out this plan?")
    await expect(card.locator("strong")).to_have_text("plan")
    await card.get_by_role("button", name="Go").click()
    await ended(page)
    await expect(page.get_by_text(re.compile("Approved by you, "))).to_be_visible()

    composer = page.locator(".composer textarea")
    await composer.fill(script({"say": "at work"}, {"gate": "never"}, {"say": "too late"}))
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("at work", exact=True)).to_be_visible()
    await composer.fill(script({"say": "this instead"}))
    await page.get_by_label("When the agent gets it").select_option("Stop, and do this instead")
    await page.get_by_role("button", name="Send").click()
    await expect(page.get_by_text("this instead", exact=True)).to_be_visible()
    await ended(page)
    await expect(page.get_by_text("too late", exact=True)).to_have_count(0)


async def test_long_outputs_come_in_pieces_and_changes_by_file(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console")
    command = "for n in 1 2 3 4; do seq 1 70 > many-$n.txt; done; seq 1 1500"
    bash = {"tool": "bash", "input": {"command": command, "description": "Count"}}
    await start(page, f"pieces {script(bash, DONE)}")
    await page.get_by_role("button", name="Allow once").click()
    await ended(page)

    tool = page.locator(".tool.completed")
    await tool.locator("summary").click()
    output = tool.locator("pre").last
    await expect(output).to_contain_text("200")
    assert (await output.inner_text()).split()[-1] == "200"
    await tool.get_by_role("button", name="Show 1000 of 1300 more lines").click()
    await tool.get_by_role("button", name="Show all 1500 lines").click()
    assert (await output.inner_text()).split() == [str(number) for number in range(1, 1501)]

    changes = page.locator(".changes .diff")
    await expect(changes).to_have_count(4)
    await expect(page.locator(".changes .diff[open]")).to_have_count(0)
    one = page.locator(".changes .diff", has_text="many-2.txt")
    await one.locator("summary").click()
    await expect(one.locator(".counts")).to_have_text("+70 \u22120")
    await one.get_by_role("button", name="Whole file").click()
    await expect(one.locator(".whole pre")).to_contain_text("70")
    for number in range(1, 5):
        (stage.workspace / f"many-{number}.txt").unlink()


async def test_what_waits_stands_first_whatever_came_after_it(
    look: Look, stage: Backstage, tmp_path: Path
) -> None:
    async with serving(settings_for(stage, tmp_path)) as service:
        caller = Caller(service)
        done = await caller.send(f"an old flaky one {script(DONE)}")
        await caller.begin(f"a permission {script(writing('w.md'), DONE)}")
        plan = script(
            {"say": "at first &#x202e;this\n\n[it]: https://evil.example 'and\u200b that'"},
            {"tool": "read", "input": {"filePath": "hello.txt"}},
            {"say": "the plan\n\n" + PLAN + "a line\n\n" * 60 + "its end"},
        )
        planned = await caller.begin(f"a plan {plan}", metadata={"opencode": {"plan": True}})
        refused = await caller.begin(f"a sign-in {script({'error': 401})}")
        page = await look(f"{service.url}/console#/task/{refused.id}", expected=("ERR_CONNECTION",))
        await expect(page.get_by_role("heading", name="Waits for you (3)")).to_be_visible()
        add_copies(tmp_path, done.id, [f"newer {number}" for number in range(500)])

        # Everywhere: the list, the title of the tab, the page of what waits.
        await page.goto(f"{service.url}/console#/prompts")
        await page.reload()
        await expect(page.get_by_role("heading", name="Waits for you (3)")).to_be_visible()
        await expect(page.get_by_role("heading", name="Ended (the newest 5")).to_be_visible()
        await expect(page).to_have_title("(3) OpenCode A2A")
        await expect(page.locator("main .ask")).to_have_count(3)
        await check(page, "what waits")

        # The search is not for what is loaded alone.
        await page.get_by_label("Search the tasks").fill("Flaky OLD")
        await expect(page.locator("a.row")).to_have_count(1)
        await expect(page.locator("a.row")).to_contain_text("an old flaky one")
        await expect(page).to_have_title("(3) OpenCode A2A")
        await page.get_by_label("Search the tasks").fill("no such title")
        await expect(page.get_by_text("No task has these words in its title.")).to_be_visible()
        await page.get_by_label("Search the tasks").fill("")

        # A plan can be carried out once all of it was seen, also what Markdown does not draw.
        for place in ("prompts", f"task/{planned.id}"):
            await page.goto(f"{service.url}/console#/{place}")
            shown = page.get_by_role("region", name="Carry out this plan?").locator(".subject")
            await expect(shown).to_contain_text("at first ⟨U+202E⟩this")
            await expect(shown).to_contain_text("[it]: https://evil.example 'and⟨U+200B⟩ that'")
            await expect(shown).to_contain_text("its end")
            await expect(shown).to_contain_text("the installer “run it twice”")
            beside = "(one) => getComputedStyle(one, '::after').content"
            leads = shown.get_by_role("link", name="the installer")
            await expect(leads).to_have_attribute("data-to", "https://evil.example/x.sh")
            assert await leads.evaluate(beside) != "none"
            await page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            assert await shown.evaluate(OUTSIDE) == []
            await page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
        go = page.get_by_role("button", name="Go", exact=True)
        await expect(go).to_be_disabled()
        await page.get_by_role("button", name="Show the rest").click()
        await expect(go).to_be_enabled()
        await go.click()
        await ended(page)
        await expect(page.get_by_text(re.compile("Approved by you, "))).to_be_visible()

        await page.goto(f"{service.url}/console#/task/{refused.id}")
        card = page.get_by_role("region", name="The model provider refused the key")
        await expect(card).to_contain_text("refused its credentials")
        await expect(card).to_contain_text("Incorrect API key provided")
        await check(page, "sign-in")
        await card.get_by_role("button", name="Try again").click()
        await ended(page)
        await expect(page.get_by_role("heading", name="Waits for you (1)")).to_be_visible()


async def test_code_is_coloured_copied_and_stays_what_it_is(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console", permissions=["clipboard-read", "clipboard-write"])
    python = 'def f(x):\n    # "why"\n    return "a # b" + str(10.5)'
    fence = "```"
    await start(page, f"code {script({'say': f'{fence}python{chr(10)}{python}{chr(10)}{fence}'})}")
    await ended(page)

    block = page.locator(".code")
    await expect(block.locator(".key")).to_have_text(["def", "return"])
    await expect(block.locator(".comment")).to_have_text('# "why"')
    await expect(block.locator(".text")).to_have_text('"a # b"')
    await expect(block.locator(".number")).to_have_text("10.5")
    await block.get_by_role("button", name="Copy").click()
    await expect(block.get_by_role("button", name="Copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == python

    # Whatever is written, no character changes, and nothing takes long.
    hostile = [
        one * (30_000 // len(one))
        for one in ('"', "/*", "\\", "`\\", '"\\', "'\\", '"""', "<!--", "1.", "'a", "`a", "x #")
    ]
    wrong = await page.evaluate(
        """async (texts) => {
          const { coloured } = await import("./console/colour.js");
          const wrong = [];
          for (const lang of ["py", "js", "html", "sql", "json", "diff", "x", undefined])
            for (const text of texts) {
              const begun = performance.now();
              const all = coloured(text, lang);
              const same = all.map((one) => one.textContent ?? one).join("").replace(/\\n$/, "");
              if (same !== text || performance.now() - begun > 2000) wrong.push([lang, text[0]]);
            }
          return wrong;
        }""",
        hostile,
    )
    assert wrong == []


async def test_about_says_who_you_are_and_what_you_use(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console#/about")
    main = page.locator("main")
    for heading in ("You", "Service", "OpenCode", "This browser", "For programs"):
        await expect(main.get_by_role("heading", name=heading, exact=True)).to_be_visible()
    text = await main.inner_text()
    assert re.search(r"Signed in as\s+bearer:", text)
    assert re.search(r"Ready for work\s+yes", text)
    assert re.search(r"Model\s+demo/demo", text)
    assert not re.search(r"null|undefined|NaN|_", text)
    await main.get_by_text("What /health says").click()
    await expect(main.locator("pre")).to_contain_text('"protocol_versions"')


async def test_a_page_of_what_waits_approves_nothing_that_it_does_not_show(
    look: Look, service: Running
) -> None:
    caller = Caller(service)
    plan = f"first {script({'say': 'the first plan'})}"
    task = await caller.begin(plan, metadata={"opencode": {"plan": True}})
    refused = await caller.send(f"refused {script({'error': 401})}")
    refusals = ("400", "404", "409", "ERR_FAILED")
    page = await look(f"{service.url}/console#/prompts", expected=refusals, clock=True)
    card = page.get_by_role("region", name="Carry out this plan?")
    await expect(card).to_contain_text("the first plan")
    await expect(card.get_by_role("button", name="Go")).to_be_enabled()

    # Another plan takes the place of the first while the page hears nothing.
    await page.route("**/tasks?*", lambda route: route.abort())
    await caller.send(f"another {script({'say': 'the second plan'})}", task=task.id)
    await card.get_by_role("button", name="Go").click()
    await expect(card.get_by_role("alert")).not_to_be_empty()
    assert (await caller.get(task.id)).state == "input_required"

    # Nor does another try count for a sign-in that it does not show.
    again = page.get_by_role("region", name="The model provider refused the key")
    await caller.send(script({"error": 401}), task=refused.id)
    await again.get_by_role("button", name="Try again").click()
    await expect(again.get_by_role("alert")).to_contain_text("settled before")
    assert (await caller.get(refused.id)).history[1:] == [script({"error": 401})]
    await caller.cancel(refused.id)

    # What is over leaves the page, what is new comes, and the rest stays as it is.
    await page.unroute("**/tasks?*")
    await page.clock.fast_forward(2000)
    await expect(card).to_contain_text("the second plan")
    await expect(card).to_have_count(1)
    asking = f"asking {script(writing('asked.md'), DONE)}"
    other = await caller.begin(asking)
    permission = page.get_by_role("region", name="May OpenCode change a file?")
    await page.clock.fast_forward(2000)
    await permission.get_by_role("button", name="Deny…").click()
    await page.get_by_label("Why not, for the agent").fill("not yet")
    await caller.cancel(task.id)
    await page.clock.fast_forward(2000)
    await expect(card).to_have_count(0)
    await expect(page.get_by_label("Why not, for the agent")).to_have_value("not yet")
    await caller.cancel(other.id)
    await page.clock.fast_forward(2000)
    await expect(page.get_by_text("Nothing waits for you.")).to_be_visible()


async def test_the_plan_is_a_checklist(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console")
    todos = [
        {"content": "Look", "status": "completed", "priority": "low"},
        {"content": "Leap", "status": "in_progress", "priority": "low"},
    ]
    await start(page, f"plan {script({'tool': 'todowrite', 'input': {'todos': todos}}, DONE)}")

    await ended(page)
    await expect(page.locator(".plan li")).to_have_count(2)
    await expect(page.locator(".plan .completed")).to_contain_text("Look")


async def test_what_waits_and_sessions_have_pages_of_their_own(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")
    await start(page, f"paged {script(writing('paged.md'), DONE)}")
    await expect(page.locator(".ask")).to_be_visible()
    task = task_of(page)

    await page.get_by_role("link", name="Waiting").click()
    await page.get_by_role("button", name="Allow once").click()
    await expect(page.get_by_text("Nothing waits for you.")).to_be_visible()
    await page.goto(f"{service.url}/console#/task/{task}")
    await ended(page)
    await page.get_by_role("link", name="Session", exact=True).click()
    await expect(page.get_by_role("heading", name="Messages")).to_be_visible()
    await expect(page.get_by_role("heading", name="Changes")).to_be_visible()
    await page.get_by_label("Title").fill("A better name")
    await page.get_by_role("button", name="Rename").click()
    await expect(page.get_by_role("heading", name="A better name")).to_be_visible()
    before = page.url
    await page.get_by_role("button", name="Fork").click()
    await expect(page.get_by_role("heading", name="A better name (fork #1)")).to_be_visible()
    assert page.url != before
    # The fork is a conversation, with what was said so far and a place to go on.
    await expect(page.locator(".scroller .person")).to_contain_text("paged")
    await expect(page.get_by_label("Continue this conversation")).to_be_focused()
    await page.keyboard.insert_text(script({"say": "on another way"}))
    await page.keyboard.press("Enter")
    await ended(page)
    await expect(page.locator(".scroller .person").first).to_contain_text("paged")
    await expect(page.get_by_text("on another way", exact=True)).to_be_visible()
    assert task_of(page) not in ("", task)
    forked = page.get_by_role("link", name="Session", exact=True)
    assert await forked.get_attribute("href") != before.partition("/console")[2]
    await page.goto(before)
    await expect(page.get_by_role("heading", name="A better name", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Delete…").click()
    await page.get_by_role("button", name="Delete", exact=True).click()
    await expect(page.get_by_role("heading", name="Sessions")).to_be_visible()
    await expect(page.get_by_role("link", name="A better name (fork #1)")).to_have_count(1)
    await expect(page.get_by_role("link", name="A better name")).to_have_count(1)


@pytest.mark.opencode2_only
async def test_an_opencode_without_plans_and_todo_lists_is_not_asked_for_them(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")
    await expect(page.get_by_role("button", name="Start")).to_be_visible()
    await expect(page.get_by_role("button", name="Plan first")).to_be_hidden()
    await page.get_by_text("Options", exact=True).click()
    await expect(page.get_by_label("Agent", exact=True)).to_be_visible()
    await expect(page.get_by_label("What the agent may do")).to_be_hidden()

    await start(page, f"other {script(DONE)}")
    await ended(page)
    await page.get_by_role("link", name="Session", exact=True).click()

    await expect(page.get_by_role("heading", name="Messages")).to_be_visible()


async def test_a_session_begun_elsewhere_is_continued(
    look: Look, service: Running, stage: Backstage
) -> None:
    async with httpx2.AsyncClient(base_url=stage.url, auth=("opencode", stage.password)) as http:
        made = await http.post("/session", json={"title": "Begun in OpenCode"})
    assert made.status_code == 200
    page = await look(f"{service.url}/console#/sessions")

    await page.get_by_role("link", name="Begun in OpenCode").click()
    await page.get_by_label("Continue this session").fill(f"go on {script({'say': 'here I am'})}")
    await page.keyboard.press("Enter")

    await ended(page)
    await expect(page.get_by_text("here I am", exact=True)).to_be_visible()
    session = page.get_by_role("link", name="Session", exact=True)
    await expect(session).to_have_attribute("href", f"#/session/{made.json()['id']}")


# --- what a model may write -------------------------------------------------------------------


async def test_nothing_that_is_told_becomes_markup(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console", expected=("TrustedHTML",))
    opened: list[str] = []
    page.on("dialog", lambda dialog: opened.append(dialog.message))
    everything = "\n\n".join(PAYLOADS)
    framed = f"{everything}\n\n```html\n{everything}\n```\n\n| a |\n|---|\n| {PAYLOADS[0]} |"
    evil = "<img src=x onerror=pwned=1>.md"
    question = {
        "question": PAYLOADS[1],
        "header": PAYLOADS[0],
        "options": [{"label": one[:60], "description": one} for one in PAYLOADS[:3]],
    }
    await start(
        page,
        PAYLOADS[1]
        + script(
            {"think": everything},
            {"say": everything},
            writing(evil, everything + "\n\nlonger than a screen" * 30),
            {"tool": "question", "input": {"questions": [question]}},
            {"say": framed},
        ),
    )
    await expect(page.locator(".ask .path")).to_contain_text(evil)
    await page.wait_for_function(SHOW_THE_REST)
    await page.get_by_role("button", name="Allow once").click()
    await page.get_by_role("radio").first.check()
    await page.get_by_role("button", name="Answer").click()
    await ended(page)
    await unfold(page)

    shown = await page.locator("main").inner_text()
    for payload in PAYLOADS:
        core = payload.removeprefix("!").split("](")[0].lstrip("[")
        assert core in shown, payload
    assert (
        await page.locator("h2").last.inner_text() == await page.locator("h2").last.text_content()
    )
    assert await page.evaluate("window.pwned") is None
    assert opened == []
    for forbidden in (
        "script:not([src])",
        "main img",
        "iframe",
        "main style",
        "main svg",
        "[onerror]",
    ):
        assert await page.locator(forbidden).count() == 0, forbidden
    links = await page.locator("main a").evaluate_all("(all) => all.map((a) => a.protocol)")
    assert set(links) <= {"http:", "https:", "mailto:"}
    with pytest.raises(Exception, match="TrustedHTML"):
        await page.evaluate("document.body.innerHTML = '<b>x</b>'")
    (stage.workspace / evil).unlink()


# --- connections ------------------------------------------------------------------------------


async def test_a_reload_in_the_middle_shows_everything_once(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console")
    await start(
        page, f"slow {script({'say': 'first half, '}, {'gate': 'reload'}, {'say': 'second half'})}"
    )
    await expect(page.locator(".log > .prose")).to_have_text("first half,")

    await page.reload()
    await expect(page.locator(".log > .prose")).to_have_text("first half,")
    await stage.open("reload")

    await ended(page)
    await expect(page.locator(".log > .prose")).to_have_text("first half, second half")


async def test_a_lost_service_is_reported_and_the_stream_resumes(
    look: Look, stage: Backstage, tmp_path: Path
) -> None:
    port = free_port()
    settings = settings_for(stage, tmp_path)
    async with AsyncExitStack() as before:
        service = await before.enter_async_context(serving(settings, port=port))
        lost = ("ERR_CONNECTION", "503", "ERR_INCOMPLETE")
        page = await look(f"{service.url}/console", expected=lost, clock=True)
        await start(page, f"lost {script({'say': 'one '}, {'gate': 'lost'}, {'say': 'two'})}")
        await expect(page.locator(".log > .prose")).to_have_text("one")

    await page.clock.fast_forward(3000)
    await expect(page.get_by_text("The connection is lost. Trying again…")).to_be_visible()
    async with serving(settings, port=port):
        await stage.open("lost")
        await page.clock.fast_forward(8000)
        await ended(page)
        await expect(page.locator(".log > .prose")).to_have_text("one two")
        await expect(page.get_by_text("The connection is lost. Trying again…")).to_be_hidden()


# --- for everybody ----------------------------------------------------------------------------


async def test_everything_can_be_done_with_keys(
    look: Look, service: Running, stage: Backstage
) -> None:
    page = await look(f"{service.url}/console")
    await expect(page.locator(".welcome")).to_be_visible()

    await page.keyboard.press("n")
    await expect(page.get_by_label("What should the agent do?")).to_be_focused()
    await page.keyboard.insert_text(f"keys {script(writing('keys.md'), DONE)}")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".ask")).to_be_visible()
    await page.keyboard.press("a")  # nothing is focused: nothing is approved
    await page.keyboard.press("w")
    await expect(page.locator(".ask")).to_be_focused()
    await expect(page.locator(".ask [inert]")).to_have_count(0)
    await expect(page.get_by_role("button", name="Allow once")).to_be_enabled()
    assert not (stage.workspace / "keys.md").exists()
    await page.keyboard.press("a")
    await ended(page)
    assert (stage.workspace / "keys.md").exists()

    await page.keyboard.press("?")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    await page.keyboard.press("/")
    await page.keyboard.insert_text("keys")
    await expect(page.locator("a.row")).to_have_count(1)
    await page.keyboard.press("Escape")
    await page.keyboard.press("Escape")
    await expect(page.locator(".welcome")).to_be_visible()
    await page.keyboard.press("j")
    await ended(page)


@pytest.mark.parametrize("width", [390, 320])
async def test_a_phone_shows_the_list_or_one_task(look: Look, service: Running, width: int) -> None:
    page = await look(f"{service.url}/console", size=(width, PHONE[1]))
    long = "a_word_that_does_not_break_" * 8
    await start(page, f"phone {script(writing(f'{width}.md', long), {'say': long})}")
    await page.get_by_role("button", name="Allow once").click()
    await ended(page)

    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert await page.evaluate(wider) == 0
    await expect(page.locator(".aside")).to_be_hidden()
    await page.get_by_role("link", name="Back to the list").click()
    await expect(page.get_by_role("main", name="Tasks")).to_be_visible()
    assert await page.evaluate(wider) == 0
    small = await page.locator("button:visible, a.button:visible, a.row:visible").evaluate_all(
        "(all) => all.filter((one) => one.getBoundingClientRect().height < 28).length"
    )
    assert small == 0


async def test_a_request_that_just_fits_is_read_from_its_beginning(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console", size=PHONE)
    long = "".join(f"line {number}\n" for number in range(40))
    await start(page, f"fits {script({'say': long}, writing('fits.md'), DONE)}")
    await expect(page.locator(".ask")).to_be_visible()
    room = await page.evaluate(
        "document.querySelector('.ask').offsetHeight"
        " - document.querySelector('.scroller').clientHeight"
    )
    await page.set_viewport_size({"width": PHONE[0], "height": PHONE[1] + room + 10})
    await page.reload()

    await expect(page.locator(".ask h3")).to_be_in_viewport(ratio=1)
    await page.get_by_role("button", name="Allow once").click()
    await ended(page)


async def test_axe_finds_nothing(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console", signed_in=False, expected=("404",))
    await check(page, "sign-in")
    await page.get_by_label("Token").fill(TOKEN)
    await page.get_by_role("button", name="Sign in").click()
    await expect(page.locator(".welcome")).to_be_visible()
    await check(page, "list")
    table = "# Title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\ncode\n```\n\n> quote [x](https://x.example)"
    question = {
        "question": "Which?",
        "header": "W",
        "options": [{"label": "A", "description": "a"}],
    }
    ask = {"tool": "question", "input": {"questions": [question]}}
    actions = ({"think": "hm"}, writing("axe.md"), {"say": table}, ask, DONE)
    await start(page, f"axe {script(*actions)}")
    await expect(page.get_by_role("button", name="Allow once")).to_be_enabled()
    await page.get_by_role("button", name="Deny…").click()
    await check(page, "permission")
    await page.get_by_role("button", name="Allow once").click()
    await expect(page.get_by_role("button", name="Answer")).to_be_visible()
    await check(page, "question")
    await page.get_by_role("radio").first.check()
    await page.get_by_role("button", name="Answer").click()
    await ended(page)
    await unfold(page)
    await check(page, "ended")
    await page.get_by_role("link", name="Session", exact=True).click()
    await expect(page.get_by_role("heading", name="Messages")).to_be_visible()
    await check(page, "session")
    await page.get_by_role("button", name="Delete…").click()
    await check(page, "question before a session is deleted")
    await page.get_by_role("button", name="Keep").click()
    await page.get_by_role("button", name="Fork").click()
    await expect(page.get_by_label("Continue this conversation")).to_be_focused()
    await check(page, "fork")
    await page.keyboard.press("Escape")
    await page.keyboard.press("?")
    await check(page, "keys")
    await page.keyboard.press("Escape")
    for address in ("nothing", "task/nothing"):
        await page.goto(f"{service.url}/console#/{address}")
        await expect(page.get_by_role("main")).to_contain_text(re.compile("no page|no such task"))
        await check(page, address)
    for link, heading in (
        ("New task", "New task"),
        ("Waiting", "What waits for you"),
        ("Allowed", "What you have allowed"),
        ("Sessions", "Sessions"),
        ("About", "About"),
        ("Methods and paths of this service", "Methods"),
    ):
        await page.get_by_role("link", name=link, exact=True).click()
        await expect(page.get_by_role("heading", name=heading).first).to_be_visible()
        await check(page, link)
        assert "[object Object]" not in await page.locator("main").inner_text()


# --- what is told besides ---------------------------------------------------------------------


async def test_a_task_of_another_client_appears_in_the_list(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console")
    await expect(page.locator(".welcome")).to_be_visible()
    await expect(page.locator("a.row").first).to_be_visible()

    # One that waits when it is seen for the first time is told like one that begins to wait.
    caller = Caller(service)
    waiting = await caller.send(f"one that waits {script(writing('told.md'), DONE)}")
    await expect(page.locator("p.sr")).to_have_text(re.compile("^one that waits .* waits for you$"))
    await caller.cancel(waiting.id)

    params = message(f"from elsewhere {script(DONE)}")
    sent = await service.http.post("/message:send", json=params, headers={"A2A-Version": "1.0"})

    assert sent.status_code == 200
    row = page.locator("a.row", has_text="from elsewhere")
    await expect(row).to_contain_text("completed")
    await row.click()
    await ended(page)


async def test_a_long_answer_and_a_long_list_are_shown_whole(
    look: Look, service: Running, stage: Backstage
) -> None:
    params = message(f"long {script({'say': 'x'})}")
    sent = await service.http.post("/message:send", json=params, headers={"A2A-Version": "1.0"})
    task = sent.json()["task"]
    page = await look(f"{service.url}/console", expected=("404",))
    others = [
        {
            **task,
            "id": f"{task['id'][:-4]}{number:04}",
            "contextId": f"another conversation {number}",
            "metadata": {"opencode": {"title": f"t{number}"}},
        }
        for number in range(1000)
    ]
    text = [f"line {number}\n\n" for number in range(20_000)]
    stream = {"block_type": "text", "source": "stream"}
    events = [
        {
            "artifactUpdate": {
                "append": True,
                "artifact": {"parts": [{"text": one}], "metadata": {"shared": {"stream": stream}}},
            }
        }
        for one in text
    ]
    # A call of which nothing more was heard does not run on when the task has ended.
    asked: Any = {"tool": "question", "status": "running"}
    asked["input"] = {"questions": [{"question": "Tea or coffee?"}]}
    call: Any = {"artifactId": "call", "parts": [{"data": asked}]}
    call["metadata"] = {"shared": {"stream": {"block_type": "tool_call"}}}
    events.append({"artifactUpdate": {"artifact": call}})
    events.append({"statusUpdate": {"status": task["status"], "metadata": {}}})
    frames = [f"id: {n}\ndata: {json.dumps(event)}\n\n" for n, event in enumerate(events, 1)]

    async def listed(route: Route) -> None:
        await route.fulfill(json={"tasks": others, "nextPageToken": ""})

    async def nothing(route: Route) -> None:
        await route.fulfill(json={"tasks": [], "nextPageToken": ""})

    async def told(route: Route) -> None:
        await route.fulfill(body="".join(frames), content_type="text/event-stream")

    await page.route("**/tasks?pageSize=50*", listed)
    await page.route("**/tasks?status=*", nothing)
    await page.route("**/tasks/*:subscribe", told)
    await page.goto(f"{service.url}/console#/task/{task['id']}")
    await page.reload()

    await expect(page.locator(".log > .prose > p")).to_have_count(20_000)
    await expect(page.locator(".tool.unfinished .about")).to_have_text("Tea or coffee?")
    await expect(page.get_by_role("img", name="unfinished")).to_have_count(1)
    await expect(page.locator("a.row")).to_have_count(1001)  # with the task that is open
    await page.get_by_label("Search the tasks").fill("t999")
    await expect(page.locator("a.row")).to_have_count(1)
