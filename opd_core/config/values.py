"""What a single setting may be: the base of every node, and types that check their value."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

Dtype = Literal["float32", "bfloat16", "float16"]


def _any_case(words: str) -> str:
    """A pattern of these words in any case, with no inline flag: browsers know none."""
    return re.sub("[a-z]", lambda letter: f"[{letter[0].upper()}{letter[0]}]", words)


_REFERENCE = r"(?:env:[A-Za-z_]|block:[A-Za-z0-9_])[\w.-]*"
KEY_REFERENCE = re.compile(_REFERENCE)
"""Where a secret is kept: an environment variable, or a Prefect Secret block."""
_NAME = (
    "(?:"
    + _any_case("token|secrets?|passwords?|passwd|passphrases?|credentials?|authorization")
    + "|(?<![A-Za-z])"
    + _any_case("(?:(?:api|access|private|secret)?keys?|auth|pass|pwd|pat)")
    + r")(?![A-Za-z])(?![\w-]*[_-]"
    + _any_case("(?:file|path|dir|ids?|num|size|len|count|map|mode|at)")
    + r"(?![\w-]))[\w-]*"
)
SECRET_NAME = re.compile(_NAME)
"""The name of a secret, from its telling word on; ``tokens`` is none, which are counted."""
_SWITCH = _any_case("true|false|yes|no|on|off") + "|[01]"
SWITCH = re.compile(f"(?:{_SWITCH})?")
_END = r"""(?=["']?\s*(?:[,}\]]+(?:[\s"'{\[]|$)|\n|$)|["']?\s+#)"""
_HARMLESS = f"(?:{_REFERENCE}|{_any_case('null')}|~|{_SWITCH}){_END}"
_VALUE = r"""[^\s"',}\]]"""
OPEN_SECRET = re.compile(
    "|".join(
        (
            rf"""{_NAME}["']?\s*[:=]\s*["']?(?!{_HARMLESS}){_VALUE}""",
            # A flag, and its value in the same item of a list or in the next.
            rf"""(?<![\w-])--?[\w-]{{0,60}}?{_NAME}["']?\s*(?:[,=]|\n\s*-\s)\s*["']?(?!-){_VALUE}""",
            r"Bearer\s+\S",
            r"://[^/?#\s]*:[^/?#\s]*@",
            _any_case("https?") + r"://[^/?#\s]*@",
            # How the keys of well-known services begin.
            r"(?:hf_|sk-|ghp_|github_pat_|glpat-|AKIA|xox[abp]-)[\w-]{16,}",
            "-----BEGIN [A-Z ]*PRIVATE KEY",
        )
    )
)
"""A secret in a text, be it YAML, JSON or a command line: a setting or a flag that is named like
one and has another value than a reference, a user or password in a URL, a key of a known shape.
Browsers can read the pattern too."""
IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
DEVICE = re.compile(r"cpu(:(0|[1-9]\d*))?|0|[1-9]\d*|GPU-[\w-]+|MIG-[\w-]+")
OWNED_FLAGS = {
    "--host",
    "--server-name",
    "--port",
    "--server-port",
    "--api-key",
    "--api-keys",
    "--admin-api-key",
}
OWNED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "launch.devices",
    "OPD_API_KEY": "the teacher's api_key",
}


class Frozen(BaseModel):
    """Base of every node: immutable, unknown keys refused, defaults checked too.

    Errors do not repeat their input, which may hold a key.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )


def is_http_url(value: str) -> bool:
    """Whether this is ``http(s)://host``, with or without a port and a path."""
    try:
        parts = urlsplit(value)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no port, half an IPv6 address
        return False
    return sound and not re.search(r"\s", value)


def without_password(uri: str) -> str:
    """The URI of an MLflow as it is. Raises ValueError for one that holds a password, or a user of
    a server, and does not repeat it."""
    scheme, _, rest = uri.partition("://")
    if scheme.lower() in ("http", "https"):
        if "@" in re.split(r"[/?#]", rest)[0]:
            raise ValueError(
                "a user name or password in the URL would be written where others read it: write "
                "the URL without them, and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment, which MLflow's client reads"
            )
    elif re.match(r"[^:/@]*:[^@]*@", rest) or re.search(r"(?i)[?&]\w*(password|passwd|pwd)=", rest):
        raise ValueError(
            "the database's password would be written where others read it: start `mlflow server "
            "--backend-store-uri` on the database, and name the server's URL, http://host:5000"
        )
    return uri


