"""A benchmark of A2A servers in front of OpenCode: black box, over loopback sockets."""
