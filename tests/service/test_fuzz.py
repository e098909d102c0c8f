"""A short run of ``make fuzz``: no bad input breaks the service, or makes it tell too much."""

from pathlib import Path

import pytest

from tools.fuzz import errors_in, fuzz


@pytest.mark.requirement("I9")
async def test_mutated_requests_are_refused_in_an_orderly_way(tmp_path: Path) -> None:
    report = await fuzz(seed=1, count=2000, state=tmp_path)

    assert report.failures == {}
    assert report.statuses[200] > 500  # most of them got through to what they were for


def test_only_what_an_error_says_is_judged_as_one() -> None:
    shown = '{"result": {"metadata": {"error": {}, "directory": "/secret"}}}'
    refused = '{"error": {"message": "no"}}'

    assert errors_in(200, shown) == ""
    assert errors_in(200, f"id: 1\ndata: {shown}\n\ndata: {refused}\n\n") == f"data: {refused}"
    assert errors_in(404, "not there") == "not there"
