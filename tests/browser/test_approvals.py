"""What a person sees of a request in the console before it can be allowed."""

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from opencode_a2a.printable import visible
from tests.browser.cases import CASES, Case, asking
from tests.browser.conftest import DESKTOP, PHONE, Look, check
from tests.support.asking import AskingOpenCode
from tests.support.service import Running, message, serving, settings_for

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

OUTSIDE = """(card) => {
  const texts = document.createTreeWalker(card, NodeFilter.SHOW_TEXT);
  const range = document.createRange(), out = [], place = card.getBoundingClientRect();
  const [left, right] = [Math.max(place.left, 0), Math.min(place.right, innerWidth) + 0.5];
  while (texts.nextNode()) {
    if (texts.currentNode.parentElement.closest(".sr, [hidden]")) continue;
    range.selectNodeContents(texts.currentNode);
    for (const box of range.getClientRects())
      if (box.left < left || box.right > right) out.push(texts.currentNode.data);
  }
  const cut = (one) => one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight;
  const inside = [...card.querySelectorAll(".subject, .subject *, code")];
  const hiding = inside.filter((one) => one.clientWidth && cut(one));
  return [...out, ...hiding.map((one) => one.outerHTML)];
}"""
"""The texts of a card that are drawn beside it or the screen, and its elements that hide a part."""
ODD_TEXTS = (
    *("\n" * 20, "a" + "\n" * 21 + "b", "\n \t" * 30 + "\n"),
    *("o" + "\u0300" * 4, "o" + "\u0300\u0e47" * 3),
    *(
        "\u0440ayp\u0430l",
        "https://\u0430\u0440\u0440\u04cf\u0435.com",
        "src/\u0441\u043e\u0440.py",
    ),
    *("src/Файл.py", "\u041e\u0441\u0430, \u0430 я и она.", "x-\u0430-y", "\u03bf1", "1\u03bfπ"),
)
SEEN = """(card) => {
  const { top, bottom } = card.closest(".scroller, main").getBoundingClientRect();
  const boxes = [...card.querySelectorAll("h3, .end")].map((one) => one.getBoundingClientRect());
  return boxes.map((box) => box.top >= top && box.bottom <= bottom);
}"""
"""Whether beginning and end of a request are on the screen now."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opencode(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[AskingOpenCode]:
    made = asking(tmp_path_factory.mktemp("workspace"))
    async with made.running():
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    opencode: AskingOpenCode, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Running]:
    async with serving(settings_for(opencode, tmp_path_factory.mktemp("state"))) as running:
        yield running


async def ask(service: Running, name: str) -> Any:
    """Have OpenCode ask for something, and return the task that waits."""
    answer = await service.http.post(
        "/message:send", json=message(name), headers={"A2A-Version": "1.0"}
    )
    return answer.raise_for_status().json()["task"]


@pytest.mark.parametrize("name", CASES)
async def test_what_is_allowed_was_on_the_screen(
    look: Look, service: Running, opencode: AskingOpenCode, name: str
) -> None:
    case, task = CASES[name], await ask(service, name)
    page = await look(f"{service.url}/console#/task/{task['id']}", size=PHONE)
    card = page.locator(".ask")
    allow = card.get_by_role("button", name="Allow once")
    await expect(allow).to_be_visible()

    for size in (PHONE, DESKTOP):
        await page.set_viewport_size({"width": size[0], "height": size[1]})
        text = await card.inner_text()
        assert [one for one in (*case.shows, *case.grants) if one not in text] == []
        assert [one for one in case.hides if one in text] == []
        assert await card.evaluate(OUTSIDE) == []
    await read_to_the_end(page, card, case)
    await grant(card, case)
    await allow.click()

    await expect(page.locator(".bar .state")).to_have_text("completed")
    await expect(page.locator(".asked .settled")).to_contain_text("Allowed once")


async def read_to_the_end(page: Page, card: Locator, case: Case) -> None:
    """Nothing can be allowed before the end was on the screen; then it can, without a click."""
    await page.clock.install()
    await page.reload()
    allow = card.get_by_role("button", name="Allow once")
    await expect(allow).to_be_visible()
    if case.long:
        await expect(card.get_by_role("button", name="Show the rest")).to_be_visible()
        assert await card.evaluate(SEEN) == [True, False]
        await expect(allow).to_be_disabled()
        await card.focus()
        await page.keyboard.press("a")
        await expect(card.get_by_role("button", name="Deny…")).to_be_enabled()
        await page.keyboard.press("End")
        await expect(card.get_by_role("button", name="Show the rest")).to_be_hidden()
    await page.clock.fast_forward(1000)  # in which no click counts
    await expect(allow).to_be_enabled()
    assert await page.evaluate("document.documentElement.scrollTop") == 0


async def grant(card: Locator, case: Case) -> None:
    """What a broader answer allows is said, and asked again if that is nearly everything."""
    if any("A symbolic link leads" in one for one in case.shows):
        await expect(card.locator(".wider")).to_have_count(0)
        return
    said = await card.locator(".wider > .note").inner_text()
    every = f"every use of {case.asked.permission}"
    commands = case.asked.permission == "bash"
    wanted = [every] if "*" in case.asked.always and not commands else [*case.asked.always]
    if case.exact:
        wanted = ["exactly this command"]
    elif commands:
        wanted.append("plain commands")
    assert [one for one in wanted if one not in said] == []
    if workdir := case.asked.input.get("workdir"):
        assert f"{workdir} (no redirection" in said
    if case.wide:
        broader = card.get_by_role("button", name="Allow for this task", exact=True)
        await broader.click()
        again = card.get_by_role("group", name="Are you sure?")
        await expect(again).to_contain_text("This is broad.")
        await again.get_by_role("button", name="Back").click()
        await expect(broader).to_be_focused()


async def test_the_name_of_a_sub_agent_does_not_speak_for_the_console(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")
    title = "a”. OpenCode has checked this: harmless. “b\u202e"

    told = await page.evaluate(
        """async (title) => {
          const { askCard } = await import("./console/ask.js");
          const details = { permission: "bash", origin: { type: "sub-agent", title } };
          const card = askCard({ type: "permission", request_id: "r", details });
          return [...card.querySelectorAll(".note code")].map((one) => one.textContent);
        }""",
        title,
    )

    assert told == [visible(title)]


async def test_how_a_request_was_settled_is_told_with_scope_and_reason(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")
    ends = [
        {"resolution": "once"},
        {"resolution": "once", "scope": "task"},
        {"resolution": "once", "scope": "context", "by": "bob"},
        {"resolution": "rejected", "by": "bob", "reason": "not on Fridays"},
    ]

    told = await page.evaluate(
        """async (ends) => {
          const { settled } = await import("./console/ask.js");
          return ends.map((end) => settled(null, end).textContent);
        }""",
        ends,
    )

    assert told == [
        "Allowed once",
        "Allowed for this task",
        "Allowed for this conversation by bob",
        "Denied by bob: not on Fridays",
    ]


@pytest.mark.requirement("I24")
async def test_a_person_is_told_that_always_is_for_every_directory(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")

    told = await page.evaluate(
        """async () => {
          const { askCard } = await import("./console/ask.js");
          const tool = { name: "bash", input: { command: "make", workdir: "out" } };
          return [[], ["task"]].map((scopes) => {
            const replies = ["always"], always = ["make *"], scope_text = "exactly this command";
            const details = { permission: "bash", always, replies, scopes, scope_text, tool };
            const card = askCard({ type: "permission", request_id: "r", details });
            return card.querySelector(".wider").textContent;
          });
        }"""
    )

    everywhere = "holds for everybody who uses this service, in every directory."
    assert [everywhere in one for one in told] == [True, True]
    assert ["“Always allow” allows make *" in one for one in told] == [True, True]
    assert ["without asking: exactly this command. " in one for one in told] == [False, True]


@pytest.mark.requirement("I24")
async def test_a_person_is_told_that_it_could_not_be_found_out_where_files_are(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")

    told = await page.evaluate(
        """async () => {
          const { subject } = await import("./console/subject.js");
          return subject({ permission: "edit", patterns: ["a"], links_unknown: true }).textContent;
        }"""
    )

    assert told.endswith("Where these files really are could not be found out.")


async def test_a_person_is_told_where_the_agent_does_not_read_the_reason(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")

    told = await page.evaluate(
        """async () => {
          const { askCard } = await import("./console/ask.js");
          return [{}, { tells_reason: false }].map((more) => {
            const details = { permission: "bash", ...more };
            const card = askCard({ type: "permission", request_id: "r", details });
            return card.querySelector(".reason input").placeholder;
          });
        }"""
    )

    assert told == [
        "Why not? The agent reads this (optional)",
        "Why not? Kept here; the agent is not told (optional)",
    ]


@pytest.mark.requirement("I23")
async def test_a_click_for_a_request_that_has_gone_does_not_allow_the_next(
    look: Look, service: Running
) -> None:
    tasks = [await ask(service, "another directory and a long time") for _ in range(2)]
    page = await look(f"{service.url}/console#/prompts")
    await page.clock.install()  # however busy the machine is
    await page.reload()
    allow = page.get_by_role("button", name="Allow once")
    await expect(allow).to_have_count(2)
    await allow.first.scroll_into_view_if_needed()
    await expect(page.locator(".ask [inert]")).to_have_count(0)
    at = await middle(allow.first)
    await page.clock.pause_at(datetime.now(UTC) + timedelta(seconds=30))

    await page.mouse.click(*at)
    await expect(allow).to_have_count(1)
    await expect(allow).to_be_enabled()
    await page.clock.run_for(900)
    await page.mouse.click(*at)  # an impatient person

    place = await allow.bounding_box()
    assert place is not None
    assert place["y"] < at[1] < place["y"] + place["height"]  # where the first one stood
    assert sorted([await state_of(service, task) for task in tasks]) == [
        "TASK_STATE_COMPLETED",
        "TASK_STATE_INPUT_REQUIRED",
    ]
    await page.clock.resume()
    await allow.click()
    await expect(page.get_by_text("Nothing waits for you.")).to_be_visible()
    assert {await state_of(service, task) for task in tasks} == {"TASK_STATE_COMPLETED"}


async def middle(button: Locator) -> tuple[float, float]:
    place = await button.bounding_box()
    assert place is not None
    return place["x"] + place["width"] / 2, place["y"] + place["height"] / 2


async def state_of(service: Running, task: Any) -> str:
    answer = await service.http.get(f"/tasks/{task['id']}", headers={"A2A-Version": "1.0"})
    return answer.raise_for_status().json()["status"]["state"]


async def test_the_rule_for_what_nobody_sees_is_that_of_the_terminal(
    look: Look, service: Running
) -> None:
    page = await look(f"{service.url}/console")

    named = await page.evaluate(
        """async () => {
          const { visible } = await import("./console/odd.js");
          const is = (text) => visible(text) !== text;
          return [...Array(0x110000).keys()].filter((point) => is(String.fromCodePoint(point)));
        }"""
    )

    assert named == [point for point in range(0x110000) if visible(chr(point)) != chr(point)]
    for text in (
        "a" + " " * 39,
        "a" + " " * 40,
        "\t" * 41 + "b",
        "\U000e0041 ⟨U+202E⟩",
        *ODD_TEXTS,
    ):
        script = f"import('./console/odd.js').then(({{ visible }}) => visible({json.dumps(text)}))"
        assert await page.evaluate(script) == visible(text)


async def test_markdown_becomes_nodes_and_nothing_else(look: Look, service: Running) -> None:
    page = await look(f"{service.url}/console")
    texts = {
        "a *b* **c** ~~d~~ `e&amp;` &amp; &#65; \\*": (
            "<p>a <em>b</em> <strong>c</strong> <del>d</del> <code>e&amp;amp;</code> &amp; A *</p>"
        ),
        "&#x202e; &#8203; &amp;#x202e; &lt;": "<p>⟨U+202E⟩ ⟨U+200B⟩ &amp;#x202e; &lt;</p>",
        "[a][b]\n\n[b]: https://x.example 'c'": (
            '<p><a href="https://x.example" target="_blank" rel="noopener noreferrer"'
            ' data-to="https://x.example">a</a> “c”</p>'
            "<p class=\"raw\">[b]: https://x.example 'c'</p>"
        ),
        "# one\n\nTwo\n---": "<h3>one</h3><h4>Two</h4>",
        "1. a\n2. b\n   - c\n   - [x] d": (
            "<ol><li>a</li><li>b<ul><li>c</li><li>☑ d</li></ul></li></ol>"
        ),
        "> q\n> r\n\n***": "<blockquote><p>q\nr</p></blockquote><hr>",
        "<b>x</b> ![i](https://x.example/i.png)": (
            '<p>&lt;b&gt;x&lt;/b&gt; <a href="https://x.example/i.png" target="_blank"'
            ' rel="noopener noreferrer" data-to="https://x.example/i.png">i</a></p>'
        ),
        "[a](javascript:1) [b](data:x)": "<p>a (javascript:1) b (data:x)</p>",
        "<script>\nx\n</script>": '<p class="raw">&lt;script&gt;\nx\n&lt;/script&gt;</p>',
        ">" * 20_000: f'<p class="raw">{"&gt;" * 20_000}</p>',
    }

    made = await page.evaluate(
        """async (texts) => {
          const { markdown } = await import("./console/markdown.js");
          return texts.map((text) => markdown(text).map((one) => one.outerHTML).join(""));
        }""",
        [*texts],
    )
    code = await page.evaluate(
        """async () => {
          const { blocks } = await import("./console/markdown.js");
          const found = blocks("a\\n\\n```py\\nx = 1\\n```\\n\\nb");
          return found.map(({ node, at }) => [node.innerText || node.textContent, at]);
        }"""
    )

    assert made == [*texts.values()]
    assert code == [["a", 0], ["pyCopyx = 1", 3], ["b", 20]]


async def test_axe_finds_nothing_where_requests_wait(look: Look, service: Running) -> None:
    names = ("right to left", "shells among the grants", "sub-agent", "comments of SQL")
    tasks = [await ask(service, name) for name in (*names, names[0])]
    page = await look(f"{service.url}/console#/prompts")
    await expect(page.locator(".ask")).to_have_count(len(tasks))
    for task, name in zip(tasks, names, strict=False):
        card = page.get_by_role("region", name=name)
        await expect(card.first.get_by_role("link", name=name)).to_be_visible()
        assert await page.locator(f"main a[href='#/task/{task['id']}']").count() == 1

    await check(page, "what waits")
    wide = page.get_by_role("region", name=names[1])
    await wide.scroll_into_view_if_needed()
    await wide.get_by_role("button", name="Allow for this task").click()
    await expect(wide.get_by_role("group", name="Are you sure?")).to_be_visible()
    await check(page, "asked again")
    for task in tasks:
        await service.http.post(f"/tasks/{task['id']}:cancel", headers={"A2A-Version": "1.0"})
