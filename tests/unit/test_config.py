"""Settings: where they come from, which win, and what is refused."""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from opencode_a2a.config import (
    GROUPS,
    RETIRED,
    SETTINGS,
    VARIABLES,
    AccessSettings,
    CredentialEntry,
    ServiceSettings,
    Settings,
    SettingsError,
    load,
    load_for_calls,
    provider_configured,
    show,
)
from opencode_a2a.config.groups import Group
from opencode_a2a.opencode.upstream import withheld

TOKEN = "a-token-that-nobody-can-guess"  # noqa: S105 - made up here


EXTERNAL = {"OPENCODE_MANAGED_SERVER": "false"}


def problems(environ: dict[str, str], flags: dict[str, str] | None = None) -> list[str]:
    """Return the lines that a user sees for these variables."""
    with pytest.raises(SettingsError) as caught:
        load(flags or {}, environ)
    return [str(problem) for problem in caught.value.problems]


def test_the_documented_defaults_hold() -> None:
    settings = load({}, {"HOME": "/home/someone"})

    assert (settings.a2a.host, settings.a2a.port) == ("127.0.0.1", 8000)
    assert settings.public_url == "http://127.0.0.1:8000"
    assert settings.opencode.base_url == "http://127.0.0.1:4096"
    assert settings.opencode.startup_timeout == 120
    assert settings.opencode.timeout == 120
    assert settings.opencode.timeout_stream == 0
    assert settings.limits.max_request_body_bytes == 1048576
    assert settings.log.level is None
    assert settings.tasks.task_store_database_url is None
    assert settings.a2a.state_dir == Path("/home/someone/.local/state/opencode-a2a")
    assert (settings.sources, settings.warnings) == ({}, ())


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file, workspace = tmp_path / "token", tmp_path / "work"
    workspace.mkdir()
    file.write_text("sesame-0123456789-0123456789\n")
    named = {"A2A_BEARER_TOKEN_FILE": str(file), "OPENCODE_WORKSPACE_ROOT": str(workspace)}
    inside = workspace / "token"
    inside.write_text("sesame")

    settings = load({}, named)

    token = settings.auth.bearer_token
    assert token
    assert token.get_secret_value() == "sesame-0123456789-0123456789"
    assert settings.sources["auth.bearer_token"] == "A2A_BEARER_TOKEN_FILE"  # noqa: S105 - a name
    assert settings.warnings == ()
    for wrong, text in {
        "/nowhere": "cannot read /nowhere: No such file or directory",
        "/dev/null": "/dev/null is empty",
        str(inside): f"{inside} is in the workspace {workspace}, where the agent can read and "
        "change it; move it elsewhere",
    }.items():
        found = problems({**named, "A2A_BEARER_TOKEN_FILE": wrong})
        assert found == [f"A2A_BEARER_TOKEN_FILE: {text}"]
    assert problems({**named, "A2A_BEARER_TOKEN": "x" * 32}) == [
        "A2A_BEARER_TOKEN_FILE: set either this or A2A_BEARER_TOKEN"
    ]
    called = load_for_calls({"HOME": str(tmp_path), "A2A_CLIENT_BEARER_TOKEN_FILE": str(file)})
    assert called.client.bearer_token
    assert withheld(settings) >= {"OPENCODE_AUTH_PASSWORD_FILE", "A2A_TASK_STORE_DATABASE_URL_FILE"}


def test_a_variable_counts_in_lower_case_too_and_capitals_win() -> None:
    small = load({}, {"HOME": "/home/someone", "a2a_port": "8001"})
    both = load({}, {"HOME": "/home/someone", "a2a_port": "8001", "A2A_PORT": "8002"})
    mixed = load({}, {"HOME": "/home/someone", "A2a_Port": "8001"})

    assert [one.a2a.port for one in (small, both, mixed)] == [8001, 8002, 8000]
    assert small.sources == {"a2a.port": "a2a_port"}


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[a2a]\nport = 1\ntitle = "file"\nhost = "localhost"\n')

    settings = load({"a2a.port": "3"}, {"A2A_PORT": "2", "A2A_TITLE": "variable"}, file)

    assert settings.a2a.model_dump(include={"port", "title", "host"}) == {
        "port": 3,
        "title": "variable",
        "host": "localhost",
    }
    assert settings.sources == {
        "a2a.port": "--a2a-port",
        "a2a.title": "A2A_TITLE",
        "a2a.host": str(file),
    }


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[opencode]\nmanaged_server = true\n")

    assert load({}, {"A2A_CONFIG": str(file)}).opencode.managed_server


