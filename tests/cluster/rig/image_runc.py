"""A wrapper of runc that gives build steps the certificate authorities of this machine, so that they reach package
mirrors without changes to a Dockerfile. `image_builder` configures it in BuildKit; it passes its arguments on to runc.
Standard library only: it runs isolated."""

from __future__ import annotations

import json
import os
import ssl
import sys
from pathlib import Path
from typing import Any

_TRUSTED = ssl.get_default_verify_paths()
BUNDLE = Path(_TRUSTED.cafile or _TRUSTED.openssl_cafile).resolve()
"""The certificates that programs of this machine trust, from OpenSSL's default path or $SSL_CERT_FILE."""
# /dev is a tmpfs in a step, so the file is in no layer.
BUNDLE_IN_STEP = "/dev/host-certificates.crt"
_VARIABLES = (
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CERT",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)


def with_certificates(spec: dict[str, Any]) -> dict[str, Any]:
    """The OCI runtime configuration `spec` with the bundle mounted and its variables set, unless `spec` sets them."""
    mount = {
        "destination": BUNDLE_IN_STEP,
        "type": "bind",
        "source": str(BUNDLE),
        "options": ["bind", "ro", "nosuid", "nodev"],
    }
    process = spec["process"]
    present = {variable.partition("=")[0] for variable in process["env"]}
    added = [f"{name}={BUNDLE_IN_STEP}" for name in _VARIABLES if name not in present]
    return {**spec, "mounts": [*spec["mounts"], mount], "process": {**process, "env": [*process["env"], *added]}}


def bundle_folder(arguments: list[str]) -> Path:
    """The value of runc's `--bundle`, by default the working directory."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument in ("--bundle", "-b"):
            return Path(following)
        if argument.startswith("--bundle="):
            return Path(argument.removeprefix("--bundle="))
    return Path()


def main(runc: str, arguments: list[str]) -> None:
    if {"run", "create"} & set(arguments) and BUNDLE.is_file():
        path = bundle_folder(arguments) / "config.json"
        path.write_text(json.dumps(with_certificates(json.loads(path.read_text()))))
    os.execv(runc, [runc, *arguments])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
