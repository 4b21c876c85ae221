"""The process that reads pictures keeps within the memory that a pod requests for them, whatever clients send."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.picture_models import PIXTRAL, write_picture_model
from neuron_runtime.config import MediaOptions

CLIENTS = 4
MAX_PIXELS = MediaOptions().max_pixels
ALLOWED = 2 * 46 * MAX_PIXELS
"""For the two pictures that are decoded at once, as the operator counts."""
KEPT = 300 << 20
READS = """
import json, sys, threading
from pathlib import Path
from neuron_runtime.config import MediaOptions, TextOptions
from neuron_runtime.pictures.reader import PixelRoom, give_memory_back, load_reader
from neuron_runtime.pictures.sources import PictureAt
from neuron_runtime.requests.texts import load_text
from PIL import Image

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

folder, clients, pixels = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
Image.new("RGB", (8192, pixels // 8192), "red").save(folder / "large.jpeg")
raw = (folder / "large.jpeg").read_bytes()
give_memory_back()
reader = load_reader(folder, load_text(folder, TextOptions()).tokenizer, MediaOptions(), 8, room=PixelRoom())
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before, sizes = kib("VmRSS"), []
threads = [
    threading.Thread(target=lambda: sizes.append(len(reader.read([PictureAt(raw, "a")])[0].pixels)))
    for _ in range(clients)
]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(json.dumps([before, kib("VmHWM"), kib("VmRSS"), sizes]))
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_clients_with_the_largest_pictures_take_no_more_memory_than_is_requested(tmp_path: Path) -> None:
    size = {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}}
    config = {**PIXTRAL.config, "vision_config": {"model_type": "pixtral", "patch_size": 16, "image_size": 1024}}
    folder = tmp_path / "model"
    write_picture_model(folder, replace(PIXTRAL, config=config, preprocessor={**PIXTRAL.preprocessor, **size}))
    command = [sys.executable, "-c", READS, str(folder), str(CLIENTS), str(MAX_PIXELS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    before, peak, after, sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == CLIENTS
    assert (peak - before) * 1024 < ALLOWED
    assert (after - before) * 1024 < KEPT, "what was freed was given back"