def test_nothing_is_read_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("A2A_PORT=1\n")
    monkeypatch.chdir(tmp_path)

    assert load({}, {}).a2a.port == 8000


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[a2a]\nprot = 1\n", "a2a.prot ({file}): no such setting; did you mean a2a.port?"),
        ("port = 1\n", "port ({file}): no such setting; did you mean port in [a2a]?"),
        ('[a2a]\nport = "x"\n', "A2A_PORT ({file}): "),
        ("port", "A2A_CONFIG: {file} is not TOML: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)

    [problem] = problems({"A2A_CONFIG": str(file)})

    assert problem.startswith(line.format(file=file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    [problem] = problems({"A2A_CONFIG": str(tmp_path / "none.toml")})

    assert problem.startswith("A2A_CONFIG: cannot read ")


def test_an_empty_variable_is_not_set() -> None:
    assert load({}, {"A2A_BEARER_TOKEN": "", "A2A_PORT": ""}) == load({}, {})


def test_all_problems_are_told_at_once() -> None:
    lines = problems(
        {"A2A_PORT": "x", "A2A_HOTS": "1", "OPENCODE_MODEL_ID": "m", "A2A_SANDBOX_MODE": "y"}
    )

    assert [line.partition(":")[0] for line in lines] == [
        "A2A_PORT",
        "A2A_SANDBOX_MODE",
        "A2A_HOTS",
        "OPENCODE_MODEL_ID",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A2A_HOTS", "no such setting; did you mean A2A_HOST?"),
        ("A2A_BEARER_TOKENS", "no such setting; did you mean A2A_BEARER_TOKEN?"),
        ("A2A_ALLOW_HOSTS", "no such setting; did you mean A2A_ALLOWED_HOSTS?"),
        ("A2A_BODY_LOG_LIMIT", "no such setting; did you mean A2A_LOG_BODY_LIMIT?"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    assert problems({name: "1"}) == [f"{name}: {hint}"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("A2A_ZZZ", "A2A_"),
        ("A2A_TOKEN", "A2A_BEARER_TOKEN"),
        ("A2A_AGENT_URL", "A2A_"),
        ("A2A_INSPECTOR_BACKEND", "A2A_"),
        ("A2A_PORT_8000_TCP_ADDR", "A2A_"),
    ],
)
def test_a_variable_of_another_program_is_a_warning_with_the_nearest_name(
    name: str, nearest: str
) -> None:
    [warning] = load({}, {name: "1"}).warnings

    assert warning.startswith(f"{name}: not a setting of this service; the nearest is {nearest}")


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_every_setting_with_a_letter_missing_is_noticed(name: str) -> None:
    cut = name[:-2] + name[-1]

    if name.startswith("A2A_"):
        assert [line.partition(":")[0] for line in problems({cut: "1"})] == [cut]
    else:  # it may be one of OpenCode's own
        text = f"{cut}: not a setting of this service; is it {name}?"
        assert load({}, {cut: "1"}).warnings == (text,)


@pytest.mark.parametrize(
    "name",
    [
        "OPENCODE",
        "OPENCODE_SERVER_PASSWORD",
        "OPENCODE_CONFIG",
        "OPENCODE_CONFIG_CONTENT",
        "OPENCODE_DISABLE_AUTOUPDATE",
        "OPENCODE_EXPERIMENTAL",
        "OPENCODE_EXPERIMENTAL_WORKSPACES",
        "OPENCODE_ENABLE_QUESTION_TOOL",
        "OPENCODE_PERMISSION",
        "OPENCODE_BIN_PATH",
        "OPENCODE_SERVICE_HOST",
        "OPENCODE_SOMETHING_NEW",
    ],
)
def test_variables_of_others_are_left_alone(name: str) -> None:
    assert load({}, {name: "x"}).warnings == ()


def test_the_removed_directory_setting_gets_a_hint() -> None:
    settings = load({}, {"OPENCODE_DIRECTORY": "/x"})

    assert settings.warnings == (
        "OPENCODE_DIRECTORY: is no longer read; set OPENCODE_WORKSPACE_ROOT",
    )


def test_an_unknown_log_level_means_warning() -> None:
    settings = load({}, {"A2A_LOG_LEVEL": "loud"})

    assert settings.log.level == "WARNING"
    assert settings.warnings == ("A2A_LOG_LEVEL: not a level, WARNING is used",)


def test_a_log_level_is_known_in_any_case() -> None:
    assert load({}, {"A2A_LOG_LEVEL": "debug"}).log.level == "DEBUG"


@pytest.mark.parametrize("text", ["a, b", '["a", "b"]'])
def test_lists_come_with_commas_or_as_json(text: str) -> None:
    assert load({}, {"A2A_ALLOWED_HOSTS": text}).auth.allowed_hosts == ("a", "b")


@given(st.lists(st.from_regex(r"[a-z][a-z.]*", fullmatch=True), max_size=5))
def test_both_spellings_of_a_list_agree(hosts: list[str]) -> None:
    commas = load({"auth.allowed_hosts": ",".join(hosts)}, {})
    array = load({"auth.allowed_hosts": json.dumps(hosts)}, {})

    assert commas.auth.allowed_hosts == array.auth.allowed_hosts == tuple(hosts)


@given(st.sampled_from(sorted(VARIABLES)), st.text(min_size=1, max_size=30))
@example("A2A_HOST", "[")
@example("A2A_HOST", "a:b/]")
@example("A2A_HOST", "::1%]")
@example("OPENCODE_MANAGED_SERVER_HOST", "127.0.0.1/x")
def test_no_value_of_a_variable_breaks_loading(name: str, value: str) -> None:
    try:
        load({}, {name: value})
    except SettingsError as error:
        assert all(name in problem.name for problem in error.problems)  # noqa: PT017 - either is right


@pytest.mark.parametrize(
    "url", ["sqlite+aiosqlite:///./x.db", "sqlite:///./x.db", "sqlite+pysqlite:///./x.db"]
)
def test_every_spelling_of_a_sqlite_url_is_one(url: str) -> None:
    settings = load({}, {"A2A_TASK_STORE_DATABASE_URL": url, **EXTERNAL})

    assert settings.tasks.task_store_database_url == "sqlite:///./x.db"


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:geheim@h/d", "postgres://u:geheim@h/d", "postgresql+psycopg://u:geheim@h/d"],
)
def test_every_spelling_of_a_postgresql_url_is_one(url: str) -> None:
    settings = load({}, {"A2A_TASK_STORE_DATABASE_URL": url})

    assert settings.database_url == "postgresql://u:geheim@h/d"
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "postgresql://u:ge/h@eim@h/d?sslmode=require",
            "postgresql://u:********@h/d?sslmode=require",
        ),
        (
            "postgresql://u@h/d?sslpassword=geheim&a=b",
            "postgresql://u@h/d?sslpassword=********&a=b",
        ),
        ("postgresql:///d", "postgresql:///d"),
    ],
)
def test_the_password_of_a_database_is_masked(url: str, shown: str) -> None:
    assert show(url) == shown


def test_a_password_in_a_flag_is_warned_about() -> None:
    settings = load({"tasks.task_store_database_url": "postgresql://u:geheim@h/d"}, {})

    [warning] = settings.warnings
    assert warning == (
        "A2A_TASK_STORE_DATABASE_URL: has a password and is a flag, which everybody on this "
        "machine can see; give it as a variable"
    )


def test_a_file_with_the_password_of_the_database_is_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[tasks]\ntask_store_database_url = "postgresql://u:geheim@h/d"\n')
    file.chmod(0o644)

    [warning] = load({}, {}, file).warnings
    file.chmod(0o600)

    assert warning == f"A2A_CONFIG: {file} holds secrets and others can read it"
    assert load({}, {}, file).warnings == ()


@pytest.mark.parametrize("url", ["mysql://u:geheim@h/d", "x.db", "postgresql:u:geheim@h/d"])
def test_another_database_is_refused_without_telling_its_password(url: str) -> None:
    [problem] = problems({"A2A_TASK_STORE_DATABASE_URL": url})

    assert "geheim" not in problem


