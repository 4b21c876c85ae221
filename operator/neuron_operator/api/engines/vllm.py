"""The rows of vLLM, whose images run unchanged: AWS's with the plugin for Neuron, and the one for CPUs.

`vllm_flags` has what its versions want and refuse; here is what it does otherwise than our runtime.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from neuron_operator.api import names
from neuron_operator.api.engines import vllm_compile, vllm_connections, vllm_flags
from neuron_operator.api.engines.engine import (
    MIB,
    TORCH_BYTES,
    CompilerMemory,
    Engine,
    HostBytes,
    Launch,
    Probe,
    Probes,
    Served,
)
from neuron_operator.api.engines.own import IN_BLOCKS
from neuron_operator.api.engines.vllm_flags import LOG_REASONS, LogReasons
from neuron_operator.api.reasons import Reason

LOGGING_KEY = "vllm-logging.json"
MIDDLEWARE = Path(vllm_connections.__file__)
ENDS_CONNECTIONS = f"--middleware={MIDDLEWARE.stem}.{vllm_connections.Ends.__name__}"
PERIOD_SECONDS = 2
NUM_PROCESSES = 3
"""The server, the engine and a worker, each with torch: 0.9 GB measured."""
COMPILED_BYTES_PER_WEIGHT = 2.5
"""Of a replica that compiles as it starts, as of a Job of `nxdi`."""
ENGINE_DIED = "its engine's process ended, after which vLLM ends with exit code 0; see kubectl logs --previous"


def _cache(model: HostBytes) -> int:
    """Bytes, with the last block of each sequence, which is partly used, and the one that vLLM keeps empty."""
    return model.cache + (model.sequences + 1) * model.block


def serve(launch: Launch) -> Served:
    """`/health` stays 200 while it drains, so the pod leaves the endpoints before it is told to stop. Versions that
    cannot drain are told when the time for answers is over."""
    made = _served(launch, logging_path=f"{names.CONFIG_DIR}/{LOGGING_KEY}")
    drain, lacks = launch.document["drain"], vllm_flags.VERSIONS[launch.version].lacks
    waits = drain["delaySeconds"] + (drain["seconds"] if "--shutdown-timeout" in lacks else 0)
    env = {vllm_flags.MODULES_VARIABLE: names.CONFIG_DIR, **made.env}
    return replace(made, command=(*made.command, ENDS_CONNECTIONS), env=env, stop_delay_seconds=waits)


def _served(launch: Launch, logging_path: str = "") -> Served:
    made = vllm_flags.served(
        launch.document,
        version=launch.version,
        model_dir=launch.model_dir,
        port=names.PORT,
        family=launch.family,
        nodes=launch.nodes,
        args=launch.args,
        cache_bytes=_cache(launch.host),
        compiled_dir=launch.artifact,
        start_seconds=launch.start_seconds,
        logging_path=logging_path,
    )
    # The image knows no user of this number, whose name libraries ask for.
    return replace(made, env={"USER": "vllm", **made.env})


PROGRAM = inspect.getsource(vllm_compile)


def compile_without_devices(launch: Launch, variables: Mapping[str, str]) -> Served | None:
    """A group's graphs have its ranks in them, which no single Job has."""
    if launch.nodes > 1:
        return None
    launch = replace(launch, args=vllm_flags.without_http(launch.args))
    return vllm_flags.compiling(_served(launch), launch.args, variables, launch.version)


def job(folder: str, command: Sequence[str]) -> list[str]:
    health = f"http://localhost:{names.PORT}/health"
    return ["python3", "-c", PROGRAM, names.TERMINATION_LOG, folder, health, *command]


def refusals(launch: Launch, architecture: str, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return vllm_flags.refusals(
        launch.document,
        version=launch.version,
        nodes=launch.nodes,
        args=launch.args,
        env=variables,
        architecture=architecture,
    )


def explain(exit_code: int, message: str, rows: LogReasons = LOG_REASONS) -> tuple[Reason | None, str]:
    """Exit codes tell nothing: what it logged as an error does."""
    for pattern, reason in rows:
        if match := pattern.search(message):
            start = message.rfind("\n", 0, match.start()) + 1
            return reason, message[start:].partition("\n")[0].strip()
    error = vllm_flags.ERROR.search(message)
    return None, error[0] if error else ENGINE_DIED if exit_code == 0 else ""


_row = partial(
    Engine,
    serve=serve,
    follow=vllm_flags.followed,
    check=lambda _: [],
    refusals=refusals,
    explain=explain,
    is_ours=False,
    files={
        LOGGING_KEY: json.dumps(vllm_flags.logging_config(names.TERMINATION_LOG), indent=2),
        MIDDLEWARE.name: MIDDLEWARE.read_text(),
    },
    api_key_variable=vllm_flags.API_KEY_VARIABLE,
    address_variable=vllm_flags.ADDRESS_VARIABLE,
    user=65532,
    probes=Probes(
        startup=Probe("/health", PERIOD_SECONDS),
        readiness=Probe("/health", PERIOD_SECONDS, 1),
        # It ends by itself when its engine does, and answers nothing else that would tell.
        liveness=None,
    ),
)

CPU = _row(
    does="computes on the host",
    setting="vllm-cpu",
    # When the engine's process ended there is no device to look at.
    explain=partial(explain, rows=[row for row in LOG_REASONS if row[1] is not Reason.DEVICE_FAILED]),
    versions=tuple(name for name, version in vllm_flags.VERSIONS.items() if not version.settings),
    fields=IN_BLOCKS
    | {"parallelism.tensor", "parallelism.nodes", "engine.args", "engine.compile=Disabled"}
    | {"serving.media.maxImages", "serving.media.allowedHosts"},
    millicores=lambda _: 2000,
    memory=lambda model: NUM_PROCESSES * 2 * TORCH_BYTES + model.weights + _cache(model),
    block_size=vllm_flags.VERSIONS["cpu"].block_size,
)
VLLM = _row(
    does="computes on it",
    setting="vllm",
    versions=tuple(name for name, version in vllm_flags.VERSIONS.items() if version.settings),
    fields=CPU.fields
    | {
        "accelerator.logicalNeuronCore",
        "serving.contextBuckets",
        "serving.tokenGenerationBuckets",
        "serving.sampling",
        "engine.overrideNeuronConfig",
    },
    sampling="Device",
    on_device=True,
    devices=vllm_flags.device_rules,
    compiles="on device",
    compile=compile_without_devices,
    job=job,
    # As nxdi, whose compiler is the same, with the weights that it loads. A guess.
    compiler=CompilerMemory(bytes=8192 * MIB, per_weight_byte=3.5),
    millicores=lambda _: 1000,
    memory=lambda model: 2048 * MIB + model.loading + int(COMPILED_BYTES_PER_WEIGHT * model.weights),
    on_host=CPU,
)
