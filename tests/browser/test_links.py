"""A link on the phone: a stranger reads what is to be approved, and answers."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from tests.browser.cases import CASES, asking
from tests.browser.conftest import Look, check
from tests.browser.test_approvals import OUTSIDE
from tests.support.backstage import Backstage, script
from tests.support.caller import Caller
from tests.support.ports import free_port
from tests.support.receiver import Receiver, receiving
from tests.support.service import Running, serving, settings_for

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

SMALL = (360, 640)
DONE = {"say": "done"}
LOOK_SECONDS = 1.0
"""How long a person looks at each screen before the next swipe or the tap."""
ON_SCREEN = """(one) => {
  const { top, bottom } = one.getBoundingClientRect();
  return top >= 0 && bottom <= innerHeight;
}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def receiver() -> AsyncGenerator[Receiver]:
    async with receiving() as made:
        yield made


def notifying(receiver: Receiver, port: int) -> dict[str, str]:
    told = [
        {"kind": "webhook", "url": receiver.url, "about": ["waits"]},
        {"kind": "webpush", "contact": "mailto:me@example.org"},
    ]
    url = f"http://127.0.0.1:{port}"
    return {"A2A_NOTIFY": orjson.dumps(told).decode(), "A2A_PUBLIC_URL": url}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    stage: Backstage, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> AsyncGenerator[Running]:
    port = free_port()
    settings = settings_for(stage, tmp_path_factory.mktemp("state"), **notifying(receiver, port))
    async with serving(settings, port=port) as running:
        yield running


def running(command: str) -> str:
    """Return a prompt that has the scripted model run a command."""
    bash: Any = {"tool": "bash", "input": {"command": command, "description": "Say it"}}
    return script(bash, DONE)


async def link_to(caller: Caller, receiver: Receiver, text: str) -> tuple[str, str]:
    """Have the agent ask for something; return the task and the link that a person gets."""
    receiver.received.clear()
    task = await caller.send(text)
    (told,) = await receiver.until(lambda it: len(it.received) == 1)
    return task.id, told.content["url"]


async def test_a_stranger_reads_a_long_command_and_allows_it(
    look: Look, service: Running, receiver: Receiver, stage: Backstage
) -> None:
    lines = [f"echo line {number} >> long.txt" for number in range(60)]
    caller = Caller(service)
    task, url = await link_to(caller, receiver, running(" && ".join(lines)))
    page = await look(url, signed_in=False, size=SMALL, color_scheme="dark")
    card = page.locator(".ask")
    allow = card.get_by_role("button", name="Allow once")

    await expect(card.get_by_role("button", name="Show the rest")).to_be_visible()
    await expect(allow).to_be_disabled()
    assert lines[0] in await card.inner_text()
    assert lines[-1] in await card.inner_text()
    assert await card.evaluate(OUTSIDE) == []
    await expect(card.get_by_role("button", name="Allow for this task")).to_have_count(0)
    await check(page, "a long command", SMALL)
    await page.keyboard.press("End")
    await expect(allow).to_be_enabled()
    await allow.click()

    await expect(page.get_by_role("status")).to_contain_text("Allowed once by you")
    done = await caller.ended(task)
    assert done.state == "completed"
    written = (stage.workspace / "long.txt").read_text().splitlines()
    assert written == [f"line {number}" for number in range(60)]
    await check(page, "answered", SMALL)
    # A second look says that it is over, without what was asked.
    again = await look(url, signed_in=False, size=SMALL, color_scheme="light")
    await expect(again.get_by_role("heading", name="This is over")).to_be_visible()
    await expect(again.get_by_role("status")).to_contain_text("Allowed once")
    assert "long.txt" not in await again.locator("body").inner_text()
    assert await again.evaluate("Object.keys(sessionStorage).length + localStorage.length") == 0