def test_an_open_address_needs_a_credential() -> None:
    [problem] = problems({"A2A_HOST": "0.0.0.0"})  # noqa: S104 - the case under test

    assert problem.startswith("A2A_HOST: can be reached from other machines")
    assert load({}, {"A2A_HOST": "0.0.0.0", "A2A_BEARER_TOKEN": TOKEN}).auth.configured  # noqa: S104 - same
    assert load({}, {"A2A_HOST": "::1"}).public_url == "http://[::1]:8000"


OIDC = {"A2A_OIDC_ISSUER": "https://login.example/", "A2A_OIDC_AUDIENCE": "agent"}


def test_an_identity_provider_is_a_credential_enough() -> None:
    settings = load({}, {**OIDC, "A2A_HOST": "0.0.0.0", "A2A_PUBLIC_URL": "https://a.example"})  # noqa: S104 - the case under test

    assert settings.oidc.issuer == "https://login.example/"  # compared as it is written
    assert settings.knows_callers
    assert not settings.auth.configured


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"A2A_OIDC_AUDIENCE": ""}, "A2A_OIDC_AUDIENCE: should be set"),
        ({"A2A_OIDC_ISSUER": ""}, "A2A_OIDC_AUDIENCE: has no effect without A2A_OIDC_ISSUER"),
        ({"A2A_OIDC_ISSUER": "http://login.example"}, "A2A_OIDC_ISSUER: should be an https"),
        ({"A2A_OIDC_ISSUER": "https://x.example/?a=b"}, "A2A_OIDC_ISSUER: should be the issuer"),
        ({"A2A_OIDC_JWKS_URL": "http://x.example"}, "A2A_OIDC_JWKS_URL: should be an https"),
        ({"A2A_OIDC_ALGORITHMS": "HS256"}, "A2A_OIDC_ALGORITHMS: entry 1: "),
        ({"A2A_OIDC_ALGORITHMS": "none"}, "A2A_OIDC_ALGORITHMS: entry 1: "),
        ({"A2A_OIDC_CAPABILITY_SCOPES": '{"x": "root"}'}, "A2A_OIDC_CAPABILITY_SCOPES: x"),
        ({"A2A_OIDC_PROFILE_SCOPES": "x"}, "A2A_OIDC_PROFILE_SCOPES: should be a JSON object"),
        ({"A2A_OIDC_REQUIRED_SCOPES": 'a"b'}, "A2A_OIDC_REQUIRED_SCOPES: entry 1: "),
        (
            {
                "A2A_STATIC_AUTH_CREDENTIALS": '[{"scheme": "bearer", "principal": "oidc:x", '
                f'"token": "{TOKEN}"}}]'
            },
            "A2A_STATIC_AUTH_CREDENTIALS: oidc:x: names that begin with oidc:",
        ),
    ],
)
def test_wrong_settings_of_an_identity_provider_are_named(
    given: dict[str, str], problem: str
) -> None:
    [found] = problems({**OIDC, **given})

    assert found.startswith(problem)


def test_the_packages_for_tokens_are_named_where_they_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(_: str) -> None: ...

    monkeypatch.setattr("importlib.util.find_spec", nothing)

    [problem] = problems(OIDC)

    assert problem.startswith("A2A_OIDC_ISSUER: needs packages that are not installed")
    assert "extra `security`" in problem


PUBLIC = [{"A2A_HOST": "0.0.0.0"}, {"A2A_PUBLIC_URL": "https://agent.example"}]  # noqa: S104 - the case under test


@pytest.mark.parametrize("public", PUBLIC)
def test_a_short_token_is_refused_where_others_can_try_it(public: dict[str, str]) -> None:
    entries = json.dumps([{"scheme": "bearer", "principal": "anna", "token": "geheim"}])
    flag = {"A2A_ALLOW_SHORT_TOKENS": "true"}

    alone = problems({**public, "A2A_BEARER_TOKEN": "geheim"})
    listed = problems({**public, "A2A_STATIC_AUTH_CREDENTIALS": entries})
    warnings = load({}, {**public, **flag, "A2A_BEARER_TOKEN": "geheim"}).warnings

    remedy = "use 20 or more, or set A2A_ALLOW_SHORT_TOKENS"
    assert alone == [f"A2A_BEARER_TOKEN: a token of 6 characters can be guessed; {remedy}"]
    assert listed == [
        f"A2A_STATIC_AUTH_CREDENTIALS: anna: a token of 6 characters can be guessed; {remedy}"
    ]
    assert any(warning.startswith("A2A_BEARER_TOKEN: ") for warning in warnings)


def test_short_secrets_are_warned_about() -> None:
    entries = json.dumps(
        [
            {"scheme": "bearer", "principal": "anna", "token": "geheim"},
            {"scheme": "basic", "username": "ben", "password": "geheim"},
            {"scheme": "basic", "username": "carl", "password": "x" * 20},
            {"scheme": "basic", "username": "dora", "password": "y", "enabled": False},
        ]
    )

    warnings = load({}, {"A2A_STATIC_AUTH_CREDENTIALS": entries, "A2A_BEARER_TOKEN": "t"}).warnings

    why = "is shorter than 20 characters: it can be guessed, and guessing slows its owner down"
    assert warnings == (
        f"A2A_BEARER_TOKEN: the token {why}",
        f"A2A_STATIC_AUTH_CREDENTIALS: the token of anna {why}",
        f"A2A_STATIC_AUTH_CREDENTIALS: the password of ben {why}",
    )


