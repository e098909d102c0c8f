"""Messages to a person when a task waits for them or ends, with a link to answer on a phone.

``sender`` decides what is told and when, for rows that ``push.loop`` claims; ``targets`` sends it;
``links`` signs the link of a request, and ``pages`` serves the page behind it. Only ``app`` imports
this package, and only if ``A2A_NOTIFY`` is set; ``cli`` does for its test message.
"""
