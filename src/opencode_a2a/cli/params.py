"""Arguments that are sent to an agent."""

import click


class Words(click.ParamType[str]):
    """Text that can be sent: bytes of another encoding are refused instead of breaking the call."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail("should be valid UTF-8", param, ctx)
        return value


WORDS = Words()
