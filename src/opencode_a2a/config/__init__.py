# ruff: noqa: I001 - a name that is exported is imported "as" itself, in one statement a module
"""The settings of the service.

``values`` has the types, ``groups`` the declarations and the checks within a group, ``settings``
the checks between groups, and ``load`` reads flags, the environment and the settings file. ``cli``
loads the settings, ``app`` passes the groups on, ``tools/docs.py`` documents them. Nothing here
connects anywhere.
"""

from opencode_a2a.config.groups import (
    AccessSettings as AccessSettings,
    ClientSettings as ClientSettings,
    InterruptSettings as InterruptSettings,
    LimitSettings as LimitSettings,
    NoticeSettings as NoticeSettings,
    OidcSettings as OidcSettings,
    OpenCodeSettings as OpenCodeSettings,
    Problem as Problem,
    PushSettings as PushSettings,
    ServiceSettings as ServiceSettings,
    SigningSettings as SigningSettings,
    StreamSettings as StreamSettings,
    TaskSettings as TaskSettings,
    TlsSettings as TlsSettings,
)
from opencode_a2a.config.load import (
    RETIRED as RETIRED,
    default_file as default_file,
    load as load,
    load_for_calls as load_for_calls,
    load_for_opencode as load_for_opencode,
    provider_configured as provider_configured,
)
from opencode_a2a.config.schema import settings_schema as settings_schema
from opencode_a2a.config.settings import (
    CONFIG_VARIABLE as CONFIG_VARIABLE,
    FILE_VARIABLES as FILE_VARIABLES,
    GROUPS as GROUPS,
    ISSUED_PRINCIPAL as ISSUED_PRINCIPAL,
    SETTINGS as SETTINGS,
    VARIABLES as VARIABLES,
    Setting as Setting,
    Settings as Settings,
    SettingsError as SettingsError,
    StateError as StateError,
    import_command as import_command,
    import_hint as import_hint,
    misplaced as misplaced,
    show as show,
)
from opencode_a2a.config.values import (
    UNGUESSABLE as UNGUESSABLE,
    AnswerRule as AnswerRule,
    CardForm as CardForm,
    CredentialEntry as CredentialEntry,
    DatabaseUrl as DatabaseUrl,
    EmailEntry as EmailEntry,
    HttpBinding as HttpBinding,
    NoticeEntry as NoticeEntry,
    NtfyEntry as NtfyEntry,
    QuietHours as QuietHours,
    SlackEntry as SlackEntry,
    TelegramEntry as TelegramEntry,
    WebhookEntry as WebhookEntry,
    WebPushEntry as WebPushEntry,
    UpstreamEntry as UpstreamEntry,
    is_loopback as is_loopback,
    loopback as loopback,
)
