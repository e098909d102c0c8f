"""The settings: from flags of ``serve``, the environment, one TOML file, or their defaults.

``values`` has the kinds of values, ``groups`` the settings, ``settings`` puts them together and
checks them against each other, ``loading`` finds them. ``cli`` loads them, ``app`` passes the
groups on, ``tools/docs.py`` prints them. Nothing here starts anything or connects anywhere.
"""

from opencode_a2a.config.groups import (
    AccessSettings,
    ClientSettings,
    EnvironmentSettings,
    InterruptSettings,
    LimitSettings,
    OpenCodeSettings,
    ServiceSettings,
    StreamSettings,
    TaskSettings,
    TurnSettings,
)
from opencode_a2a.config.load import load, provider_configured
from opencode_a2a.config.settings import (
    CONFIG_VARIABLE,
    GROUPS,
    SETTINGS,
    VARIABLES,
    Setting,
    Settings,
    SettingsError,
    StateError,
    import_command,
    import_hint,
    loopback,
    misplaced,
    show,
)
from opencode_a2a.config.values import (
    UNGUESSABLE,
    AnswerRule,
    CredentialEntry,
    DatabaseUrl,
    database_file,
)

__all__ = [
    "CONFIG_VARIABLE",
    "GROUPS",
    "SETTINGS",
    "UNGUESSABLE",
    "VARIABLES",
    "AccessSettings",
    "AnswerRule",
    "ClientSettings",
    "CredentialEntry",
    "DatabaseUrl",
    "EnvironmentSettings",
    "InterruptSettings",
    "LimitSettings",
    "OpenCodeSettings",
    "ServiceSettings",
    "Setting",
    "Settings",
    "SettingsError",
    "StateError",
    "StreamSettings",
    "TaskSettings",
    "TurnSettings",
    "database_file",
    "import_command",
    "import_hint",
    "load",
    "loopback",
    "misplaced",
    "provider_configured",
    "show",
]
