"""The process of one rank other than the leader's: loads its part of the model and repeats rank 0's steps.

Started as a command by the supervisor of `serve`, for the ranks of its node, and by that of `follow`. It knows nothing
of requests.
"""

from __future__ import annotations

import gc
import signal
import sys

from neuron_runtime.artifacts.loading import Places, load_backend
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.config import RuntimeConfig, load_config
from neuron_runtime.console import StageLines
from neuron_runtime.distributed.layout import Layout
from neuron_runtime.engine.backends import backend_package
from neuron_runtime.local_settings import LocalSettings, add_local_flags
from neuron_runtime.processes.children import RANK_MODULE, begun, child_parser
from neuron_runtime.processes.engine import Ending
from neuron_runtime.processes.group import Following, facts_of, place_of
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.watchdog import LATE_SECONDS, MIN_STEP_SECONDS, WatchedBackend
from neuron_runtime.weights.fetching import model_folder


def run_rank(
    config: RuntimeConfig, settings: LocalSettings, layout: Layout, rank: int, *, deadline: Deadline, ending: Ending
) -> None:
    """Until the leader's work is done. Raises FatalError or exceptions of the backend."""
    report, needs_weights = _report_of(layout, rank), backend_package(config).needs_weights(config)
    model_dir = model_folder(config.model, settings, report, with_weights=needs_weights)
    places = Places(settings.artifacts_dir, settings.artifacts_store, settings.on_artifact_miss)
    with Following(layout, rank, facts_of(config, model_dir), ending.at_once) as following:
        signal.signal(signal.SIGTERM, lambda number, frame: following.leave())
        following.meet()
        backend = load_backend(model_dir, config, places, report, rank=place_of(layout, rank))
        try:
            watched = WatchedBackend(backend, deadline)
            watched.warm_up(report)
            gc.collect()
            gc.freeze()
            following.follow(watched, idle=lambda: deadline.set(MIN_STEP_SECONDS, LATE_SECONDS))
            deadline.clear()
        finally:
            backend.close()


def _report_of(layout: Layout, rank: int) -> ProgressCallback:
    """The first rank of each node speaks for the node; the leader's does so elsewhere."""
    if rank > 0 and rank == layout.own_ranks[0]:
        return StageLines()
    return lambda stage, share: None


def main(arguments: list[str] | None = None) -> int:
    parser = child_parser(RANK_MODULE)
    add_local_flags(parser)
    parser.add_argument("--rank", type=int, required=True)
    options = begun(parser, arguments)
    ending = Ending("follow", options.record)

    def work() -> None:
        with Deadline(options.run_dir / f"deadline-rank-{options.rank}") as deadline:
            layout = Layout.of_folder(options.run_dir)
            config, settings = load_config(options.config), LocalSettings.of(options)
            run_rank(config, settings, layout, options.rank, deadline=deadline, ending=ending)

    return ending.code_of(work)


if __name__ == "__main__":
    sys.exit(main())