@pytest.mark.parametrize("token", ["geheim ", " geheim", "geheim\t", "ge\nheim", "ge\x07heim"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    entries = json.dumps([{"scheme": "bearer", "principal": "anna", "token": token}])

    lines = problems({"A2A_BEARER_TOKEN": token, "A2A_STATIC_AUTH_CREDENTIALS": entries})

    what = "should be one line of printable characters without spaces around it"
    assert lines == [
        f"A2A_BEARER_TOKEN: {what}",
        f"A2A_STATIC_AUTH_CREDENTIALS: entry 1, token: {what}",
    ]


def test_a_basic_user_name_has_no_colon() -> None:
    entries = json.dumps([{"scheme": "basic", "username": "a:b", "password": "geheim"}])

    assert problems({"A2A_STATIC_AUTH_CREDENTIALS": entries}) == [
        "A2A_STATIC_AUTH_CREDENTIALS: entry 1, username: should not contain a colon"
    ]


@pytest.mark.parametrize("secret", ["gehéim", "ge\nheim", "\x07"])
def test_a_secret_for_other_agents_fits_into_a_header(secret: str) -> None:
    peers = '[{"name": "build", "url": "https://build.example/", "credential": "BUILD"}]'

    lines = problems(
        {
            "A2A_CLIENT_BEARER_TOKEN": secret,
            "A2A_CLIENT_BASIC_AUTH": f"ben:{secret}",
            "A2A_PEERS": peers,
            "BUILD": secret,
        }
    )

    what = "should be one line of printable ASCII"
    assert lines == [
        f"A2A_CLIENT_BEARER_TOKEN: {what}",
        f"A2A_CLIENT_BASIC_AUTH: {what}",
        f"A2A_PEERS: build: the variable BUILD {what}",
    ]


@pytest.mark.parametrize(
    "given", [{"OPENCODE_WORKSPACE_ROOT": "/"}, {"OPENCODE_MANAGED_SERVER": "1"}]
)
def test_the_root_directory_is_no_workspace(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")

    assert problems(given) == [
        "OPENCODE_WORKSPACE_ROOT: the agent could change every file of this machine; choose a "
        "directory, or set OPENCODE_ALLOW_ROOT_WORKSPACE"
    ]
    assert load({}, {**given, "OPENCODE_ALLOW_ROOT_WORKSPACE": "true"}).workspace == Path("/")


def test_a_link_to_the_root_directory_is_no_workspace(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")

    assert len(problems({"OPENCODE_WORKSPACE_ROOT": str(tmp_path / "link")})) == 1


def test_the_rule_holds_for_settings_built_in_code() -> None:
    with pytest.raises(ValidationError):
        Settings(a2a=ServiceSettings(host="0.0.0.0"))  # noqa: S104 - the case under test


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("OPENCODE_PROVIDER_ID", "OPENCODE_MODEL_ID"),
        ("OPENCODE_MODEL_ID", "OPENCODE_PROVIDER_ID"),
    ],
)
def test_provider_and_model_come_together(given: str, missing: str) -> None:
    assert problems({given: "x"}) == [f"{given}: should be given together with {missing}"]


def test_the_demo_starts_opencode() -> None:
    assert load({}, {"A2A_DEMO": "true"}).opencode.managed_server
    assert problems({"A2A_DEMO": "true", "OPENCODE_MANAGED_SERVER": "false"}) == [
        "A2A_DEMO: starts OpenCode, so leave OPENCODE_MANAGED_SERVER on"
    ]


def test_a_managed_workspace_is_a_directory(tmp_path: Path) -> None:
    root = {"OPENCODE_WORKSPACE_ROOT": str(tmp_path / "none")}

    assert load({}, root | EXTERNAL).workspace == tmp_path / "none"
    assert problems(root) == [f"OPENCODE_WORKSPACE_ROOT: {tmp_path}/none is not a directory"]


def test_a_managed_opencode_works_in_the_current_directory() -> None:
    assert load({}, {"OPENCODE_MANAGED_SERVER": "yes"}).workspace == Path.cwd()
    assert load({}, EXTERNAL).workspace is None


def test_opencode_is_started_unless_one_is_named() -> None:
    named = {"OPENCODE_BASE_URL": "http://127.0.0.1:4096"}

    assert load({}, {}).opencode.managed_server is True
    assert load({}, named).opencode.managed_server is False
    assert load({}, {**named, "OPENCODE_MANAGED_SERVER": "true"}).opencode.managed_server is True
    assert load({}, EXTERNAL).opencode.managed_server is False


def test_the_demo_works_in_a_project_of_its_own_unless_one_is_named(tmp_path: Path) -> None:
    demo = {"A2A_DEMO": "true", "A2A_STATE_DIR": "/state"}

    assert load({}, demo).workspace == Path("/state/demo-workspace")
    assert load({}, {**demo, "OPENCODE_WORKSPACE_ROOT": str(tmp_path)}).workspace == tmp_path


def test_the_users_own_file_is_read_without_being_named(tmp_path: Path) -> None:
    file = tmp_path / "config" / "opencode-a2a" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[a2a]\nport = 9000\n")
    home = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    assert load({}, home).sources == {"a2a.port": str(file)}
    assert load({}, {**home, "A2A_PORT": "9001"}).a2a.port == 9001
    assert load({}, {"HOME": str(tmp_path / "home")}).sources == {}


def test_who_calls_has_no_settings_of_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / ".config" / "opencode-a2a" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[a2a]\nport = 0\nstate_dir = "/state"\n[client]\ntimeout_seconds = 7\n')
    monkeypatch.chdir(tmp_path)  # no service could work here: its state would be in the workspace

    settings = load_for_calls({"HOME": str(tmp_path), "A2A_HOST": "everywhere!"})

    assert (settings.a2a.state_dir, settings.client.timeout_seconds) == (Path("/state"), 7)
    with pytest.raises(SettingsError, match="A2A_CLIENT_TIMEOUT_SECONDS: "):
        load_for_calls({"A2A_CLIENT_TIMEOUT_SECONDS": "x"})


@pytest.mark.parametrize(
    "environ",
    [
        {"A2A_WRITE_ACCESS_SCOPE": "none"},
        {"A2A_WRITE_ACCESS_SCOPE": "workspace_only", "OPENCODE_WORKSPACE_ROOT": "/w"},
        {"A2A_SANDBOX_FILESYSTEM_SCOPE": "workspace_only", "OPENCODE_WORKSPACE_ROOT": "/w"},
    ],
)
def test_declared_roots_fit_the_declared_scope(environ: dict[str, str]) -> None:
    [problem] = problems({**environ, **EXTERNAL, "A2A_SANDBOX_WRITABLE_ROOTS": "/elsewhere"})

    assert problem.startswith("A2A_SANDBOX_WRITABLE_ROOTS: ")


def test_declared_roots_in_the_workspace_fit() -> None:
    environ = {
        "OPENCODE_WORKSPACE_ROOT": "/w",
        "A2A_WRITE_ACCESS_SCOPE": "workspace_only",
        "A2A_SANDBOX_WRITABLE_ROOTS": "/w/a,/w/b",
        **EXTERNAL,
    }

    roots = load({}, environ).environment.sandbox_writable_roots

    assert roots == (Path("/w/a"), Path("/w/b"))


def test_several_credentials_are_understood() -> None:
    entries = """[
        {"scheme": "bearer", "principal": "anna", "token": "t1", "credential_id": "a"},
        {"scheme": "basic", "username": "ben", "password": "p", "capabilities": []},
        {"scheme": "basic", "username": "carl", "password": "p"}
    ]"""

    auth = load({}, {"A2A_STATIC_AUTH_CREDENTIALS": entries}).auth

    assert auth.static_auth_credentials
    assert [(c.owner, sorted(c.granted)) for c in auth.static_auth_credentials] == [
        ("anna", []),
        ("ben", []),
        ("carl", ["session_shell", "workspace_mutation"]),
    ]


BEARER = {"scheme": "bearer", "principal": "anna", "token": "geheim"}
BASIC = {"scheme": "basic", "username": "ben", "password": "geheim"}


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [{**BEARER, "principal": None}],
        [{**BEARER, "username": "x"}],
        [{**BASIC, "principal": "x"}],
        [{**BASIC, "password": ""}],
        [{**BEARER, "scheme": "digest"}],
        [{**BEARER, "capabilities": ["everything"]}],
        [{**BEARER, "extra": 1}],
        [{**BEARER, "enabled": False}],
        [BEARER, BEARER],
        [{**BEARER, "credential_id": "a"}, {**BASIC, "credential_id": "a"}],
        {"scheme": "bearer"},
        "geheim",
    ],
)
def test_wrong_credentials_are_refused_and_not_told(entries: object) -> None:
    text = entries if isinstance(entries, str) else json.dumps(entries)

    lines = problems({"A2A_STATIC_AUTH_CREDENTIALS": text})

    assert {line.partition(":")[0] for line in lines} == {"A2A_STATIC_AUTH_CREDENTIALS"}
    assert "geheim" not in "".join(lines)


