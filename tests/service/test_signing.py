"""A signed card of the running program, and the commands that want one."""

from pathlib import Path

import pytest

from tests.support.certificates import private_key
from tests.support.opencode import FakeOpenCode
from tests.support.program import Program, run
from tests.support.service import TOKEN, variables_for

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_command_calls_only_an_agent_whose_card_is_proven(
    opencode: FakeOpenCode, tmp_path: Path
) -> None:
    key = private_key(tmp_path / "signing.pem")
    state, client = tmp_path / "state", {"A2A_CLIENT_BEARER_TOKEN": TOKEN}
    signed = variables_for(opencode, state, A2A_SIGNING_KEY_FILE=str(key), A2A_LOG_LEVEL="INFO")
    async with Program(signed) as program:
        published = await program.http.get("/.well-known/jwks.json", headers={"Authorization": ""})
        keys, others = tmp_path / "keys.json", tmp_path / "others.json"
        keys.write_bytes(published.content)
        others.write_text('{"keys": []}')

        options = ("--verify-card", "--card-keys", str(keys))
        status, said = await run("call", program.url, "hello", *options, **client)
        assert status == 0, said
        status, said = await run("call", program.url, "hello", "--verify-card", **client)
        assert (status, "its own origin" in said) == (0, True), said

        before = len(program.lines)
        status, said = await run("call", program.url, "hi", "--card-keys", str(others), **client)
        assert (status, "is not proven: no signature is by a key" in said) == (1, True), said
        await program.stop()
        asked = [r for r in program.records()[before:] if r["event"] == "request"]
        assert asked
        assert all(record["principal"] is None for record in asked)

        del program.variables["A2A_SIGNING_KEY_FILE"]
        await program.start()
        status, said = await run("call", program.url, "hello", "--verify-card", **client)
        assert (status, "it is not signed" in said) == (1, True), said
