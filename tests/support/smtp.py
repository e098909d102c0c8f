"""A mail server that takes what it is given, after a login."""

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from email import message_from_bytes
from email.message import Message

PATIENCE = 60.0


class MailServer:
    def __init__(self) -> None:
        self.port = 0
        self.logins: list[tuple[str, str]] = []
        self.mails: list[tuple[list[str], Message]] = []
        """The recipients of each mail, and the mail."""
        self.confirms = True
        """Whether it says that it has taken a mail."""
        self.parting = "221 bye"
        self._arrived = asyncio.Condition()
        self.talks: set[asyncio.StreamWriter] = set()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.talks.add(writer)
        recipients: list[str] = []

        async def say(line: str) -> None:
            writer.write(f"{line}\r\n".encode())
            await writer.drain()

        await say("220 mail.test ready")
        while line := (await reader.readline()).decode().strip():
            match line.split(" ", 2):
                case ["ehlo" | "EHLO", *_]:
                    await say("250-mail.test")
                    await say("250 AUTH PLAIN")
                case ["AUTH", "PLAIN", secret]:
                    _, user, password = base64.b64decode(secret).decode().split("\0")
                    self.logins.append((user, password))
                    await say("235 welcome")
                case ["rcpt" | "RCPT", to, *_]:
                    recipients.append(to.partition(":")[2].strip("<>"))
                    await say("250 ok")
                case ["data" | "DATA", *_]:
                    await say("354 go on")
                    mail = await reader.readuntil(b"\r\n.\r\n")
                    async with self._arrived:
                        self.mails.append((recipients, message_from_bytes(mail[:-5])))
                        self._arrived.notify_all()
                    recipients = []
                    if self.confirms:
                        await say("250 taken")
                case ["quit" | "QUIT", *_]:
                    await say(self.parting)
                    break
                case _:
                    await say("250 ok")
        writer.close()

    async def until(self, count: int) -> list[tuple[list[str], Message]]:
        async with asyncio.timeout(PATIENCE), self._arrived:
            await self._arrived.wait_for(lambda: len(self.mails) >= count)
        return self.mails


@asynccontextmanager
async def mail_server() -> AsyncGenerator[MailServer]:
    made = MailServer()
    server = await asyncio.start_server(made.talk, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made
        for talk in made.talks:
            talk.close()
        await asyncio.gather(*(talk.wait_closed() for talk in made.talks), return_exceptions=True)
