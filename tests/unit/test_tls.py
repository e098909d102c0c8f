"""The certificate of the service: which files are taken, and when it expires."""

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from opencode_a2a.config import SettingsError, TlsSettings, load
from opencode_a2a.metrics import exposition
from opencode_a2a.web import tls
from opencode_a2a.web.tls import ServerTls, read_pair
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_the_end_of_a_certificate_is_known(authority: Authority) -> None:
    # From 2050 on, a certificate writes its dates in another form.
    for days in (-0.5, 30, 36500):
        certificate, key = authority.issue("one", days=days)

        _, expires = read_pair(TlsSettings(cert_file=certificate, key_file=key))

        wanted = datetime.now(UTC) + timedelta(days=days)
        assert abs(expires - wanted) < timedelta(minutes=5)


def test_key_and_certificate_may_share_a_file(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("one")
    both = tmp_path / "both.pem"
    both.touch(0o600)
    both.write_text(key.read_text() + certificate.read_text())

    _, expires = read_pair(TlsSettings(cert_file=both))

    assert expires > datetime.now(UTC)


def test_a_key_with_a_password_is_opened_with_it(authority: Authority) -> None:
    given, wrong = "of-this-key", "of-another-key"
    certificate, key = authority.issue("one", password=given)
    files = {"A2A_TLS_CERT_FILE": str(certificate), "A2A_TLS_KEY_FILE": str(key)}

    read_pair(load({}, {**files, "A2A_TLS_KEY_PASSWORD": given}).tls)
    for more in ({}, {"A2A_TLS_KEY_PASSWORD": wrong}):
        with pytest.raises(SettingsError, match="A2A_TLS_KEY_PASSWORD") as raised:
            read_pair(load({}, {**files, **more}).tls)
        assert wrong not in str(raised.value)


def test_files_that_cannot_be_used_are_named_with_the_remedy(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("one")
    _, other = authority.issue("other")
    everybody, cut, nowhere = tmp_path / "open.key", tmp_path / "cut.crt", tmp_path / "nowhere"
    shutil.copy(key, everybody)
    everybody.chmod(0o644)
    cut.write_text(certificate.read_text()[:200] + "\n-----END CERTIFICATE-----\n")
    wrong = [
        (nowhere, key, None, "A2A_TLS_CERT_FILE: cannot read"),
        (key, key, None, "A2A_TLS_CERT_FILE: .* holds no certificate"),
        (cut, key, None, "A2A_TLS_CERT_FILE: .* holds no certificate"),
        (certificate, nowhere, None, "A2A_TLS_KEY_FILE: cannot read"),
        (certificate, other, None, "does not belong to"),
        (certificate, everybody, None, "chmod"),
        (certificate, key, key, "A2A_TLS_CLIENT_CA_FILE: .* holds no certificate"),
        (certificate, key, nowhere, "A2A_TLS_CLIENT_CA_FILE: cannot read"),
    ]
    for cert_file, key_file, ca, text in wrong:
        settings = TlsSettings(cert_file=cert_file, key_file=key_file, client_ca_file=ca)
        with pytest.raises(SettingsError, match=text):
            read_pair(settings)


def test_the_other_settings_need_a_certificate() -> None:
    with pytest.raises(SettingsError, match="should come with A2A_TLS_CERT_FILE"):
        load({}, {"A2A_TLS_KEY_FILE": "/some.key"})


async def test_files_that_change_are_noticed_and_a_bad_pair_is_not_taken(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.01)
    certificate, key = authority.issue("one", days=100)
    served = ServerTls(TlsSettings(cert_file=certificate, key_file=key))
    before = served.expires

    async def until(wanted: int) -> None:
        async with asyncio.timeout(60):
            while f"a2a_certificate_days_left {wanted}.0\n" not in exposition().decode():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)

    watching = asyncio.create_task(served.reload_if_changed())
    try:
        await until(100)
        # The certificate first, as some tools do it: for a moment the two do not fit.
        newer, newer_key = authority.issue("two", days=200)
        with capture_logs() as records:
            shutil.copy(newer, certificate)
            async with asyncio.timeout(60):
                while not any(one["log_level"] == "error" for one in records):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
        assert served.expires == before
        shutil.copy(newer_key, key)
        await until(200)
        # One that has expired is of no use, as long as the present one has not.
        late, late_key = authority.issue("three", days=-1)
        with capture_logs() as records:
            shutil.copy(late_key, key)
            shutil.copy(late, certificate)
            async with asyncio.timeout(60):
                while not any("expired at" in one.get("cause", "") for one in records):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
        await until(200)
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def test_only_an_address_of_others_promises_https_for_the_future(authority: Authority) -> None:
    public = load({}, {"A2A_TLS_CERT_FILE": "/x.crt", "A2A_PORT": "8443"})

    assert public.public_url == public.local_url == "https://127.0.0.1:8443"
    plain = load({}, {"A2A_TLS_CERT_FILE": "/x.crt", "A2A_PUBLIC_URL": "http://agent.example"})
    assert any("A2A_PUBLIC_URL: begins with http:" in warning for warning in plain.warnings)
