"""The function of AWS's library that fills a remote cache: as that of an earlier plugin, whose source is public."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def save_cache(local_cache_dir: str, remote_cache_dir: str, hash_key: str) -> None:
    """Copies an entry to a staging folder, then renames it. One that is there already is left as it is."""
    local, remote = Path(local_cache_dir, hash_key), Path(remote_cache_dir, hash_key)
    if not (local / "done").is_file():
        raise RuntimeError(f"local cache entry {hash_key} is incomplete")
    staging = remote.with_name(f"{hash_key}.staging")
    try:
        if os.environ.get("FAKE_VLLM_STORE") == "full":
            raise OSError("No space left on device")
        if not remote.exists():
            shutil.copytree(local, staging)
            staging.rename(remote)
    except OSError as error:
        print(f"Failed to promote cache entry {hash_key} to remote: {error}")