def test_a_secret_is_not_shown_by_accident() -> None:
    auth = AccessSettings(
        bearer_token=SecretStr("geheim"),
        static_auth_credentials=(CredentialEntry.model_validate(BEARER),),
    )

    assert "geheim" not in repr(Settings(auth=auth))


def test_what_holds_a_secret_is_known() -> None:
    assert {s.variable for s in SETTINGS.values() if s.secret} == {
        "A2A_BEARER_TOKEN",
        "A2A_STATIC_AUTH_CREDENTIALS",
        "A2A_NOTIFY",
        "A2A_PEERS",
        "OPENCODE_AUTH_PASSWORD",
        "OPENCODE_UPSTREAMS",
        "A2A_CLIENT_BEARER_TOKEN",
        "A2A_CLIENT_BASIC_AUTH",
        "A2A_TLS_KEY_PASSWORD",
    }


@pytest.mark.parametrize("text", ["user:pass", "dXNlcjpwYXNz"])
def test_basic_credentials_come_plain_or_in_base64(text: str) -> None:
    basic = load({}, {"A2A_CLIENT_BASIC_AUTH": text}).client.basic_auth

    assert basic
    assert basic.get_secret_value() == "user:pass"


@pytest.mark.parametrize("text", ["user", "geheim!", "////"])
def test_other_basic_credentials_are_refused(text: str) -> None:
    assert problems({"A2A_CLIENT_BASIC_AUTH": text}) == [
        "A2A_CLIENT_BASIC_AUTH: should be user:password, or that in base64"
    ]


def test_transports_are_known_by_their_usual_spellings() -> None:
    client = load({}, {"A2A_CLIENT_SUPPORTED_TRANSPORTS": "http_json,json-rpc"}).client

    assert client.supported_transports == ("HTTP+JSON", "JSONRPC")


def test_a_binding_that_is_not_spoken_is_refused() -> None:
    assert problems({"A2A_CLIENT_SUPPORTED_TRANSPORTS": "JSONRPC,GRPC"}) == [
        "A2A_CLIENT_SUPPORTED_TRANSPORTS: entry 2: should be 'HTTP+JSON' or 'JSONRPC'"
    ]


@pytest.mark.parametrize(
    ("given", "prefix"),
    [("/agents/coder/", "/agents/coder"), ("/", ""), ("/a.b_c~d-1", "/a.b_c~d-1")],
)
def test_a_path_prefix_has_no_slash_at_its_end(given: str, prefix: str) -> None:
    assert load({}, {"A2A_PATH_PREFIX": given}).a2a.path_prefix == prefix


@pytest.mark.parametrize("given", ["coder", "/a//b", "/a?b", "/../x", "/a/.well-known", "/a b"])
def test_other_path_prefixes_are_refused(given: str) -> None:
    [problem] = problems({"A2A_PATH_PREFIX": given})

    assert problem.startswith("A2A_PATH_PREFIX: should ")


@pytest.mark.parametrize("public", ["https://x.example", "https://x.example/agent"])
def test_the_public_url_has_the_prefix_once(public: str) -> None:
    settings = load({}, {"A2A_PUBLIC_URL": public, "A2A_PATH_PREFIX": "/agent"})

    assert settings.public_url == "https://x.example/agent"


@pytest.mark.parametrize("key", sorted(RETIRED))
def test_a_retired_setting_is_accepted_everywhere_and_said_to_have_no_effect(
    key: str, tmp_path: Path
) -> None:
    group, _, field = key.partition(".")
    retired, file = RETIRED[key], tmp_path / "config.toml"
    file.write_text(f"[{group}]\n{field} = 3\n")

    ways = [load({}, {}, file), load({}, {retired.variable: "3"}), load({key: "3"}, {})]
    ways.append(load({}, {retired.variable.lower(): "3"}))

    before = getattr(GROUPS[group], field)
    names = [f"{key} ({file})", retired.variable, retired.flag, retired.variable.lower()]
    assert [one.warnings for one in ways] == [(f"{name}: {retired.text}",) for name in names]
    assert [getattr(one.groups[group], field) for one in ways] == [before] * len(ways)
    assert key not in SETTINGS


