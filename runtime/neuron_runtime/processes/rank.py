"""The process of one rank other than the leader's: loads its part of the model and repeats rank 0's steps.

Started as a command by the supervisor of `serve`, for the ranks of its node, and by that of `follow`. It knows nothing
of requests.
"""

from __future__ import annotations

import gc
import signal
import sys

from neuron_runtime.artifacts.loading import find_model, load_backend
from neuron_runtime.backend_protocol import ProgressCallback
from neuron_runtime.config import RuntimeConfig, load_config
from neuron_runtime.console import StageLines
from neuron_runtime.distributed.layout import Layout
from neuron_runtime.local_settings import LocalSettings, add_local_flags
from neuron_runtime.processes.children import RANK_MODULE, begun, child_parser
from neuron_runtime.processes.engine import Ending
from neuron_runtime.processes.group import Following, facts_of, place_of
from neuron_runtime.processes.lifeline import Deadline
from neuron_runtime.processes.watchdog import LATE_SECONDS, MIN_STEP_SECONDS, WatchedBackend


def run_rank(
    config: RuntimeConfig, settings: LocalSettings, layout: Layout, rank: int, *, deadline: Deadline, ending: Ending
) -> None:
    """Until the leader's work is done. Raises FatalError or exceptions of the backend."""
    # The first rank of each node speaks for the node; on the leader's that is the engine process.
    report: ProgressCallback = StageLines() if rank == layout.own_ranks[0] else lambda stage, share: None
    model_dir = find_model(config, settings, report)
    with Following(layout, rank, facts_of(config, model_dir), ending.at_once) as following:
        signal.signal(signal.SIGTERM, lambda number, frame: following.leave())
        following.meet()
        backend = load_backend(model_dir, config, settings, report, rank=place_of(layout, rank))
        try:
            watched = WatchedBackend(backend, deadline.set)
            watched.warm_up(report)
            gc.collect()
            gc.freeze()
            following.follow(watched, idle=lambda: deadline.set(MIN_STEP_SECONDS, LATE_SECONDS))
            deadline.clear()
        finally:
            backend.close()


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
