"""OpenCode over HTTP and server-sent events, as types."""
