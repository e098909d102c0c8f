"""The table of other people's clients is what the last run of `make clients` saw."""

from tests.clients.matrix import CLIENTS, SCENES, TABLE, judge, load, table


def test_every_client_was_run_and_shows_what_it_should_or_a_fault_that_is_named() -> None:
    seen, expected = load()

    assert {client.id: tuple(seen[client.id]) for client in CLIENTS} == {
        client.id: SCENES for client in CLIENTS
    }
    assert list(judge(seen, expected)) == []


def test_the_table_is_written_by_the_run() -> None:
    assert TABLE.read_text() == "\n".join(table(*load())) + "\n"
