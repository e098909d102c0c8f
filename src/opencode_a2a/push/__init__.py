"""Push notifications: due webhooks are claimed, and their next change is sent."""