def test_protocol_versions_ignore_the_patch_number() -> None:
    settings = load({}, {"A2A_PROTOCOL_VERSION": "1.0.1"})

    assert settings.a2a.protocol_version == "1.0"


def test_the_default_version_is_one_that_is_spoken() -> None:
    assert problems({"A2A_SUPPORTED_PROTOCOL_VERSIONS": "1.0"}) == [
        "A2A_PROTOCOL_VERSION: is not among A2A_SUPPORTED_PROTOCOL_VERSIONS"
    ]


def test_a_peer_takes_its_token_from_the_variable_it_names() -> None:
    peers = '[{"name": "build", "url": "https://build.example/", "credential": "A2A_BUILD_TOKEN"}]'

    [peer] = load({}, {"A2A_PEERS": peers, "A2A_BUILD_TOKEN": "geheim"}).a2a.peers

    assert peer.url == "https://build.example"
    assert peer.token
    assert peer.token.get_secret_value() == "geheim"


def test_a_peer_without_its_variable_is_refused() -> None:
    peers = '[{"name": "build", "url": "https://build.example", "credential": "BUILD"}]'

    assert problems({"A2A_PEERS": peers}) == ["A2A_PEERS: build: the variable BUILD is not set"]


def test_permission_rules_are_understood() -> None:
    rules = '[{"permission": "bash", "pattern": "git *", "action": "allow"}]'

    [rule] = load({}, {"A2A_PERMISSION_RULES": rules}).interrupts.permission_rules

    assert (rule.permission, rule.pattern, rule.action) == ("bash", "git *", "allow")


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://", "127.0.0.1:4096", "http://u:geheim@h", "http://h:geheim", "http://["],
)
def test_a_wrong_url_is_refused_and_not_told(url: str) -> None:
    [problem] = problems({"OPENCODE_BASE_URL": url})

    assert problem.startswith("OPENCODE_BASE_URL: should ")
    assert "geheim" not in problem


def test_a_file_with_secrets_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f'[auth]\nbearer_token = "{TOKEN}"\n')
    file.chmod(0o644)

    settings = load({}, {}, file)

    assert settings.warnings == (f"A2A_CONFIG: {file} holds secrets and others can read it",)


def test_the_database_is_by_default_in_the_state_directory_one_for_each_workspace() -> None:
    def database(**variables: str) -> str:
        settings = load({}, {"A2A_STATE_DIR": "/state", **EXTERNAL, **variables})
        return settings.database_url

    one = database(OPENCODE_WORKSPACE_ROOT="/srv/my project")
    assert re.fullmatch(r"sqlite:////state/tasks/my-project-[0-9a-f]{8}\.db", one)
    assert database(OPENCODE_WORKSPACE_ROOT="/srv/my project", A2A_PORT="9") == one
    assert database(OPENCODE_WORKSPACE_ROOT="/srv/other/my project") != one
    assert database().startswith("sqlite:////state/tasks/127-0-0-1-4096-")
    assert database(OPENCODE_BASE_URL="http://127.0.0.1:4097") != database()
    assert database(A2A_TASK_STORE_BACKEND="memory") == "sqlite://"


def workspace_with_links(path: Path) -> tuple[Path, Path]:
    """Return a workspace, and a directory outside that a link inside leads to."""
    workspace, outside = path / "workspace", path / "outside"
    workspace.mkdir()
    outside.mkdir()
    (workspace / "link").symlink_to(outside)
    (path / "alias").symlink_to(workspace)
    return workspace, outside


@pytest.mark.parametrize("place", ["workspace", "workspace/below", "workspace/link", "alias/x"])
def test_files_of_ours_are_refused_inside_the_workspace(tmp_path: Path, place: str) -> None:
    workspace, outside = workspace_with_links(tmp_path)
    there = tmp_path / place
    there.mkdir(exist_ok=True)
    file = there / "settings.toml"
    file.touch()
    root = {"OPENCODE_WORKSPACE_ROOT": str(workspace), "A2A_STATE_DIR": str(outside)}
    why = f"is in the workspace {workspace}, where the agent can read and change it; "

    assert problems({**root, "A2A_STATE_DIR": str(there)}) == [
        f"A2A_STATE_DIR: {there} {why}serve the directory of one project "
        "(OPENCODE_WORKSPACE_ROOT), or set A2A_STATE_DIR to a directory outside"
    ]
    assert problems({**root, "A2A_TASK_STORE_DATABASE_URL": f"sqlite:///{there}/x.db"}) == [
        f"A2A_TASK_STORE_DATABASE_URL: {there}/x.db {why}leave it out, or name a file outside"
    ]
    assert problems({**root, "A2A_CONFIG": str(file)}) == [
        f"A2A_CONFIG: {file} {why}move it elsewhere"
    ]


def test_files_of_ours_may_be_beside_or_above_the_workspace(tmp_path: Path) -> None:
    workspace, outside = workspace_with_links(tmp_path)
    file = tmp_path / "settings.toml"
    file.touch()

    for state in (outside, tmp_path, tmp_path / "workspace-state"):
        load(
            {},
            {
                "OPENCODE_WORKSPACE_ROOT": str(workspace),
                "A2A_STATE_DIR": str(state),
                "A2A_TASK_STORE_DATABASE_URL": f"sqlite:///{state}/x.db",
                "A2A_CONFIG": str(file),
            },
        )


def test_a_workspace_on_another_machine_has_no_files_of_ours(tmp_path: Path) -> None:
    load(
        {},
        {
            "OPENCODE_BASE_URL": "https://opencode.example",
            "OPENCODE_WORKSPACE_ROOT": str(tmp_path),
            "A2A_STATE_DIR": str(tmp_path),
        },
    )


def test_a_workspace_that_is_the_whole_machine_holds_files_of_ours_too() -> None:
    load({}, {"OPENCODE_WORKSPACE_ROOT": "/", "OPENCODE_ALLOW_ROOT_WORKSPACE": "true"})


def test_a_database_url_cannot_hide_where_its_file_is() -> None:
    [problem] = problems({"A2A_TASK_STORE_DATABASE_URL": "sqlite:///file:x.db?uri=true"})

    assert problem == ("A2A_TASK_STORE_DATABASE_URL: should name a file as it is, not as file:…")


