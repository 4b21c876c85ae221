"""The command `neuron-operator`: runs a subcommand and imports only what that one needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version

USAGE = """usage: neuron-operator COMMAND [flags]

  run              run the operator in a cluster
  local -f FILE    serve a manifest on this machine, without a cluster
  local --demo     the same with the demo model
  plan -f FILE     show where a manifest's model would run, and why
  crd              print the CustomResourceDefinitions, for `kubectl apply --server-side -f -`
  --version        print the version

`neuron-operator COMMAND --help` lists the flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 for success, 1 for a fault, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments[:1]:
        case ["run"]:
            from neuron_operator.run import process  # noqa: PLC0415 - kopf and the client are not needed by `local`

            return process.main(arguments[1:])
        case ["local"]:
            from neuron_operator.local import command  # noqa: PLC0415

            return command.main(arguments[1:])
        case ["plan"]:
            from neuron_operator.local import plan  # noqa: PLC0415

            return plan.main(arguments[1:])
        case ["crd"]:
            from neuron_operator.api import schema  # noqa: PLC0415

            print("---\n".join(map(schema.to_yaml, schema.DEFINITIONS)), end="")
            return 0
        case ["--version"]:
            print(f"neuron-operator {version('neuron-serving')}")
            return 0
        case ["-h" | "--help" | "help"]:
            print(USAGE)
            return 0
        case _:
            print(USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    raise SystemExit(main())
