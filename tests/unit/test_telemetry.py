"""Log records: their form, their ids, and what they do not tell."""

import io
import json
import logging
import re
import time
from collections.abc import Iterator

import pytest
import structlog

from opencode_a2a.telemetry import (
    AUDIT,
    configure,
    mask_text,
    mask_url,
    redact,
    secret_key,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction] - used by pytest
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_line_of_json_with_its_ids() -> None:
    stream = io.StringIO()
    configure("INFO", stream)

    with structlog.contextvars.bound_contextvars(request_id="r1", task_id="t1"):
        structlog.get_logger().info("turn ended", seconds=2)

    [record] = records(stream)
    assert record.pop("timestamp")
    assert record == {
        "event": "turn ended",
        "level": "info",
        "request_id": "r1",
        "task_id": "t1",
        "seconds": 2,
    }


def test_records_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    configure("WARNING", stream)

    structlog.get_logger().info("quiet")
    logging.getLogger("library").info("quiet")

    assert records(stream) == []


def test_records_of_libraries_take_the_same_way() -> None:
    stream = io.StringIO()
    configure("INFO", stream)

    logging.getLogger("library").warning("calling %s", "https://user:geheim@host/")

    [record] = records(stream)
    assert (record["logger"], record["level"]) == ("library", "warning")
    assert record["event"] == "calling https://user:********@host/"


def test_an_exception_is_told_without_its_secrets() -> None:
    stream = io.StringIO()
    configure("INFO", stream)

    try:
        raise ValueError("postgresql://user:geheim@host/db")
    except ValueError:
        structlog.get_logger().exception("no database")

    [record] = records(stream)
    assert "ValueError" in str(record["exception"])
    assert "geheim" not in stream.getvalue()


EVIL = "ok\x1b[2J\x9b\u202e\U000e0041\nforged line"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_what_others_say_cannot_steer_the_terminal_of_who_reads_the_log(
    stream: io.StringIO,
) -> None:
    configure("INFO", stream)

    structlog.get_logger().info("peer said", error=EVIL, listed=[EVIL])
    logging.getLogger("library").warning("it said %s", EVIL)
    try:
        raise ValueError(EVIL)
    except ValueError:
        structlog.get_logger().exception("failed")

    printed = re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue())  # our own colours
    assert not any(c in printed for c in "\x1b\x9b\u202e\U000e0041")
    assert [line for line in printed.splitlines() if line.startswith("forged")] == (
        ["forged line"] if stream.isatty() else []
    )


def test_a_terminal_has_a_line_for_what_happens_to_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "90")
    stream = Terminal()
    configure(None, stream)
    log = structlog.get_logger().bind(task_id="860c0515-2345")

    log.info("task started", title="run the\ntests", principal="ann")
    log.info("task asks", what="bash: make test", until=0)
    log.info("request", route="/", status=200)
    AUDIT.info(
        "interrupt settled",
        task_id="860c0515-2345",
        permission="bash",
        patterns=["make test"],
        resolution="once",
        by="ann",
    )
    AUDIT.info(
        "interrupt settled",
        task_id="860c0515-2345",
        permission="bash",
        patterns=[],
        resolution="once",
        by="ann",
    )
    log.info(
        "task ended",
        state="completed",
        seconds=75,
        input_tokens=5200,
        output_tokens=279,
        cost=0.0058,
    )
    log.info("task ended", state="failed", seconds=0.2, reason="no such model")

    shown = [line.split(maxsplit=1)[1] for line in stream.getvalue().splitlines()]
    until = time.strftime("%H:%M", time.localtime(0))
    assert shown == [
        '860c0515  started     "run the tests"  ann',
        f"860c0515  asks        bash: make test  until {until}",
        "860c0515  allowed     bash: make test  by ann",
        "860c0515  allowed     bash: (could not be read)  by ann",
        "860c0515  completed   75 s · 5.2k in · 279 out · $0.0058",
        "860c0515  failed      0.2 s · no such model",
    ]


def test_a_log_file_has_no_words_of_callers() -> None:
    stream = io.StringIO()
    configure("INFO", stream)

    structlog.get_logger().info("task started", title="secret plans", what="bash: ls", task_id="t")

    [record] = records(stream)
    assert (record["event"], record["task_id"]) == ("task started", "t")
    assert "secret plans" not in stream.getvalue()


def test_a_terminal_gets_text_for_people() -> None:
    stream = Terminal()
    configure("INFO", stream)

    structlog.get_logger().info("turn ended", token="geheim")  # noqa: S106 - the case under test

    assert "turn ended" in stream.getvalue()
    assert "geheim" not in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(
    "name",
    [
        "Authorization",
        "proxy-authorization",
        "token",
        "accessToken",
        "bearer_token",
        "password",
        "client_secret",
        "apiKey",
        "api_key",
        "X-Api-Key",
        "Set-Cookie",
        "credentials",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert secret_key(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "inputTokens", "token_count", "tokens", "author", "key", "secretary"]
)
def test_names_of_figures_are_no_secrets(name: str) -> None:
    assert not secret_key(name)


def test_secrets_are_masked_at_any_depth() -> None:
    value = {"headers": [{"Authorization": "Basic abc", "accept": "*/*"}], "max_tokens": 5}

    assert redact(value) == {
        "headers": [{"Authorization": "********", "accept": "*/*"}],
        "max_tokens": 5,
    }


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("postgresql://u:p@ss@h/db", "postgresql://u:********@h/db"),
        ("postgresql://u:p:ss@h/db", "postgresql://u:********@h/db"),
        ("https://h/x?api_key=abc&page=2", "https://h/x?api_key=********&page=2"),
        ("sqlite:///./x.db", "sqlite:///./x.db"),
    ],
)
def test_a_url_is_told_without_its_secrets(url: str, masked: str) -> None:
    assert mask_url(url) == masked


def test_a_header_in_a_text_is_masked() -> None:
    assert mask_text("sent Bearer abcdef.ghi to them") == "sent Bearer ******** to them"