def test_a_provider_is_found_by_key_login_or_configuration(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    login = tmp_path / ".local" / "share" / "opencode" / "auth.json"
    config = tmp_path / ".config" / "opencode" / "opencode.json"
    for file in (login, config):
        file.parent.mkdir(parents=True)
        file.write_text("{}")

    assert not provider_configured(load({}, home), home)
    assert provider_configured(load({}, home), {**home, "ANTHROPIC_API_KEY": "k"})
    assert provider_configured(
        load({"opencode.provider_id": "p", "opencode.model_id": "m"}, home), home
    )
    login.write_text('{"anthropic": {"type": "api", "key": "k"}}')
    assert provider_configured(load({}, home), home)
    login.unlink()
    config.write_text('{"model": "anthropic/claude"}')
    assert provider_configured(load({}, home), home)


@pytest.mark.parametrize("name", ["opencode.json", "opencode.jsonc", ".opencode/opencode.json"])
@pytest.mark.parametrize("above", [False, True])
def test_a_provider_in_the_project_is_one(tmp_path: Path, name: str, above: bool) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    workspace = project / "src" if above else project
    home = {"HOME": str(tmp_path / "home"), "OPENCODE_WORKSPACE_ROOT": str(workspace)}
    before = provider_configured(load({}, home), home)

    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text('{"provider": {"local": {}}}')

    assert not before
    assert provider_configured(load({}, home), home)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"A2A_DEMO": "true"}, ("bash", "edit", "webfetch")),
        ({"A2A_DEMO": "true", "OPENCODE_ASK": "none"}, ()),
        ({"OPENCODE_MANAGED_SERVER": "true"}, ()),
        ({"OPENCODE_MANAGED_SERVER": "true", "OPENCODE_ASK": "all"}, ("bash", "edit", "webfetch")),
        ({"OPENCODE_MANAGED_SERVER": "true", "OPENCODE_ASK": "edit, bash"}, ("edit", "bash")),
    ],
)
def test_what_opencode_is_made_to_ask_for(given: dict[str, str], wanted: tuple[str, ...]) -> None:
    assert load({}, given).asked_for == wanted


def test_asking_needs_an_opencode_that_is_started_here_and_a_permission_that_exists() -> None:
    assert problems({"OPENCODE_ASK": "all", **EXTERNAL}) == [
        "OPENCODE_ASK: is for an OpenCode that this program starts, so start it with --managed, "
        "or set `permission` in its configuration"
    ]
    (problem,) = problems({"OPENCODE_MANAGED_SERVER": "true", "OPENCODE_ASK": "bash,rm"})
    assert problem == "OPENCODE_ASK: should be all, none, or some of bash, edit and webfetch"


def test_a_misspelt_name_of_the_settings_file_is_an_error() -> None:
    (problem,) = problems({"A2A_CONFIGG": "/etc/a2a.toml"})
    assert problem == "A2A_CONFIGG: no such setting; did you mean A2A_CONFIG?"


def test_a_rule_for_what_is_never_asked_is_a_warning_with_the_nearest_name() -> None:
    rules = '[{"permission": "write", "action": "deny"}, {"permission": "bsh", "action": "ask"}]'

    settings = load({}, {"A2A_PERMISSION_RULES": rules})

    told = [text for text in settings.warnings if text.startswith("A2A_PERMISSION_RULES")]
    advice = [text.rpartition("; ")[2] for text in told]
    assert advice == ["did you mean edit?", "did you mean bash?"]


def fleet(*entries: Mapping[str, object], **variables: str) -> dict[str, str]:
    return {"OPENCODE_UPSTREAMS": orjson.dumps(entries).decode(), **variables}


A, B = {"name": "a", "url": "http://oc-a:4096"}, {"name": "b", "url": "http://oc-b:4096"}


def test_upstreams_are_settings_of_their_own() -> None:
    secured = {**A, "password_variable": "OC_A", "max_turns": 3}
    loaded = load({}, fleet(secured, {"name": "own", "managed": 2}, OC_A="secret"))

    own = {entry.name: settings.opencode for entry, settings in loaded.fleet}

    assert list(own) == ["a", "own-1", "own-2"]
    assert own["a"].base_url == "http://oc-a:4096"
    assert own["a"].auth_password is not None
    assert own["a"].auth_password.get_secret_value() == "secret"
    assert own["a"].max_concurrent_streams == 3
    assert [one.managed_server for one in own.values()] == [False, True, True]


def test_an_upstream_of_one_replica_bears_its_name() -> None:
    database = {"A2A_TASK_STORE_DATABASE_URL": "postgresql://x@db/x", "A2A_REPLICA_NAME": "r1"}
    here = {"name": "here", "url": "http://127.0.0.1:4096"}
    everybodys = {"name": "all", "url": "http://127.0.0.1:4097", "shared": True}

    loaded = load({}, fleet(A, here, everybodys, {"name": "own", "managed": 1}, **database))

    assert [entry.name for entry, _ in loaded.fleet] == ["a", "here@r1", "all", "own@r1"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([A, {**B, "name": "a"}], "has the same name twice, a; give each its own"),
        ([A, {**B, "url": "http://oc-a:4096/"}], "has the same url twice"),
        ([{"name": "a"}], "should have either url or managed"),
        ([{**A, "managed": 1}], "should have either url or managed"),
        ([{"name": "a", "managed": 1, "shared": True}], "are for an entry with a url"),
        ([{"name": "a", "managed": 2}, {**A, "name": "a-1"}], "has the same name twice"),
        ([{**A, "drain": True}], "drains every entry"),
        ([{**A, "password_variable": "OC_A"}], "a: the variable OC_A is not set"),
        ([{**A, "directories": ["/elsewhere"]}, B], "is outside of OPENCODE_WORKSPACE_ROOT"),
        ([{**A, "name": "a b"}], "name"),
    ],
)
def test_a_wrong_fleet_is_refused(entries: list[Mapping[str, object]], said: str) -> None:
    [problem] = problems(fleet(*entries, OPENCODE_WORKSPACE_ROOT="/srv"))

    assert problem.startswith("OPENCODE_UPSTREAMS: ")
    assert said in problem