def _existing_path(value: str, info: ValidationInfo) -> str:
    """A relative path means the file beside the recipe, else the one in the working directory. It
    becomes absolute: servers and jobs run elsewhere. What exists in neither stays as written."""
    if os.path.isabs(value):
        return value
    base = (info.context or {}).get("base_dir")
    for folder in (base or ".", "."):
        # Not realpath: an interpreter of a virtual environment is a link that must stay one.
        path = os.path.abspath(os.path.join(folder, value))
        if os.path.exists(path):
            return path
    return value


def _interpreter(value: str, info: ValidationInfo) -> str:
    """A bare name is looked up on the PATH, as a shell does."""
    return _existing_path(value, info) if os.sep in value else value


def _import_path(value: str) -> str:
    if not IMPORT_PATH.fullmatch(value):
        raise ValueError(f"expected 'package.module:function', got {value!r}")
    return value


def _devices(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not DEVICE.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a device: write GPU indices or UUIDs ('0', 'GPU-…'), "
                "'cpu', or a named CPU slot ('cpu:0')"
            )
    if len(set(values)) != len(values):
        raise ValueError(f"a device is named twice: {', '.join(values)}")
    if len({value.startswith("cpu") for value in values}) > 1:
        raise ValueError(f"name either GPUs or CPU slots, not both: {', '.join(values)}")
    return values


def _endpoint(value: str) -> str:
    if set("@?#") & set(value):  # not repeated: what stands there may be a secret
        raise ValueError(
            "an endpoint may hold scheme, host, port and path only; a key belongs in api_key"
        )
    if not is_http_url(value):
        raise ValueError(f"expected a URL like http://127.0.0.1:13141, got {value!r}")
    return value.rstrip("/")


def names_a_secret(name: str) -> bool:
    """Whether a variable or a flag of this name holds a secret: ``HF_TOKEN``, ``--ssl-password``;
    not ``TOKENIZERS_PARALLELISM``, ``SSL_KEY_FILE`` or ``--max-prefill-token-num``."""
    return bool(SECRET_NAME.search(name))


def shows_a_secret(text: str) -> bool:
    """Whether a text has a secret in it on the face of it, as :data:`OPEN_SECRET` says."""
    return bool(OPEN_SECRET.search(text))


def _extra_args(values: tuple[str, ...]) -> tuple[str, ...]:
    owned = sorted(OWNED_FLAGS & {value.partition("=")[0] for value in values})
    if owned:
        raise ValueError(
            f"{', '.join(owned)} cannot stand here: the address is 127.0.0.1, the port belongs in "
            "launch.port or the endpoint, and a key in api_key (command lines are public)"
        )
    for number, (value, following) in enumerate(zip(values, (*values[1:], "-"), strict=False)):
        flag, given, inside = value.partition("=")
        named = flag.startswith("-") and names_a_secret(flag)
        valued = inside if given else not following.startswith("-")
        if (named and valued) or shows_a_secret(value):
            raise ValueError(
                f"{flag if named else f'argument {number}'} looks like a secret, and command lines "
                "are public: give it to the server in an environment variable, as env: "
                "{NAME: env:NAME} or {NAME: block:NAME}"
            )
    return values


def _environment(values: dict[str, str]) -> dict[str, str]:
    for name, instead in OWNED_VARIABLES.items():
        if name in values:
            raise ValueError(f"{name} cannot stand here: write {instead}")
    for name, value in values.items():
        named = names_a_secret(name) and not SWITCH.fullmatch(value)
        if (named or shows_a_secret(value)) and not KEY_REFERENCE.fullmatch(value):
            raise ValueError(
                f"{name} looks like a secret, which is never written in a recipe: name where it is "
                f"kept, as {name}: env:NAME (environment variable) or block:NAME (Prefect Secret "
                "block)"
            )
    return values


Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""YAML reads ``[0, 1]`` as numbers; here they are words."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
"""Names become file names, process names and command-line values."""
Endpoint = Annotated[str, AfterValidator(_endpoint)]
ModelOrPath = Annotated[str, Field(min_length=1), AfterValidator(_existing_path)]
Interpreter = Annotated[str, AfterValidator(_interpreter)]
ImportPath = Annotated[str, AfterValidator(_import_path)]
Devices = Annotated[tuple[Text, ...], Field(min_length=1), AfterValidator(_devices)]
Arguments = Annotated[tuple[Text, ...], AfterValidator(_extra_args)]
Environment = Annotated[dict[str, Text], AfterValidator(_environment)]
"""A value that is a reference, ``env:NAME`` or ``block:NAME``, is looked up when a run starts."""
Beta = Annotated[float, Field(ge=0, lt=1)]
