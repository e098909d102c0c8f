"""Names for the kinds of identifiers, so that one is never passed for another.

Used by every layer; knows nothing of any wire format except the shape of OpenCode's ids,
which sort by time.
"""

import secrets
import threading
import time
from typing import NewType

SessionId = NewType("SessionId", str)
"""An OpenCode session: ``ses_…``."""
MessageId = NewType("MessageId", str)
"""An OpenCode message: ``msg_…``."""
RequestId = NewType("RequestId", str)
"""A permission or question that OpenCode asked: ``per_…`` or ``que_…``."""
TaskId = NewType("TaskId", str)
ContextId = NewType("ContextId", str)
Principal = NewType("Principal", str)
"""Who a credential belongs to; everything stored has one as its owner."""

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_lock = threading.Lock()
_last = 0


def new_message_id() -> MessageId:
    """Return an OpenCode message id that sorts after every one made before it."""
    global _last
    with _lock:
        _last = max(time.time_ns() // 1_000_000 * 4096, _last + 1)
        stamp = _last % 2**48
    tail = "".join(secrets.choice(_ALPHABET) for _ in range(14))
    return MessageId(f"msg_{stamp:012x}{tail}")