@pytest.mark.parametrize("name", ["a b", "a\nb", "x" * 101])
def test_a_name_of_a_replica_that_cannot_be_shown_is_refused(name: str) -> None:
    [problem] = problems({"A2A_REPLICA_NAME": name})

    assert problem == "A2A_REPLICA_NAME: should have at most 100 characters, without spaces"


@pytest.mark.parametrize(
    "variable",
    [
        *("A2A_AUDIT_FILE", "A2A_TLS_CERT_FILE", "A2A_SIGNING_KEY_FILE"),
        *("A2A_SIGNING_PREVIOUS_KEY_FILES", "A2A_CLIENT_CA_FILE", "A2A_CLIENT_CERT_FILE"),
    ],
)
def test_no_file_of_ours_may_be_inside_the_workspace(tmp_path: Path, variable: str) -> None:
    workspace, outside = workspace_with_links(tmp_path)
    file = workspace / "file.pem"
    root = {"OPENCODE_WORKSPACE_ROOT": str(workspace), "A2A_STATE_DIR": str(outside)}

    found = problems({**root, variable: str(file)})

    why = f"is in the workspace {workspace}, where the agent can read and change it"
    assert f"{variable}: {file} {why}; move it elsewhere" in found


def test_a_variable_of_two_settings_is_refused() -> None:
    with pytest.raises(TypeError, match="A2A_PORT: two settings have the same variable"):

        class Again(  # pyright: ignore[reportUnusedClass] - it is refused
            Group, prefix="A2A_"
        ):
            port: int = 1


def test_zero_is_no_limit_for_a_turn_too() -> None:
    assert load({}, {"OPENCODE_TIMEOUT_STREAM": "0"}).opencode.timeout_stream == 0


NTFY = {"kind": "ntfy", "url": "https://ntfy.example.org/topic", "token": "tk_secret"}
REACHED = {"A2A_PUBLIC_URL": "https://agent.example.org"}


def notifying(*entries: object, **more: str) -> dict[str, str]:
    return {"A2A_NOTIFY": json.dumps(entries), **REACHED, **more}


def test_a_message_needs_the_address_for_its_link_and_somebody_it_is_for() -> None:
    two = json.dumps(
        [
            {"scheme": "bearer", "principal": name, "token": f"a-long-token-for-{name}"}
            for name in ("ann", "bob")
        ]
    )
    without = {"A2A_NOTIFY": json.dumps([NTFY])}
    shared = notifying(NTFY, A2A_STATIC_AUTH_CREDENTIALS=two)

    assert problems(without)[0].startswith("A2A_PUBLIC_URL: is needed for the links of A2A_NOTIFY")
    assert "name those it is for in `principals`" in problems(shared)[0]
    for principals in (["*"], ["ann"]):
        named = notifying({**NTFY, "principals": principals}, A2A_STATIC_AUTH_CREDENTIALS=two)
        (entry,) = load({}, named).notices.notify
        assert entry.concerns("ann")
        assert entry.concerns("bob") == (principals == ["*"])


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (notifying({"kind": "pager"}), "A2A_NOTIFY: entry 1: 'kind' should be one of 'ntfy', "),
        (notifying({}), "A2A_NOTIFY: entry 1: 'kind' is missing"),
        ({"A2A_NOTIFY": json.dumps(NTFY)}, "A2A_NOTIFY: should be an array"),
        (
            notifying({"kind": "telegram", "token": "123456:ABC-DEF", "chat": []}),
            "A2A_NOTIFY: entry 1, telegram, chat: should be the id of a chat, such as ",
        ),
        (
            {"A2A_STATIC_AUTH_CREDENTIALS": "[]"},
            "A2A_STATIC_AUTH_CREDENTIALS: should have an entry",
        ),
        (notifying({"kind": "slack", "url": "hunter2"}), "A2A_NOTIFY: entry 1, slack, url"),
        (notifying({**NTFY, "url": "http://ntfy.sh/t"}), "A2A_NOTIFY: entry 1, ntfy, url"),
        (notifying({**NTFY, "url": "https://ntfy.sh/"}), "A2A_NOTIFY: entry 1, ntfy, url"),
        (notifying({"kind": "telegram", "token": "hunter2", "chat": 1}), "token: should be"),
        (notifying(NTFY, NTFY), "A2A_NOTIFY: has the same name twice, ntfy"),
        (notifying(NTFY, A2A_NOTIFY_QUIET="22-7"), "A2A_NOTIFY_QUIET: should be two times"),
        (notifying(NTFY, A2A_NOTIFY_QUIET="22:00-07:00 Mars/X"), "is not a time zone"),
        ({"A2A_NOTIFY_QUIET": "22:00-07:00"}, "A2A_NOTIFY_QUIET: has no effect"),
        (
            notifying(
                {
                    "kind": "email",
                    "server": "mail.example.org",
                    "security": "none",
                    "username": "me",
                    "password": "hunter2",
                    "sender": "me@example.org",
                    "to": "me@example.org",
                }
            ),
            "would send the password in the clear",
        ),
    ],
)
def test_wrong_targets_are_named_without_their_secrets(
    environ: dict[str, str], problem: str
) -> None:
    found = problems(environ)

    assert problem in found[0]
    assert "hunter2" not in str(found)


def test_secrets_of_targets_are_masked_and_quiet_hours_are_written_as_given() -> None:
    settings = load({}, notifying(NTFY, A2A_NOTIFY_QUIET="22:00-07:00 Europe/Berlin"))

    assert "tk_secret" not in show(settings.notices.notify)
    assert SETTINGS["notices.notify"].secret
    assert show(settings.notices.notify_quiet) == "22:00-07:00 Europe/Berlin"


@pytest.mark.parametrize(
    ("clock", "hours"),
    [("21:59", 0), ("22:00", 9), ("23:30", 7.5), ("06:59", 1 / 60), ("07:00", 0), ("12:00", 0)],
)
def test_quiet_hours_may_span_midnight(clock: str, hours: float) -> None:
    settings = load({}, notifying(NTFY, A2A_NOTIFY_QUIET="22:00-07:00 Europe/Berlin"))
    at = datetime.fromisoformat(f"2026-07-01T{clock}:00+02:00").timestamp()

    assert settings.notices.notify_quiet is not None
    assert settings.notices.notify_quiet.left(at) == pytest.approx(hours * 3600)
