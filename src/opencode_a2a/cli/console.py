"""``console``: open the web console in the browser, signed in.

The token is exchanged for a single-use code, so that no lasting secret gets into the list of
processes, the history of a browser or a photo of the QR code.
"""

import os
import sys

import click

from opencode_a2a.cli.call import WORDS


@click.command()
@click.argument("url", type=WORDS, required=False)
@click.option("--print", "only_print", is_flag=True, help="Print the link instead of opening it.")
@click.option("--qr", is_flag=True, help="Show the link as a QR code, for a phone.")
def console(url: str | None, only_print: bool, qr: bool) -> None:
    """Open the console of the service at URL, signed in.

    The default URL is A2A_CLIENT_URL, or your running service on this machine. The credential is
    found as in `call`. The link works once, within a minute.
    """
    link, address = sign_in_link(url)
    if qr:
        show_code(link)
    elif only_print or not open_browser(link):
        click.echo(link)
    else:
        click.echo(f"The console is open in the browser: {address}", err=True)


def sign_in_link(url: str | None) -> tuple[str, str]:
    """Return a link that signs in once, and the address of the console itself."""
    import httpx2

    from opencode_a2a.cli.talk import find
    from opencode_a2a.net.egress import tls_trouble
    from opencode_a2a.printable import one_line

    target = find(url.rstrip("/").removesuffix("/console") if url else None)
    base = target.url.rstrip("/")
    headers = target.credential.headers(base) if target.credential else {}
    try:
        with httpx2.Client(timeout=10, trust_env=False, verify=target.tls) as http:
            answer = http.post(f"{base}/console/codes", headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        trouble = "cannot be reached; check the address, and whether the service is running"
        reason = f"{one_line(base)} {tls_trouble(error) or trouble}"
        raise click.ClickException(reason) from error
    if answer.status_code == 401:
        raise click.ClickException(
            f"{one_line(base)} requires a token: set A2A_CLIENT_BEARER_TOKEN or "
            "A2A_CLIENT_BASIC_AUTH, or run this as the user who started the service"
        )
    try:
        answer.raise_for_status()
        code = str(answer.json()["code"])
    except (httpx2.HTTPStatusError, ValueError, KeyError, TypeError) as error:
        raise click.ClickException(f"{one_line(base)} has no console") from error
    if not code.isalnum() and not code.replace("-", "").replace("_", "").isalnum():
        raise click.ClickException(f"{one_line(base)} has no console")
    return f"{base}/console#code={code}", f"{base}/console"


def open_browser(link: str) -> bool:
    """Open a link in a graphical browser; False if there is none."""
    import webbrowser

    windows = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    if sys.platform.startswith("linux") and not windows:
        return False  # a text browser would take over this terminal
    try:
        return webbrowser.open(link)
    except webbrowser.Error:
        return False


def show_code(link: str) -> None:
    """Print the link as a QR code that a camera can read from the screen."""
    from urllib.parse import urlsplit

    import segno

    from opencode_a2a.config import loopback

    if loopback(urlsplit(link).hostname or ""):
        raise click.ClickException(
            "a phone cannot reach this machine's loopback address; start the service with "
            "--host and --a2a-public-url, and name its public URL here"
        )
    segno.make_qr(link, error="l").terminal(out=sys.stdout, border=2, compact=True)
    click.echo("Scan within a minute; the code works once.", err=True)


def open_console_of(url: str) -> None:
    """Open the console of a service that has just started, signed in if possible."""
    try:
        link, _ = sign_in_link(url)
    except click.ClickException:
        link = f"{url}/console"
    if not open_browser(link):
        click.echo(f"Open the console: {link}", err=True)
