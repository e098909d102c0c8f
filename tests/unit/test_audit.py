"""The audit file: what happens to records when it cannot be written."""

import errno
import os
from pathlib import Path

import pytest

from opencode_a2a import audit
from opencode_a2a.audit import AuditFile
from opencode_a2a.config import SettingsError, load
from opencode_a2a.metrics import exposition


def lost() -> float:
    line = next(x for x in exposition().decode().splitlines() if x.startswith("a2a_audit_lost_t"))
    return float(line.split()[1])


def test_a_full_disk_sends_records_to_the_log_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead: list[str] = []
    file = AuditFile(tmp_path / "audit", instead.append)
    before, written = lost(), os.write
    room = iter([3, 0, 1_000, 1_000])

    def write(descriptor: int, data: bytes) -> int:
        if not (most := next(room)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(descriptor, data[:most])

    monkeypatch.setattr(audit.os, "write", write)
    for line in ('{"n":1}', '{"n":2}', '{"n":3}'):
        assert file.take(line)
    file.close()

    # The first was cut off; what comes later is whole, on lines of its own.
    assert (tmp_path / "audit").read_text() == '{"n\n{"n":2}\n{"n":3}\n'
    assert instead[0] == '{"n":1}'
    assert "No space left" in instead[1]
    assert lost() - before == 1


def test_more_records_than_can_wait_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "WAITING", 2)

    def never(_: object) -> None: ...

    monkeypatch.setattr(audit.threading.Thread, "start", never)
    file, before = AuditFile(tmp_path / "audit", print), lost()

    assert [file.take("{}") for _ in range(3)] == [True, True, False]
    assert lost() - before == 1


def test_a_place_that_is_no_file_of_its_own_is_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for place in (link, tmp_path, tmp_path / "none" / "file", tmp_path / "pipe"):
        with pytest.raises(SettingsError, match="A2A_AUDIT_FILE: cannot append"):
            AuditFile(place, print)
    assert not target.exists()


def test_the_agent_cannot_reach_the_file(tmp_path: Path) -> None:
    inside = {"A2A_AUDIT_FILE": str(tmp_path / "audit"), "OPENCODE_WORKSPACE_ROOT": str(tmp_path)}

    with pytest.raises(SettingsError, match=r"A2A_AUDIT_FILE: .* is in the workspace"):
        load({}, inside)
