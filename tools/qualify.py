"""Tries a version of OpenCode out (``make qualify VERSION=1.18.33``).

Installs it from npm into a directory of its own, runs the live tests below against it, and writes
its line into the table of ``docs/opencode.md``: of each area, how many tests passed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

from opencode_a2a.opencode.kinds import of_version, problem_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "opencode.md"
BEGIN, END = "<!-- written by make qualify -->\n", "<!-- end of the table -->\n"
AREAS: dict[str, dict[str, tuple[str, ...]]] = {
    "text": {
        "turns": (
            "a_blocking_send_returns_the_whole_answer",
            "the_texts_of_all_steps_are_told_with_a_blank_line_between",
            "a_long_text_arrives_whole",
        ),
        "sessions": ("a_context_continues_in_its_session",),
    },
    "streaming": {
        "turns": (
            "a_stream_tells_exactly_what_is_stored",
            "text_grows_word_by_word_before_the_model_has_ended",
        ),
    },
    "tools": {
        "turns": (
            "a_tool_call_shows_its_input_and_its_output",
            "live_output_of_a_running_tool_is_told",
            "a_failing_tool_is_told_as_an_error_and_the_turn_goes_on",
            "parallel_calls_keep_an_artifact_each",
            "a_sub_agent_is_one_tool_call_and_its_usage_is_counted_apart",
        ),
    },
    "permissions": {
        "interrupts": (
            "a_permission_is_put_to_a_person_with_all_that_it_is_about",
            "a_background_caller_finds_the_prompt_and_answers_by_data",
            "a_rejected_permission_ends_the_turn_and_says_so",
        ),
    },
    "questions": {
        "interrupts": (
            "a_question_is_answered_in_any_of_these_ways",
            "a_dismissed_question_ends_the_turn_as_rejected",
        ),
    },
    "cancel": {
        "failures": (
            "a_canceled_turn_keeps_its_text_and_its_session",
            "a_running_tool_is_stopped_by_a_cancel",
            "sub_agents_are_stopped_with_their_turn",
        ),
        "interrupts": ("canceling_leaves_nothing_pending",),
    },
    "methods": {
        "extensions_sessions": (
            "a_session_is_a_completed_task_in_the_spelling_of_the_line",
            "messages_keep_files_and_tools_and_are_paged",
            "a_prompt_runs_and_can_be_aborted",
            "sessions_are_made_changed_copied_and_deleted",
        ),
        "extensions_interrupts": (
            "a_permission_is_listed_and_allowed_by_method",
            "questions_are_answered_and_dismissed_by_method",
        ),
        "extensions_inspect": (
            "providers_and_models_are_told_without_keys",
            "agents_and_commands_are_listed",
            "files_are_listed_read_and_found",
        ),
    },
}


def install(version: str) -> Path:
    """Install a version, unless it is there already, and return its program."""
    place = ROOT / ".tools" / f"opencode-{version}"
    program = place / "node_modules" / ".bin" / "opencode"
    if not program.exists():
        place.mkdir(parents=True, exist_ok=True)
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel=error"]
        package = f"opencode-ai@{version}"
        subprocess.run(["npm", "install", "--prefix", place, *flags, package], check=True)  # noqa: S603, S607 - as the Makefile does
        scripts = place / "node_modules" / "opencode-ai"
        subprocess.run(["node", "postinstall.mjs"], cwd=scripts, check=True)  # noqa: S607
    return program


def tried(program: Path) -> dict[str, tuple[int, int]]:
    """Run the tests with a program; return for each area how many passed, and of how many."""
    wanted = [
        f"tests/live/test_{module}.py::test_{name}"
        for modules in AREAS.values()
        for module, names in modules.items()
        for name in names
    ]
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        flags = ["-q", "-p", "no:xdist", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        subprocess.run(  # noqa: S603 - our own tests
            [sys.executable, "-m", "pytest", *flags, *dict.fromkeys(wanted)],
            cwd=ROOT,
            env={**os.environ, "OPENCODE_UNDER_TEST": str(program)},
            check=False,
        )
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - pytest wrote it
    passed: dict[str, tuple[int, int]] = dict.fromkeys(AREAS, (0, 0))
    for case in cases:
        name = case.get("name", "").partition("[")[0].removeprefix("test_")
        module = case.get("classname", "").rpartition("test_")[2]
        for area, modules in AREAS.items():
            if name in modules.get(module, ()):
                good, count = passed[area]
                right = case.find("failure") is None and case.find("error") is None
                passed[area] = good + right, count + 1
    return passed


def write(version: str, passed: dict[str, tuple[int, int]]) -> None:
    """Put the version's line into the table, newest version first."""
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    rows = {row.split("|")[1].strip(): row for row in table.splitlines()[2:]}
    cells = [f"{good} of {count}" for good, count in passed.values()]
    day = datetime.now(UTC).date().isoformat()
    rows[version] = f"| {' | '.join([version, *cells, day])} |"
    ordered = sorted(rows, key=lambda v: [int(n) for n in re.findall(r"\d+", v)], reverse=True)
    head = f"| {' | '.join(['OpenCode', *AREAS, 'tried on'])} |"
    line = "|" + "---|" * (len(AREAS) + 2)
    lines = [head, line, *(rows[version] for version in ordered)]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def refused(version: str) -> bool:
    """Say why no version of this name can be tried; whether that is so."""
    why = problem_of(of_version(version))
    if why is not None:
        print(f"OpenCode {version} cannot be tried: {why.what}", file=sys.stderr)
    return why is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="of the npm package opencode-ai, such as 1.18.33")
    version: str = parser.parse_args().version
    if refused(version):
        return 2
    try:
        program = install(version)
        # A tag, or another package under this name, says only now what it is.
        printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)  # noqa: S603 - it was just installed
    except subprocess.CalledProcessError as error:
        print(f"OpenCode {version} cannot be tried: {error}", file=sys.stderr)
        return 2
    if refused(printed.stdout.strip()):
        return 2
    passed = tried(program)
    write(version, passed)
    failed = [area for area, (good, count) in passed.items() if good < count or not count]
    print(f"OpenCode {version}: " + (f"failed in {', '.join(failed)}" if failed else "qualified"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
