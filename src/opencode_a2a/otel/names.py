"""The names in spans: OpenTelemetry's semantic conventions, pinned, and a few of our own.

The conventions for generative AI are still in development; this is the version that we follow.
"""

CONVENTIONS = "1.41.0"
SCHEMA_URL = f"https://opentelemetry.io/schemas/{CONVENTIONS}"

# Names of spans.
INVOKE_AGENT = "invoke_agent"
EXECUTE_TOOL = "execute_tool"
WAIT = "a2a.wait"
RESUME = "a2a.resume"
WEBHOOK = "POST webhook"

# Attributes of the conventions.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL = "gen_ai.tool.name"
TOOL_CALL = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"
HTTP_METHOD = "http.request.method"
HTTP_STATUS = "http.response.status_code"
HTTP_RESENT = "http.request.resend_count"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Our own.
TASK = "a2a.task.id"
TASK_STATE = "a2a.task.state"
TURN = "a2a.turn"
COST = "a2a.usage.cost"
SESSION = "opencode.session.id"
WAIT_KIND = "a2a.wait.kind"
WAIT_OUTCOME = "a2a.wait.outcome"
WAIT_BY = "a2a.wait.by"
LINK = "a2a.link"
DELIVERY_OUTCOME = "a2a.webhook.outcome"
STARTED = "a2a.prompt_sent"
FIRST_TEXT = "a2a.first_text"
