"""Where a model can run: devices, instance types, memory. Called when a revision is pinned and by `plan`. Pure."""