@pytest.mark.parametrize("lines", [1, 60])
async def test_a_stranger_answers_on_a_phone_within_ten_seconds(
    look: Look, service: Running, receiver: Receiver, lines: int
) -> None:
    """From the moment when the link is opened until the answer is stored.

    Measured: the page with an empty cache over a slow mobile network and on a processor four times
    slower than this one, swipes at the speed of a finger, the time in which no tap counts, the tap,
    and the way of the answer. Added, since nobody is there: the time for a look at each screen. A
    look finds what is asked for; whoever reads 60 lines word by word takes longer than any page.
    """
    command = "\n".join(f"echo line {number} of them" for number in range(lines))
    _, url = await link_to(Caller(service), receiver, running(command))
    phone: Any = {"has_touch": True, "is_mobile": True, "device_scale_factor": 2}
    page = await look(f"{service.url}/console/icon.svg", signed_in=False, size=SMALL, **phone)
    tools: Any = await page.context.new_cdp_session(page)
    slow_4g = {"latency": 150, "downloadThroughput": 200_000, "uploadThroughput": 94_000}
    await tools.send("Network.emulateNetworkConditions", {"offline": False, **slow_4g})
    await tools.send("Emulation.setCPUThrottlingRate", {"rate": 4})
    allow = page.get_by_role("button", name="Allow once")

    began, screens = time.monotonic(), 1
    await page.goto(url)
    await expect(allow).to_be_visible()
    while not await allow.evaluate(ON_SCREEN):
        await swipe(tools)
        screens += 1
    await allow.tap()
    await expect(page.get_by_role("status")).to_contain_text("Allowed once by you")
    taken = time.monotonic() - began + screens * LOOK_SECONDS

    assert (screens > 1) == (lines > 1)
    assert taken < 10


async def swipe(tools: Any) -> None:
    """Draw a finger over most of the screen, in a quarter of a second."""
    (width, height), steps = SMALL, 15
    for step in range(steps + 1):
        place = {"x": width / 2, "y": height * (0.9 - 0.8 * step / steps)}
        kind = "touchMove" if step else "touchStart"
        await tools.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [place]})
        await asyncio.sleep(0.25 / steps)
    await tools.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


async def test_two_phones_disagree_and_the_second_is_told(
    look: Look, service: Running, receiver: Receiver
) -> None:
    caller = Caller(service)
    task, url = await link_to(caller, receiver, running("echo hello"))
    first = await look(url, signed_in=False, size=SMALL)
    second = await look(url, signed_in=False, size=SMALL, expected=("409",))
    for page in (first, second):
        await expect(page.get_by_role("button", name="Allow once")).to_be_enabled()

    await first.get_by_role("button", name="Deny…").click()
    await first.get_by_role("button", name="Deny", exact=True).click()
    await expect(first.get_by_role("status")).to_contain_text("Denied")
    await second.get_by_role("button", name="Allow once").click()

    await expect(second.get_by_role("alert").last).to_contain_text("answered before")
    await expect(second.get_by_role("status")).to_contain_text("Denied")
    assert (await caller.ended(task)).state == "rejected"
    forged = await look(f"{url}x", signed_in=False, size=SMALL, expected=("404",))
    await expect(forged.get_by_role("alert")).to_contain_text("This link is not valid")
    await check(forged, "forged", SMALL)


async def test_a_question_is_answered_by_link(
    look: Look, service: Running, receiver: Receiver
) -> None:
    caller, options = Caller(service), [{"label": "Red", "description": ""}]
    question = {"question": "Which colour?", "header": "Colour", "options": options}
    asking: Any = {"tool": "question", "input": {"questions": [question]}}
    task, url = await link_to(caller, receiver, script(asking, DONE))
    page = await look(url, signed_in=False, size=SMALL)

    await page.get_by_role("radio").first.check()
    await check(page, "a question", SMALL)
    await page.get_by_role("button", name="Answer").click()

    await expect(page.get_by_role("status")).to_contain_text("Answered")
    assert (await caller.ended(task)).state == "completed"


