"""What the ``A2A_CLIENT_…`` settings mean for a call: the commands and the tool both ask here."""

from opencode_a2a.config import ClientSettings
from opencode_a2a.peers.client import Options
from opencode_a2a.peers.discovery import Preference
from opencode_a2a.peers.wire import Version, read_binding


def options(client: ClientSettings) -> Options:
    bindings = (read_binding(name) for name in client.supported_transports)
    line = Version(client.protocol_version) if client.protocol_version else None
    return Options(
        timeout=client.timeout_seconds,
        card_timeout=client.card_fetch_timeout_seconds,
        preference=Preference(
            tuple(binding for binding in bindings if binding), client.use_client_preference, line
        ),
        polling=client.polling_fallback_enabled,
        poll_first=client.polling_fallback_initial_interval_seconds,
        poll_most=client.polling_fallback_max_interval_seconds,
        poll_factor=client.polling_fallback_backoff_multiplier,
        poll_timeout=client.polling_fallback_timeout_seconds,
    )
