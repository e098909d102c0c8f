"""``console``: open the web console in the browser, signed in.

The token is exchanged for a code of one use here, so that no lasting secret gets into the list of
processes or into the history of a browser.
"""

import os

import click


@click.command()
@click.argument("url", required=False)
@click.option("--print", "only_print", is_flag=True, help="Print the link instead of opening it.")
def console(url: str | None, only_print: bool) -> None:
    """Open the console of the service at URL, signed in.

    Without URL it is that of the one service of yours that runs on this machine. The credential is
    found as for `call`. The link works once, within a minute.
    """
    import webbrowser
    from contextlib import suppress

    import httpx2

    from opencode_a2a.announcement import running
    from opencode_a2a.config import SettingsError, load_for_calls
    from opencode_a2a.peers.client import configured_credential
    from opencode_a2a.peers.network import OriginCredential, origin
    from opencode_a2a.printable import one_line

    try:
        settings = load_for_calls(os.environ)
    except SettingsError as error:
        raise click.UsageError("; ".join(map(str, error.problems))) from error
    services = sorted(running(settings.a2a.state_dir))
    if url is None:
        if len(services) != 1:
            found = f"several run: {', '.join(services)}" if services else "none of yours runs here"
            raise click.UsageError(f"name the URL of the service; {found}")
        url = services[0]
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/console")
    try:
        credential = configured_credential(url, settings.client)
        if credential is None and origin(url) in map(origin, services):
            with suppress(OSError):  # without a token the service says what is missing
                token = (settings.a2a.state_dir / "token").read_text().strip()
                credential = OriginCredential.bearer(url, token)
        headers = credential.headers(url) if credential else {}
        with httpx2.Client(timeout=10, trust_env=False) as http:
            answer = http.post(f"{url}/console/codes", headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        reason = f"{one_line(url)} cannot be reached; check the address, and that the service runs"
        raise click.ClickException(reason) from error
    if answer.status_code == 401:
        raise click.ClickException(
            f"{one_line(url)} requires a token: set A2A_CLIENT_BEARER_TOKEN or "
            "A2A_CLIENT_BASIC_AUTH, or run this as the user who started the service"
        )
    try:
        answer.raise_for_status()
        link = f"{url}/console#code={answer.json()['code']}"
    except (httpx2.HTTPStatusError, ValueError, KeyError) as error:
        raise click.ClickException(f"{one_line(url)} has no console") from error
    if only_print or not webbrowser.open(link):
        click.echo(link)
    else:
        click.echo(f"The console is open in the browser: {url}/console", err=True)
