"""`neuron-runtime follow --config FILE`: the ranks of one node of a group that another node leads.

Runs the processes of its ranks until the leader's work is done, or one of them ends. Opens no port. After SIGTERM it
goes on, and the leader is asked to end the group in good order.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from neuron_runtime import record
from neuron_runtime.config import load_config
from neuron_runtime.console import say
from neuron_runtime.distributed.layout import layout_for
from neuron_runtime.engine.backends import check_backend
from neuron_runtime.local_settings import LocalSettings, add_local_flags
from neuron_runtime.processes.children import CONFIG_FILE, Failures
from neuron_runtime.processes.ranks import NodeRanks
from neuron_runtime.processes.run_dir import made_run_dir
from neuron_runtime.processes.supervisor import TICK_SECONDS, Signals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="Configuration document")
    add_local_flags(parser)
    record.add_flag(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Returns when the leader says that the work is done. Raises ServingError with the reason for another end."""
    config = load_config(options.config)
    check_backend(config)
    settings = LocalSettings.of(options)
    layout, signals = layout_for(config, leads=False), Signals()
    with made_run_dir() as run_dir:
        (run_dir / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
        failures, num_stops, done = Failures(), 0, False
        ranks = NodeRanks(layout.in_folder(run_dir), settings, run_dir)
        say(f"following {layout.leader} as node {layout.node} of {layout.num_nodes}, with {layout.per_node} ranks")
        try:
            while ranks.live:
                signals.sleep(TICK_SECONDS)
                ranks.kill_hung()
                if signals.num_stops > num_stops:
                    num_stops = signals.num_stops
                    say("asking the leader to end the group; running requests may finish")
                    ranks.leave()
            if ranks.failed:
                raise ranks.failure(failures)
            done = True
        finally:
            ranks.end(at_once=not done)
