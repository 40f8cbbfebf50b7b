"""What a single setting may be: addresses, names, devices, functions, paths."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from opd_core.config import LaunchConfig, OPDTeacherConfig, RayConfig, TaskSpecConfig

SECRET = "not-to-be-seen"

# ------------------------------------------------------------------ addresses and names


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:13141",
        "teacher",
        "ftp://127.0.0.1:13141",
        "http://",
        "http://:13141",
        "http://127.0.0.1:0",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://127.0.0.1 :13141",
    ],
)
def test_a_bad_url_is_refused_with_a_good_one(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r"expected a URL like http://127\.0\.0\.1:13141"):
        OPDTeacherConfig(name="t", endpoint=endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://me:sk-secret@host:1",
        "http://:sk-secret@host:1",
        "http://h:1?key=sk-secret",
        "http://h:1#sk-secret",
        "http://me:sk-secret@host:port",
        "ftp://me:sk-secret@host",
    ],
)
def test_a_url_that_may_hold_a_secret_is_refused_without_repeating_it(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="scheme, host, port and path only") as caught:
        OPDTeacherConfig(name="t", endpoint=endpoint)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("http://127.0.0.1:13141/", "http://127.0.0.1:13141"),
        ("https://teacher.example/v2/", "https://teacher.example/v2"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_endpoint_loses_only_its_last_slash(written: str, kept: str) -> None:
    assert OPDTeacherConfig(name="t", endpoint=written).endpoint == kept


@pytest.mark.parametrize(
    "address", ["auto", "10.0.0.1:6379", "ray://head:10001", "http://", "http://head:x"]
)
def test_a_cluster_is_named_by_its_dashboard(address: str) -> None:
    with pytest.raises(ValidationError, match="Jobs API: expected the dashboard's URL"):
        RayConfig(address=address)


@pytest.mark.parametrize("name", ["", "a b", "../up", "-flag", "a" * 65, "ä"])
def test_a_name_must_do_for_files_and_command_lines(name: str) -> None:
    with pytest.raises(ValidationError, match="name"):
        OPDTeacherConfig(name=name, endpoint="http://127.0.0.1:13141")


@pytest.mark.parametrize("path", ["math", "m.f", ":f", "m:", "m:f:g", "m:f\n", "1m:f"])
def test_a_function_is_named_by_module_and_name(path: str) -> None:
    with pytest.raises(ValidationError, match=r"expected 'package\.module:function'"):
        TaskSpecConfig(filter_func=path)


# ------------------------------------------------------------------ devices


@pytest.mark.parametrize("device", ["gpu0", "cuda:0", "-1", "00", "cpu:", "cpu:01", "GPU-", "0\n"])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(ValidationError, match="is not a device: write GPU indices or UUIDs"):
        LaunchConfig(model="/m", devices=(device,))


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["0", "0"], "named twice"),
        (["cpu", "0"], "either GPUs or CPU slots"),
        ([], "at least 1 item"),
    ],
)
def test_a_list_of_devices_makes_sense(devices: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LaunchConfig(model="/m", devices=tuple(devices))


# ------------------------------------------------------------------ arguments and environment


@pytest.mark.parametrize(
    "flag", ["--host", "--port=1", "--server-name", "--api-key", "--api-keys=k", "--admin-api-key"]
)
def test_extra_args_may_not_move_the_server_or_show_a_key(flag: str) -> None:
    with pytest.raises(ValidationError, match="cannot stand here"):
        LaunchConfig(model="/m", extra_args=("--max-total-tokens", "9", flag))


@pytest.mark.parametrize(
    ("name", "instead"), [("CUDA_VISIBLE_DEVICES", "launch.devices"), ("OPD_API_KEY", "api_key")]
)
def test_a_launchs_environment_may_not_say_what_a_field_says(name: str, instead: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot stand here: write .*{instead}"):
        LaunchConfig(model="/m", env={name: "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", SECRET),
        ("hf_token", SECRET),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("WANDB_API_KEY", SECRET),
        ("APIKEY2", SECRET),
        ("DB_PASSWORD", SECRET),
        ("PREFECT_API_AUTH_STRING", SECRET),
        ("API_KEYS", SECRET),
        ("DB_PASSWORDS", SECRET),
        ("PROXY_AUTHORIZATION", SECRET),
        ("DB_PASS", SECRET),
        ("MYSQL_PWD", SECRET),
        ("GITHUB_PAT", SECRET),
        ("SECRETS", SECRET),
        ("HF_TOKEN_2", SECRET),
        ("AUTH", SECRET),
        ("HEADER", f"X-Api-Key: {SECRET}"),
        ("PROXY", f"https://{SECRET}@proxy"),
        ("HTTPS_PROXY", f"http://me:{SECRET}@proxy:3128"),
        ("HARMLESS", "hf_" + "a1B2" * 8),
    ],
)
def test_a_secret_in_a_launchs_environment_is_a_reference(name: str, value: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} looks like a secret.* env:NAME") as caught:
        LaunchConfig(model="/m", env={name: value})
    assert value not in str(caught.value)
    for reference in ("env:SOME_NAME", "block:some-name", "block:2nd-key"):
        assert LaunchConfig(model="/m", env={name: reference}).env == {name: reference}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "4096"),
        ("SSL_KEY_FILE", "/etc/ssl/key.pem"),
        ("RAY_AUTH_TOKEN_PATH", "/run/token"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("MONKEY", "business"),
        ("COMPASS", "north"),
        ("PATH", "/bin"),
        ("AUTHOR", "me"),
        ("MAX_NEW_TOKENS", "16"),
        ("HTTPS_PROXY", "http://proxy:3128"),
    ],
)
def test_what_only_sounds_like_a_secret_is_a_variable_like_any_other(name: str, value: str) -> None:
    assert LaunchConfig(model="/m", env={name: value}).env == {name: value}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hf-token", SECRET),
        (f"--ssl-keyfile-password={SECRET}",),
        ("--proxy", f"http://me:{SECRET}@proxy"),
        ("--header", "Bearer sk-" + "a1B2" * 8),
        ("--header", f"Authorization: Bearer {SECRET}"),
        ("--header", f"X-Api-Key: {SECRET}"),
        ("--ssl-keyfile-password", "1"),
        ("--ssl-keyfile-password=-1",),
        ("--options", f'{{"api_key": "{SECRET}"}}'),
    ],
)
def test_a_secret_in_extra_args_is_sent_to_the_environment(arguments: tuple[str, ...]) -> None:
    with pytest.raises(
        ValidationError, match=r"looks like a secret.* \{NAME: env:NAME\}"
    ) as caught:
        LaunchConfig(model="/m", extra_args=arguments)
    assert SECRET not in str(caught.value)


def test_flags_about_tokens_are_no_secrets() -> None:
    arguments = ("--max-prefill-token-num", "8192", "--max-total-tokens", "9", "--trust", "sk-1")
    arguments += ("--prefill-tokens=9", "--compass", "1", "--use-token", "--last-key")
    assert LaunchConfig(model="/m", extra_args=arguments).extra_args == arguments


@pytest.mark.parametrize(
    "address", [f"http://me:{SECRET}@head:8265", f"http://head:8265?token={SECRET}"]
)
def test_an_address_of_ray_with_a_secret_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(ValidationError, match="RAY_AUTH_TOKEN_PATH") as caught:
        RayConfig(address=address)
    assert SECRET not in str(caught.value)


def test_numbers_of_a_yaml_file_are_words_in_devices_arguments_and_environment() -> None:
    launch = LaunchConfig.model_validate(
        {"model": "/m", "devices": [0, 1], "extra_args": ["--queue", 64], "env": {"LEVEL": 2}}
    )
    assert (launch.devices, launch.extra_args) == (("0", "1"), ("--queue", "64"))
    assert launch.env == {"LEVEL": "2"}


# ------------------------------------------------------------------ paths


def test_a_path_that_exists_becomes_absolute_for_processes_that_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert LaunchConfig(model="model").model == str(tmp_path / "model")
    assert LaunchConfig(model="Qwen/Qwen3-8B").model == "Qwen/Qwen3-8B"


def test_an_interpreter_is_made_absolute_but_its_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "real").touch()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    assert LaunchConfig(model="/m", python="bin/python").python == str(tmp_path / "bin/python")
    assert LaunchConfig(model="/m", python="real").python == "real"  # looked up on the PATH