async def test_a_plan_is_read_and_carried_out_by_link(
    look: Look, service: Running, receiver: Receiver
) -> None:
    caller = Caller(service)
    text = "first\u202e this\n\n" + "a step\n\n" * 40 + "the **end**\u200b"
    receiver.received.clear()
    task = await caller.send(f"plan {script({'say': text})}", metadata={"opencode": {"plan": True}})
    (told,) = await receiver.until(lambda it: len(it.received) == 1)
    page = await look(told.content["url"], signed_in=False, size=SMALL, color_scheme="dark")
    go = page.get_by_role("button", name="Go", exact=True)

    await expect(page.locator(".subject")).to_contain_text("first⟨U+202E⟩ this")
    await expect(page.locator(".subject")).to_contain_text("the end⟨U+200B⟩")
    await expect(go).to_be_disabled()
    await check(page, "a plan", SMALL)
    await page.get_by_role("button", name="Show the rest").click()
    await go.click()

    await expect(page.get_by_role("status")).to_contain_text("Approved by you")
    assert (await caller.ended(task.id)).state == "completed"


async def test_a_refused_key_is_tried_again_by_link(
    look: Look, service: Running, receiver: Receiver
) -> None:
    caller = Caller(service)
    task, url = await link_to(caller, receiver, f"key {script({'error': 401})}")
    page = await look(url, signed_in=False, size=SMALL)
    await expect(page.locator(".ask")).to_contain_text("Incorrect API key provided")
    await check(page, "a sign-in", SMALL)

    await page.get_by_role("button", name="Try again").click()

    await expect(page.get_by_role("status")).to_contain_text("Tried again by you")
    assert (await caller.ended(task)).state == "completed"


async def test_hostile_requests_are_shown_as_in_the_console(
    look: Look, receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> None:
    opencode = asking(tmp_path_factory.mktemp("workspace"))
    port = free_port()
    state = tmp_path_factory.mktemp("state")
    async with (
        opencode.running(),
        serving(settings_for(opencode, state, **notifying(receiver, port)), port=port) as service,
    ):
        page: Page | None = None
        for name in list(CASES):
            case = CASES[name]
            _, url = await link_to(Caller(service), receiver, name)
            if page is None:
                page = await look(url, signed_in=False, size=SMALL)
            else:
                await page.goto("about:blank")  # else the page would reload itself
                await page.goto(url)
            card = page.locator(".ask")
            allow = card.get_by_role("button", name="Allow once")
            await expect(allow).to_be_visible()
            text = await card.inner_text()
            assert [one for one in case.shows if one not in text] == [], name
            assert [one for one in case.hides if one in text] == [], name
            assert await card.evaluate(OUTSIDE) == [], name
            await page.keyboard.press("End")
            await expect(allow).to_be_enabled()


async def test_a_pushed_message_is_shown_with_its_link(look: Look, service: Running) -> None:
    """A headless browser has neither a push service nor a place for messages.

    So the worker is registered under the policy of its page, and given the event here.
    """
    page = await look(f"{service.url}/notices", size=SMALL)
    await expect(page.get_by_role("button", name="Get messages on this device")).to_be_visible()
    await check(page, "messages", SMALL)
    async with page.context.expect_event("serviceworker") as starting:
        await page.evaluate(
            "import('./notices/page.js').then(({ worker }) => worker()).then(() => 0)"
        )
    worker = await starting.value
    pushed = {"title": "Agent", "text": "It asks.", "url": f"{service.url}/link#x", "key": "k"}

    shown = await worker.evaluate(
        """(pushed) => {
          const shown = [];
          self.registration.showNotification = (title, more) => shown.push([title, more]);
          const event = new PushEvent("push", { data: JSON.stringify(pushed) });
          event.waitUntil = () => {};
          self.dispatchEvent(event);
          return shown;
        }""",
        pushed,
    )

    more = {"body": "It asks.", "tag": "k", "data": {"url": f"{service.url}/link#x"}}
    assert shown == [["Agent", more]]
