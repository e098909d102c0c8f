"""Arbitrary events and logs, for properties."""

from typing import get_args

from hypothesis import strategies as st

from opencode_a2a.events import (
    Channel,
    ChannelClosed,
    ChannelReplaced,
    DiffChanged,
    Failure,
    FileChange,
    Finished,
    Interrupted,
    Json,
    Outcome,
    PlanGrew,
    Progressed,
    ProgressType,
    Question,
    QuestionOption,
    ReasoningGrew,
    ResultGiven,
    Resumed,
    SessionBound,
    Started,
    TextGrew,
    ToolChanged,
    TurnEvent,
    Usage,
    UsageCounted,
)
from opencode_a2a.ids import MessageId, RequestId, SessionId
from opencode_a2a.log.state import Accepted, LogEvent, Recovered
from opencode_a2a.messages import Added, Answered, Message, Part, PromptPart, TurnRequest

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBER = st.integers(0, 2**40)
JSON: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
MESSAGE_ID = st.sampled_from(["msg_1", "msg_2"]).map(MessageId)
PART_ID = st.sampled_from(["prt_1", "prt_2", "prt_3"])
REQUEST_ID = st.sampled_from(["per_1", "per_2", "que_1"]).map(RequestId)
MAYBE_TEXT = st.none() | TEXT

PARTS = st.builds(
    Part,
    kind=st.sampled_from(["text", "raw", "url", "data"]),
    text=MAYBE_TEXT,
    data=JSON,
    metadata=st.none() | OBJECT,
)
MESSAGES = st.builds(
    Message,
    message_id=TEXT,
    role=st.sampled_from(["user", "agent"]),
    parts=st.lists(PARTS, max_size=3),
    metadata=st.none() | OBJECT,
    extensions=st.lists(TEXT, max_size=2),
)
REQUESTS = st.builds(
    TurnRequest,
    st.tuples(st.builds(PromptPart, TEXT)),
    user_message_id=MESSAGE_ID,
    delivery=st.sampled_from([None, "steer", "queue", "interrupt"]),
)
_GREW = (MESSAGE_ID, PART_ID, TEXT, st.just(False))
GROWTH: st.SearchStrategy[TurnEvent] = (
    st.builds(TextGrew, *_GREW) | st.builds(ReasoningGrew, *_GREW) | st.builds(PlanGrew, *_GREW)
)
QUESTIONS = st.builds(
    Question, TEXT, TEXT, st.lists(st.builds(QuestionOption, TEXT, TEXT), max_size=2)
)
INTERRUPTS = st.builds(
    Interrupted,
    request_id=REQUEST_ID,
    type=st.sampled_from(["permission", "question", "plan"]),
    session_id=st.just(SessionId("ses_1")),
    permission=MAYBE_TEXT,
    patterns=st.lists(TEXT, max_size=2),
    metadata=OBJECT,
    tool_input=st.none() | OBJECT,
    questions=st.lists(QUESTIONS, max_size=2),
    expires_at=st.none() | NUMBER,
)
USAGES = st.builds(Usage, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, st.just(0.25))
FAILURES = st.builds(Failure, TEXT, TEXT, st.none() | st.integers(400, 599))
UNFINISHED: st.SearchStrategy[TurnEvent] = st.one_of(
    GROWTH,
    st.builds(SessionBound, st.just(SessionId("ses_1")), MAYBE_TEXT, MAYBE_TEXT),
    st.builds(Started),
    st.builds(
        ChannelReplaced,
        st.sampled_from(Channel),
        MESSAGE_ID,
        st.lists(st.tuples(PART_ID, TEXT), max_size=3),
    ),
    st.builds(
        ToolChanged,
        MESSAGE_ID,
        PART_ID,
        TEXT,
        TEXT,
        st.sampled_from(["pending", "running", "completed", "error"]),
        input=st.none() | OBJECT,
        output=MAYBE_TEXT,
    ),
    st.builds(Progressed, st.sampled_from(get_args(ProgressType)), TEXT, MAYBE_TEXT),
    INTERRUPTS,
    st.builds(
        Resumed,
        REQUEST_ID,
        st.sampled_from(["permission", "question"]),
        st.sampled_from(["once", "rejected", "void"]),
    ),
    st.builds(UsageCounted, USAGES, st.none() | USAGES),
    st.builds(DiffChanged, st.lists(st.builds(FileChange, TEXT, TEXT, NUMBER), max_size=2), TEXT),
    st.builds(ResultGiven, JSON),
)
FINISHED = st.builds(
    Finished,
    st.sampled_from([outcome for outcome in Outcome if outcome is not Outcome.AUTH_REQUIRED]),
    st.none() | MESSAGE_ID,
    MAYBE_TEXT,
    JSON,
    st.none() | FAILURES,
)
ANY_EVENT: st.SearchStrategy[LogEvent] = st.one_of(
    UNFINISHED,
    FINISHED,
    st.builds(ChannelClosed, st.sampled_from(Channel), MESSAGE_ID),
    st.builds(Accepted, MESSAGES),
    st.builds(Added, MESSAGES, REQUESTS),
    st.builds(Answered, MESSAGES),
    st.builds(Recovered, TEXT),
)
